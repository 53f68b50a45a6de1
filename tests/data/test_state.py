"""Tests that a loader resumes from its state at exactly the next sample, with any kind of dataset, look-ahead and
number of ranks, at any step.
"""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from made import LENGTHS, EpochStream, Numbered, StatefulStream, Stream, arguments
from misbehaving import planner

from flexcp.data.loader import Loader
from flexcp.measure.ranks import RankPool

BUDGET = 150
MODES = ["known", "read", "stream", "stateful", "epochs"]


def made(mode: str) -> Any:
    if mode in ("known", "read"):
        return Numbered(known=mode == "known")
    lengths = LENGTHS * 2  # more samples than the loader reads ahead
    return {"stream": Stream, "stateful": StatefulStream, "epochs": EpochStream}[mode](lengths)


def loader(data: Any, group: Any = None, **options: Any) -> Loader:
    ranks = 1 if group is None else group.size()
    shuffle = isinstance(data, Numbered)
    options = {"budget": BUDGET, "workers": 0, "shuffle": shuffle, "document_fields": ["images"], **options}
    return Loader(data, planner(ranks), group=group, **arguments(**options))


def described(batch: Any) -> Any:
    """Return everything of a batch that must be the same after a resume."""
    return (
        batch.epoch,
        batch.number,
        batch.samples.tolist(),
        batch.tokens.tolist(),
        batch.labels.tolist(),
        batch.valid,
    )


def saved(state: dict[str, Any]) -> Any:
    """Save and load a state, as a checkpoint does."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("mode", MODES)
def test_resume_at_every_step_of_two_epochs(mode: str) -> None:
    with loader(made(mode), lookahead=3) as whole:
        expected = [described(b) for _ in range(2) for b in whole]
    with loader(made(mode), lookahead=3) as running:
        states = [saved(running.state_dict())]
        for _ in range(2):
            for _ in running:
                states.append(saved(running.state_dict()))
        states.append(saved(running.state_dict()))
    steps = len(expected) // 2
    for at, state in enumerate(states):
        done = min(at, len(expected))
        with loader(made(mode), lookahead=(0, 1, 7)[at % 3]) as resumed:
            resumed.load_state_dict(state)
            assert saved(resumed.state_dict())["place"] == state["place"]
            got = [described(b) for b in resumed]
            if resumed.epoch < 2:
                got += [described(b) for b in resumed]
            assert got[: len(expected) - done] == expected[done:], (
                f"state {at} of {len(states)}, {steps} steps an epoch"
            )


def test_a_stateful_stream_gives_nothing_twice() -> None:
    """Samples that were read ahead and not delivered are in the state, so they are not read from the stream again."""
    with loader(StatefulStream(LENGTHS * 3), lookahead=3) as running:
        steps = iter(running)
        next(steps), next(steps)
        state = saved(running.state_dict())
        read = list(running.source.dataset.reads)
        left = [described(b) for b in steps]
    pending = [place for place, _ in state["source"]["pending"]]
    assert pending and state["source"]["stream"]["at"] == len(read)
    data = StatefulStream(LENGTHS * 3)
    with loader(data, lookahead=1) as resumed:
        resumed.load_state_dict(state)
        assert [described(b) for b in resumed] == left
    assert read + data.reads == list(range(3 * len(LENGTHS)))
    assert 0 < len(read) < 3 * len(LENGTHS)


def test_leaving_an_epoch_in_the_middle_and_coming_back_goes_on() -> None:
    for mode in MODES:
        with loader(made(mode)) as whole:
            expected = [described(b) for b in whole]
        with loader(made(mode)) as broken:
            got = []
            for batch in broken:
                got.append(described(batch))
                if len(got) == 2:
                    break
            got += [described(b) for b in broken]
        assert got == expected


def test_an_old_iterator_does_not_go_on_beside_a_new_one() -> None:
    with loader(made("known")) as data:
        old = iter(data)
        next(old)
        next(iter(data))
        with pytest.raises(RuntimeError, match="iterated again"):
            next(old)


def test_an_iterator_ends_where_its_loader_goes_on_from_another_state_or_is_closed() -> None:
    for change in (lambda data: data.load_state_dict(data.state_dict()), Loader.close):
        with loader(made("known")) as data:
            old = iter(data)
            next(old)
            change(data)
            with pytest.raises(RuntimeError, match="iterated again or loaded another state"):
                next(old)


def test_steps_that_an_iterator_ordered_are_dropped_when_another_one_begins() -> None:
    with loader(made("known"), lookahead=3) as data:
        old, ask = iter(data), data.plans.ask

        def once(step: int, order: Any) -> None:
            assert step not in data.plans.jobs, "ordered twice"  # type: ignore[union-attr]
            ask(step, order)

        data.plans.ask = once  # type: ignore[method-assign]
        next(old)
        assert next(iter(data)).number == 1


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_loader_is_not_copied(copied: Any) -> None:
    with loader(made("known")) as data, pytest.raises(TypeError, match=r"cannot be pickled or copied.*state_dict\(\)"):
        copied(data)


def test_a_closed_loader_is_not_iterated() -> None:
    data = loader(made("known"))
    data.close()
    with pytest.raises(RuntimeError, match="closed"):
        iter(data)


def part(group: Any, mode: str, state: Any, steps: int | None) -> tuple[list[Any], Any]:
    """Run some steps from a state; return samples, indices and local tokens of each step, and the state afterwards."""
    got = []
    with loader(made(mode), group) as data:
        if state is not None:
            data.load_state_dict(state)
        for batch in data:
            got.append((batch.samples.tolist(), batch.step.indices.tolist(), batch.tokens.tolist()))
            if len(got) == steps:
                break
        return got, data.state_dict()


@pytest.mark.parametrize("mode", MODES)
def test_another_number_of_ranks_goes_on_with_rank_0s_state(mode: str, pool: RankPool) -> None:
    with loader(made(mode)) as whole:
        expected = [(b.samples.tolist(), b.tokens.tolist()) for b in whole]
    got, state = [], None
    for ranks, steps in ((3, 1), (1, 1), (4, 2), (2, None)):
        found = pool.run(part, mode, state, steps, ranks=ranks)
        state = saved(found[0][1])
        for parts in zip(*(rows for rows, _ in found), strict=True):
            union = {i: t for _, indices, tokens in parts for i, t in zip(indices, tokens, strict=True)}
            got.append((parts[0][0], [union[i] for i in range(len(union))]))
    assert got == expected


def test_a_state_that_does_not_fit_is_refused() -> None:
    with loader(made("known"), seed=3) as data:
        next(iter(data))
        state = data.state_dict()
    with loader(made("known"), seed=4) as other, pytest.raises(ValueError, match=r"saved with seed=3, .* has 4"):
        other.load_state_dict(state)
    with loader(Numbered([5, 6], known=True), seed=3) as other, pytest.raises(ValueError, match="samples=24"):
        other.load_state_dict(state)
    with loader(made("known"), seed=3) as other, pytest.raises(ValueError, match="format is None"):
        other.load_state_dict({"epoch": 1})
    with loader(made("known"), seed=3) as other, pytest.raises(ValueError, match=r"what state_dict\(\) gave.*got None"):
        other.load_state_dict(None)  # type: ignore[arg-type]
    with loader(made("stream")) as stream:
        next(iter(stream))
        plain = stream.state_dict()
    with loader(made("stateful")) as other, pytest.raises(ValueError, match="load what rank 0 saved"):
        other.load_state_dict(plain)


def generated(group: bool = False) -> Iterator[dict[str, Any]]:
    """Yield samples without end, each its number twice; with ``group``, three in a row are of one group."""
    for number in itertools.count():
        yield {"tokens": [number] * 2, **({"group": number // 3} if group else {})}


def own_tokens(batch: Any) -> bool:
    """Return whether a batch without groups has the tokens of its samples."""
    return bool(batch.tokens.tolist() == [n for n in batch.samples.tolist() for _ in range(2)])


@pytest.mark.parametrize("lookahead", [0, 3])
def test_an_iterator_goes_on_from_the_state_of_where_it_is(lookahead: int) -> None:
    with loader(generated(), budget=8, lookahead=lookahead) as data:
        steps = iter(data)
        got = [next(steps), next(steps)]
        for _ in range(2):
            data.load_state_dict(saved(data.state_dict()))
            got.append(next(iter(data)))
        assert [n for batch in got for n in batch.samples.tolist()] == list(range(16))
        assert all(map(own_tokens, got))


@pytest.mark.parametrize("tree_by", [None, "group"])
def test_an_iterator_is_not_taken_to_a_place_that_it_has_passed(tree_by: str | None) -> None:
    def new() -> Loader:
        return loader(generated(tree_by is not None), budget=8, lookahead=0, tree_by=tree_by)

    with new() as data:
        steps = iter(data)
        next(steps)
        state = saved(data.state_dict())
        for _ in range(12):
            next(steps)
        expected = [saved(data.state_dict())["place"], next(steps).tokens.tolist()]
        data.load_state_dict(state)
        for _ in range(2):  # and still not when asked again
            with pytest.raises(ValueError, match=r"iterator .* cannot begin again; make the iterator and the Loader"):
                next(iter(data))
    with new() as data:
        data.load_state_dict({**state, "place": expected[0]})
        assert next(iter(data)).tokens.tolist() == expected[1]


def test_a_stream_that_begins_again_is_read_to_any_place() -> None:
    with loader(Stream(LENGTHS * 2)) as data:
        states = [saved(data.state_dict())]
        expected = []
        for batch in data:
            expected.append(described(batch))
            states.append(saved(data.state_dict()))
        for at in (3, 1, 4, 0):
            data.load_state_dict(states[at])
            assert described(next(iter(data))) == expected[at]


def test_a_torchdata_loader_is_resumed_by_its_own_state() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def new() -> Loader:
        return loader(stateful(Numbered(), batch_size=4, collate_fn=list), lookahead=2)

    with new() as whole:
        expected = [described(b) for b in whole]
    for steps in (1, 3):
        with new() as running:
            ahead = iter(running)
            got = [described(next(ahead)) for _ in range(steps)]
            state = saved(running.state_dict())
        with new() as resumed:
            resumed.load_state_dict(state)
            got += [described(b) for b in resumed]
        assert got == expected


def test_a_hugging_face_stream_is_resumed_in_any_epoch() -> None:
    datasets = pytest.importorskip("datasets")

    def rows() -> Any:
        yield from ({"tokens": [number] * length} for number, length in enumerate(LENGTHS * 2))

    def new() -> Loader:
        return loader(datasets.IterableDataset.from_generator(rows), lookahead=2)

    with new() as whole:
        expected = [described(b) for _ in range(2) for b in whole]
    for steps in (3, len(expected) // 2 + 4):
        with new() as running:
            ahead = (described(b) for _ in range(2) for b in running)
            got = [next(ahead) for _ in range(steps)]
            state = saved(running.state_dict())
        with new() as resumed:
            resumed.load_state_dict(state)
            while resumed.epoch < 2:
                got += [described(b) for b in resumed]
        assert got == expected
