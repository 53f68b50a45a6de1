"""Tests of trees in the loader: samples with the same prompt become one tree, all ranks together hold every position
of every sample once with the right label, and saved tokens are counted. Samples may also bring trees by their mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from made import arguments
from misbehaving import planner

import flexcp
from flexcp.data import Batches, Loader, Planning, Samples
from flexcp.data.reading.cut_trees import parts_that_fit
from flexcp.measure.ranks import RankPool

PROMPTS = {"a": [1, 2, 3, 4, 5], "b": [1, 2], "c": [9]}
ROLLOUTS = [("a", [6, 7]), ("a", [6, 8, 9]), ("a", [5]), ("b", [3]), ("b", [4, 4, 4]), ("c", [1, 2, 3])]
MIXED = [ROLLOUTS[i] for i in (3, 0, 5, 1, 4, 2)]


def sample(number: int, prompt: str, answer: list[int], labels: bool = False) -> dict[str, Any]:
    ids = PROMPTS[prompt] + answer
    own = {"labels": [-100] * len(PROMPTS[prompt]) + answer} if labels else {}
    return {"input_ids": ids, "prompt": prompt, "reward": float(number), **own}


class Rows:
    """A map-style dataset of prompts with answers."""

    def __init__(self, rows: list[tuple[str, list[int]]], labels: bool = False) -> None:
        self.rows, self.labels = rows, labels

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return sample(number, *self.rows[number], self.labels)


class RowStream:
    """An iterable dataset of prompts with answers that has a state."""

    def __init__(self, rows: list[tuple[str, list[int]]]) -> None:
        self.rows, self.at = rows, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self.at < len(self.rows):
            self.at += 1
            yield sample(self.at - 1, *self.rows[self.at - 1])
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def data_of(kind: str) -> Any:
    return {
        "map": lambda: Rows(MIXED),
        "labels": lambda: Rows(MIXED, labels=True),
        "stream": lambda: RowStream(ROLLOUTS),
    }[kind]()


def found_on_rank(group: Any, kind: str, budget: int = 100) -> list[dict[str, Any]]:
    ranks = 1 if group is None else group.size()
    options: dict[str, Any] = {"labels": "labels"} if kind == "labels" else {}
    got = []
    with Loader(
        data_of(kind),
        planner(ranks, "blocks"),
        budget=budget,
        group=group,
        **arguments(workers=0, tree_by="prompt", **options),
    ) as loader:
        for batch in loader:
            edges = batch.edges
            assert edges is not None
            edge, sequence, position = (x.tolist() for x in edges.pairs())
            labels = edges.labels[edge].tolist() if edge else []
            document = edges.documents[sequence].tolist() if edge else []
            first = np.searchsorted(edges.documents, edges.documents[sequence]).tolist() if edge else []
            rewards = [
                batch.values[d]["samples"][s - f]["reward"] for d, s, f in zip(document, sequence, first, strict=True)
            ]
            prompts = [batch.values[d]["prompt"] for d in document]
            got.append(
                {
                    "pairs": list(zip(prompts, rewards, position, labels, strict=True)),
                    "valid": int(batch.valid),
                    "tokens": batch.step.plan.batch.tokens,
                    "saved": loader.stats.tokens_saved,
                }
            )
    return got


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", ["map", "labels", "stream"])
@pytest.mark.parametrize("budget", [100, 10])
def test_every_position_of_every_sample_once(pool: RankPool, kind: str, ranks: int, budget: int) -> None:
    results = pool.run(found_on_rank, kind, budget, ranks=ranks)
    rows = ROLLOUTS if kind == "stream" else MIXED
    wanted = []
    for number, (prompt, answer) in enumerate(rows):
        first = len(PROMPTS[prompt]) if kind == "labels" else 1
        ids = PROMPTS[prompt] + answer
        wanted += [(prompt, float(number), p, ids[p]) for p in range(first, len(ids))]
    pairs = [pair for got in results for batch in got for pair in batch["pairs"]]
    assert sorted(pairs) == sorted(wanted)
    assert sum(batch["valid"] for batch in results[0]) == len(wanted)
    alone = sum(len(PROMPTS[p]) + len(a) for p, a in rows)
    in_trees = sum(batch["tokens"] for batch in results[0])
    # Prompt "a" is held once for three rollouts, and its token 6 once for two; prompt "b" is held once for two.
    assert alone - in_trees == 2 * 5 + 1 + 2 == results[0][-1]["saved"]
    assert (len(results[0]) > 1) == (budget == 10)


@pytest.mark.parametrize("more", [{"budget": 10}, {"budget": 9, "too_long": "cut"}])
def test_a_stream_goes_on_where_it_was(more: dict[str, Any]) -> None:
    """With the smaller budget the loader is resumed in the middle of a tree that was cut."""
    options = {"workers": 0, "lookahead": 1, "tree_by": "prompt", "group": "alone", **more}
    with Loader(RowStream(ROLLOUTS), planner(1, "blocks"), **arguments(**options)) as loader:
        whole = [batch.tokens.tolist() for batch in loader]
    with Loader(RowStream(ROLLOUTS), planner(1, "blocks"), **arguments(**options)) as loader:
        first = [next(iter(loader)).tokens.tolist()]
        state = loader.state_dict()
    with Loader(RowStream(ROLLOUTS), planner(1, "blocks"), **arguments(**options)) as loader:
        loader.load_state_dict(state)
        rest = [batch.tokens.tolist() for batch in loader]
    assert len(whole) > (2 if "too_long" in more else 1) and first + rest == whole


def test_labels_are_refused_and_named_edges() -> None:
    with Loader(
        Rows(ROLLOUTS),
        planner(1, "blocks"),
        budget=100,
        group="alone",
        samples=Samples(tree_by="prompt"),
        planning=Planning(workers=0),
    ) as loader:
        batch = next(iter(loader))
        with pytest.raises(NotImplementedError, match=r"batch.step.loss\(logits, batch.edges\)"):
            _ = batch.labels
        logits = torch.randn(len(batch.tokens), 12, dtype=torch.float64)
        assert batch.edges is not None
        assert torch.isfinite(batch.step.loss(logits, batch.edges, without_attention=True))


def test_windows_are_measured_on_the_path() -> None:
    masks = {"full": (flexcp.causal(), 1), "window": (flexcp.window(2), 3)}
    with Loader(
        Rows(ROLLOUTS),
        planner(1, "blocks"),
        budget=100,
        group="alone",
        masks=masks,
        samples=Samples(tree_by="prompt"),
        planning=Planning(workers=0),
    ) as loader:
        full, window = next(iter(loader)).step.plan.batch.masks
        assert [rule.params[:3] for rule in full.rules] == [rule.params[:3] for rule in window.rules]
        assert {rule.params[3] for rule in window.rules} == {2}


@pytest.mark.parametrize("kind", ["known", "read"])
def test_samples_may_be_trees_by_their_mask(kind: str) -> None:
    tree, ids = flexcp.tree([-1, 0, 0], [2, 1, 2]), [[5, 6, 7, 8, 9], [1, 2, 3]]
    masks = [tree, flexcp.causal()]
    options: dict[str, Any] = (
        {"mask": masks, "lengths": [5, 3]} if kind == "known" else {"mask_fn": lambda s: masks[len(s) == 3]}
    )
    with Loader(ids, planner(1, "blocks"), budget=100, group="alone", **arguments(workers=0, **options)) as loader:
        batch = next(iter(loader))
    assert batch.edges is not None
    found = sorted(
        zip(batch.edges.parents.tolist(), batch.edges.labels.tolist(), batch.edges.counts.tolist(), strict=True)
    )
    assert found == [(0, 6, 2), (1, 7, 1), (1, 8, 1), (3, 9, 1), (5, 2, 1), (6, 3, 1)]
    assert batch.valid == 7 and batch.positions[batch.step.indices.argsort()].tolist() == [0, 1, 2, 2, 3, 0, 1, 2]


@pytest.mark.parametrize("mask", [flexcp.tree([-1, 0, 0], [2, 1, 2]), flexcp.masks.shared_question(2, 0.4)], ids=str)
def test_a_tree_is_not_cut(mask: flexcp.Mask) -> None:
    for known in (True, False):
        options: dict[str, Any] = {"mask": [mask], "lengths": [5]} if known else {"mask_fn": lambda s: mask}
        with pytest.raises(ValueError, match="document 0 is a tree of 5 tokens, and a tree is not cut to 4"):
            next(
                iter(
                    Loader(
                        [[1, 2, 3, 4, 5]],
                        planner(1, "blocks"),
                        budget=4,
                        group="alone",
                        **arguments(too_long="cut", workers=0, **options),
                    )
                )
            )


CUT = [[1, 2, 3, 4], [1, 2, 3, 5, 6], [1, 2, 7], [8, 9], [8, 9, 9, 9]]


@pytest.mark.parametrize("most", [4, 5, 7, 9, 11, 100])
def test_a_tree_is_cut_between_its_sequences(most: int) -> None:
    sequences = [np.array(ids) for ids in CUT]
    parts = parts_that_fit(sequences, 1, most)
    sizes = [len(flexcp.tree_of([CUT[i] for i in part.sequences])) for part in parts]
    assert sorted(i for part in parts for i in part.sequences) == list(range(len(CUT)))
    assert all(n <= max(most, 5) for n in sizes)
    assert sum(sizes) - len(flexcp.tree_of(CUT)) == sum(part.repeated for part in parts)
    assert (len(parts) == 1) == (most >= 11)
    # The cut is where neighbouring sequences share least, between [1, ...] and [8, ...]: no token is repeated.
    assert [part.repeated for part in parts] == [0, 0] or most not in (7, 9)


def losses_on_rank(group: Any, kind: str, cap: int | None) -> tuple[float, dict[str, int], int]:
    """Return the mean loss over all positions of an epoch that is one step, the counts of saved and repeated tokens,
    and the number of micro-batches. The loss is summed from micro-batches by their weights; the model is two tables.
    """
    ranks = 1 if group is None else group.size()
    rng = torch.Generator().manual_seed(0)
    by_token, by_position = (torch.randn(12, 12, generator=rng, dtype=torch.float64) for _ in range(2))
    made = flexcp.Planner(
        2, 1, 8, dtype="float64", cluster=flexcp.cluster("cpu", 1, ranks), strategy="blocks", max_tokens_per_rank=cap
    )
    total, count = torch.zeros((), dtype=torch.float64), 0
    with Loader(
        data_of(kind),
        made,
        budget=100,
        group=group,
        samples=Samples(tree_by="prompt"),
        batches=Batches(micro_batches=cap is not None),
        planning=Planning(workers=0),
    ) as loader:
        for batch in loader:
            assert cap is None or max(batch.step.plan.placement.tokens) <= cap
            logits = by_token[batch.tokens] + by_position[batch.positions]
            total += batch.weight * batch.step.loss(logits, batch.edges, without_attention=True)
            count += 1
    if group is not None and ranks > 1:
        torch.distributed.all_reduce(total, group=group)
    return float(total), {name: loader.stats.as_json()[f"tokens_{name}"] for name in ("saved", "repeated")}, count


@pytest.mark.parametrize(("ranks", "cap", "repeated"), [(1, 9, 5), (3, 3, 5), (2, 5, 0)])
@pytest.mark.parametrize("kind", ["map", "stream"])
def test_micro_batches_cut_trees_that_do_not_fit(
    pool: RankPool, kind: str, ranks: int, cap: int, repeated: int
) -> None:
    """The tree of prompt "a" has 10 tokens. Where all ranks together hold 9, it is cut into two parts: both have the 5
    tokens of the prompt, and the token 6 after it, which two rollouts share, is in only one.
    """
    (whole, counts, _), *_ = pool.run(losses_on_rank, kind, None, ranks=1)
    assert counts == {"saved": 13, "repeated": 0}
    results = pool.run(losses_on_rank, kind, cap, ranks=ranks)
    for found, cut, batches in results:
        assert found == pytest.approx(whole, abs=1e-12) and batches > 1
        assert cut["repeated"] == repeated and cut["saved"] == counts["saved"] - cut["repeated"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tree_by": "nobody"}, "tree_by='nobody' names a field of every sample, and sample 0 has fields"),
        ({"tree_by": "input_ids"}, "groups are told apart by a number or a text"),
        ({"mask": flexcp.full()}, "is neither causal nor a window"),
        ({"mask_fn": lambda s: flexcp.causal()}, "tree_by makes the mask of each document"),
    ],
)
def test_what_is_wrong_is_told(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Loader(
            Rows(ROLLOUTS),
            planner(1, "blocks"),
            **arguments(**{"budget": 100, "workers": 0, "group": "alone", "tree_by": "prompt", **options}),
        )


def labelled(*labels: list[int] | None) -> Loader:
    """A loader of two samples of one prompt with these labels; None leaves the field out."""
    rows = [
        {"input_ids": ids, "p": 0} | ({} if own is None else {"labels": own})
        for ids, own in zip(([1, 2, 3], [1, 2, 4]), labels, strict=True)
    ]
    grouped = Samples(tree_by="p", labels="labels")
    alone = Planning(workers=0)
    return Loader(rows, planner(1, "blocks"), budget=9, group="alone", samples=grouped, planning=alone)


def test_samples_without_their_labels_are_refused_with_the_way_out() -> None:
    loader = labelled([1, 2, 3], None)
    words = r"without the field 'labels' .* it has \['input_ids', 'p'\]: give every sample labels, or leave labels= out"
    with pytest.raises(ValueError, match=words):
        next(iter(loader))


def test_labels_that_differ_on_shared_tokens_are_refused() -> None:
    loader = labelled([1, 2, 3], [1, -100, 4])
    with pytest.raises(ValueError, match="different labels in 'labels' for a token that they share"):
        next(iter(loader))
