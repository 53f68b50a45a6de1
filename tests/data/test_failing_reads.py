"""Tests that a failure while samples are read loses no sample, repeats none, and is an error on every rank that says
what happened.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from made import LENGTHS, Numbered, StatefulStream, Stream, arguments, sample, token
from misbehaving import planner

from flexcp.data import Planning, PlanningError
from flexcp.data.loader import Loader
from flexcp.measure.ranks import RankPool

BUDGET = 150
LIMIT = 120.0
"""The time limit of ranks, in seconds, that errors must not wait for."""


def loader(data: Any, group: Any = None, **options: Any) -> Loader:
    ranks = 1 if group is None else group.size()
    options = {"budget": BUDGET, "workers": 0, "document_fields": ["images"], **options}
    return Loader(data, planner(ranks), group=group, **arguments(**options))


def numbers(batches: Any) -> list[int]:
    """Return the numbers of the samples of some batches, in order."""
    return [n for batch in batches for n in batch.samples.tolist()]


def until_error(data: Loader, error: type[Exception], match: str) -> list[int]:
    """Iterate until an error that must come; return the numbers of the samples before it."""
    got: list[int] = []
    with pytest.raises(error, match=match):
        for batch in data:
            got += batch.samples.tolist()
    return got


@pytest.mark.parametrize("lookahead", [0, 4])
def test_a_state_saved_after_a_refused_sample_has_all_samples_that_were_not_handed_out(lookahead: int) -> None:
    lengths = [*LENGTHS[:21], BUDGET + 1, *LENGTHS]
    with loader(StatefulStream(lengths), lookahead=lookahead) as data:
        got = until_error(data, ValueError, "sample 21 has 151 tokens")
        state = data.state_dict()
        assert until_error(data, ValueError, "sample 21 has 151 tokens") == list(range(len(got), state["place"])) == []
    with loader(StatefulStream(lengths), too_long="drop") as data:
        data.load_state_dict(state)
        assert got + numbers(data) == [n for n in range(len(lengths)) if n != 21]


class Flaky(StatefulStream):
    """A stream that raises once before a sample, and then goes on with it; it yields samples one by one."""

    def __init__(self, lengths: list[int], at: int) -> None:
        super().__init__(lengths)
        self.broken = at

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.at == self.broken:
            self.broken = -1
            raise OSError("the disk is away")
        if self.at == len(self.sizes):
            raise StopIteration
        self.at += 1
        return sample(self.at - 1, self.sizes[self.at - 1])


@pytest.mark.parametrize("at", [0, 5, 16, 20, 40, 47])
def test_a_stream_that_goes_on_after_an_error_loses_and_repeats_nothing(at: int) -> None:
    lengths = LENGTHS * 2
    with loader(Flaky(lengths, at)) as data:
        got = until_error(data, OSError, "disk is away")
        state = data.state_dict()
        assert got + numbers(data) == list(range(len(lengths)))
    rest = Flaky(lengths, -1)
    with loader(rest) as data:
        data.load_state_dict(state)
        assert got + numbers(data) == list(range(len(lengths)))


class Ending(Stream):
    """A stream that is a generator, and so ends where it raises."""

    def __iter__(self) -> Iterator[Any]:
        for number, one in enumerate(super().__iter__()):
            if number == 20:
                raise OSError("the disk is away")
            yield one


def test_a_generator_that_ended_by_an_error_has_not_come_to_its_end() -> None:
    with loader(Ending(LENGTHS)) as data:
        got = until_error(data, OSError, "disk is away")
        later = until_error(data, RuntimeError, r"ended after it had failed \(OSError: the disk is away\)")
        state = data.state_dict()
    with loader(Stream(LENGTHS)) as data:
        data.load_state_dict(state)
        assert got + later + numbers(data) == list(range(len(LENGTHS)))


def test_groups_of_a_stream_that_fails_are_whole_afterwards() -> None:
    def grouped(at: int) -> Flaky:
        class Rollouts(Flaky):
            def __next__(self) -> Any:
                found = super().__next__()
                return {"tokens": found["tokens"], "prompt": int(found["tokens"][0]) // 3000}

        return Rollouts(LENGTHS, at)

    def trees(batches: Any) -> list[Any]:
        return [(b.samples.tolist(), b.tokens.tolist()) for b in batches]

    with loader(grouped(-1), tree_by="prompt") as data:
        expected = trees(data)
    for at in range(1, len(LENGTHS)):
        with loader(grouped(at), tree_by="prompt") as data:
            got = []
            with pytest.raises(OSError, match="disk is away"):
                for batch in data:
                    got += trees([batch])
            state = data.state_dict()
        with loader(grouped(-1), tree_by="prompt") as data:
            data.load_state_dict(state)
            assert got + trees(data) == expected, f"failed before sample {at}"


@pytest.mark.parametrize("at", [0, 3, 16])
def test_a_sample_that_is_none_is_refused_and_not_the_end(at: int) -> None:
    found = [sample(n, length) for n, length in enumerate(LENGTHS)]
    some: list[Any] = [*found[:at], None, *found[at:]]
    with loader(Iterated(some)) as data:
        until_error(data, ValueError, f"sample {at}: .*no array of numbers")


class Iterated:
    """An iterable of given samples that is no map-style dataset."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


class OneBuffer(StatefulStream):
    """A stream that makes every sample in the same memory."""

    def __iter__(self) -> Iterator[Any]:
        tokens, weight = np.zeros(max(self.sizes), np.int64), np.zeros((max(self.sizes), 2), np.float32)
        score = np.zeros(1)
        while self.at < len(self.sizes):
            number, length = self.at, self.sizes[self.at]
            self.at += 1
            tokens[:length] = token(number, 0) + np.arange(length)
            weight[:length] = number
            score[0] = number
            yield {"tokens": tokens[:length], "weight": weight[:length], "score": score}


@pytest.mark.parametrize("resume", [False, True])
def test_a_stream_may_make_every_sample_in_the_same_memory(resume: bool) -> None:
    with loader(OneBuffer(LENGTHS), document_fields=["score"]) as data:
        if resume:
            first = next(iter(data)).samples.tolist()
            state = data.state_dict()
    with loader(OneBuffer(LENGTHS), document_fields=["score"]) as data:
        got = []
        if resume:
            data.load_state_dict(state)
            got += first
        for batch in data:
            mine = batch.samples.tolist()
            got += mine
            assert batch.tokens.tolist() == [token(n, row) for n in mine for row in range(LENGTHS[n])]
            assert batch.fields["weight"][:, 1].tolist() == [n for n in mine for _ in range(LENGTHS[n])]
            assert [batch.values[d]["score"].tolist() for d in range(len(mine))] == [[n] for n in mine]
        assert got == list(range(len(LENGTHS)))


@pytest.mark.parametrize("kind", [Iterated, list])
def test_values_that_cannot_be_pickled_are_named(kind: Callable[[list[Any]], Any]) -> None:
    odd = [{**sample(n, 5), "open": (x for x in ())} for n in range(3)]
    with loader(kind(odd)) as data:
        until_error(data, ValueError, "sample 0 cannot be pickled, .*generator")


class BadEpoch(Stream):
    def set_epoch(self, epoch: int) -> None:
        raise OSError("no such epoch")


class BadState(StatefulStream):
    def load_state_dict(self, state: Any) -> None:
        raise KeyError("at")


def state_of(data: Any) -> dict[str, Any]:
    """Return the state of a loader after its first batch."""
    with loader(data) as made:
        next(iter(made))
        return made.state_dict()


def error_of(group: Any, data: Any, state: Any, limit: float = LIMIT) -> tuple[str, str]:
    """Load a state and iterate; return the kind and the text of the error that comes, long before the time limit.

    ``data`` is one stream for all ranks. If it is a list of a dataset for each, the error may take all of ``limit``.
    """
    begin = time.perf_counter()
    with loader(data[group.rank()] if isinstance(data, list) else data, group, timeout=limit) as made:
        try:
            if state is not None:
                made.load_state_dict(state)
            for batch in made:
                batch.step.gather(batch.tokens)
        except Exception as error:
            assert isinstance(data, list) or time.perf_counter() - begin < limit / 2, "not at once"
            return type(error).__name__, str(error)
    raise AssertionError("no error came")


def damaged(field: str, value: Any) -> dict[str, Any]:
    """Return a state of a stream whose ``field`` has another value, or is missing if the value is None."""
    state = state_of(StatefulStream())
    state["source"][field] = value
    if value is None:
        del state["source"][field]
    return state


@pytest.mark.parametrize(
    ("data", "state", "own", "words"),
    [
        (BadEpoch(), lambda: None, "OSError", "begin its stream: OSError: no such epoch"),
        (Stream(LENGTHS[:2]), lambda: state_of(Stream()), "ValueError", "begin its stream: .* ended after 2 samples"),
        (BadState(), lambda: state_of(StatefulStream()), "KeyError", "restore its stream: KeyError: 'at'"),
        (StatefulStream(), lambda: damaged("pending", None), "ValueError", "its 'source' has no 'pending'"),
        (
            StatefulStream(),
            lambda: damaged("pending", [7]),
            "ValueError",
            "'pending' .* are not the 1 before sample 24",
        ),
        (StatefulStream(), lambda: damaged("next", "4"), "ValueError", "its 'source' has '4' as 'next'"),
        (StatefulStream(), lambda: damaged("next", 40), "ValueError", "'pending' .* before sample 40"),
        (StatefulStream(), lambda: {**state_of(StatefulStream()), "place": 40}, "ValueError", "not hold sample 40"),
    ],
    ids=["epoch", "short", "own", "missing", "no pair", "odd", "gap", "place"],
)
def test_a_stream_that_rank_0_cannot_restore_is_an_error_on_all_ranks_at_once(
    data: Any, state: Callable[[], Any], own: str, words: str, pool: RankPool
) -> None:
    (kind, said), *others = pool.run(error_of, data, state(), ranks=3)
    assert kind == own
    assert all(re.search(f"rank 0 could not .*{words}", text) and said in text for _, text in others), others
    assert {kind for kind, _ in others} == {"ValueError" if own == "ValueError" else "RuntimeError"}


def test_after_a_state_that_cannot_be_loaded_the_loader_does_not_go_on() -> None:
    with loader(BadState()) as data:
        with pytest.raises(KeyError):
            data.load_state_dict(state_of(StatefulStream()))
        until_error(data, ValueError, "the last state could not be loaded")
    with loader(StatefulStream()) as data:
        with pytest.raises(ValueError, match="has no 'rest'"):
            data.load_state_dict(damaged("rest", None))
        data.load_state_dict(state_of(StatefulStream()))
        assert len(numbers(data)) > 10


class Unplanned:
    """A planner that cannot plan any batch."""

    def __init__(self, ranks: int) -> None:
        self.cluster, self.strategy = planner(ranks).cluster, "unplanned"

    def __call__(self, lengths: Any, **arguments: Any) -> Any:
        raise ValueError("no plan here")


def error_of_planning(group: Any, fails: list[int]) -> tuple[str, float, int]:
    """Return the error of a step that the ranks ``fails`` cannot plan, how long it took, and a later step's samples."""
    begin = time.perf_counter()
    chosen: Any = Unplanned(group.size()) if group.rank() in fails else planner(group.size())
    settings = Planning(workers=0, timeout=LIMIT)
    with Loader(Numbered(known=True), chosen, group=group, budget=BUDGET, planning=settings) as data:
        try:
            next(iter(data))
        except (PlanningError, RuntimeError) as error:
            said, seconds = f"{type(error).__name__}: {error}", time.perf_counter() - begin
    with Loader(Numbered(known=True), planner(group.size()), group=group, budget=BUDGET, planning=settings) as data:
        return said, seconds, len(next(iter(data)).samples)


@pytest.mark.parametrize("fails", [[1], [0, 2], [0, 1, 2]])
def test_a_step_that_some_ranks_cannot_plan_is_an_error_on_all_at_once(fails: list[int], pool: RankPool) -> None:
    found = pool.run(error_of_planning, fails, ranks=3)
    for rank, (said, seconds, later) in enumerate(found):
        kind = "PlanningError" if rank in fails else "RuntimeError: rank [012] cannot bind: step 0 of its loader"
        assert re.match(f"{kind}.*no plan here", said), said
        assert seconds < LIMIT / 2 and later > 0


def test_ranks_that_wait_for_one_that_could_not_read_are_told_why() -> None:
    """The dataset's lengths are known, so every rank reads for itself, and hears of the others only where they meet."""
    sizes = [90] * 8
    data = [Numbered(sizes, known=True, broken=0 if rank == 1 else None) for rank in range(2)]
    with RankPool(2) as ranks:
        found = ranks.run(error_of, data, None, 4.0)
    assert found[1] == ("OSError", "sample 0 is on a bad disk")
    assert re.search("reading of samples ended with OSError.*bad disk", found[0][1])
