"""Proves token trees: which token sees which against a walk along the paths, trees built from token ids, and the errors
for wrong input.
"""

from __future__ import annotations

import sys
import tracemalloc
from importlib import import_module

import numpy as np
import pytest

import flexcp
from flexcp.masks import Mask, area, depths, tree_under, window_of, window_of_tree, windowed
from flexcp.masks.named import NAMED
from flexcp.masks.tree import MAX_WINDOW_SLICES, Tree, tree_of_mask


def random_tree(
    rng: np.random.Generator, segments: int, longest: int = 4, roots: float = 0.1
) -> tuple[list[int], list[int]]:
    """Return random parents and lengths in depth-first order; some segments are empty, the last one is not."""
    above = [-1, *(-1 if rng.random() < roots else int(rng.integers(max(0, i - 4), i)) for i in range(1, segments))]
    order = flexcp.masks.tree_order(above)
    place = {segment: at for at, segment in enumerate(order)}
    return [place.get(above[i], -1) for i in order], [*rng.integers(0, longest + 1, segments - 1).tolist(), 2]


def walked(parents: list[int], lengths: list[int], left: int | None = None) -> tuple[np.ndarray, list[int]]:
    """Return (which token sees which, depths), found token by token along each path."""
    starts = np.cumsum([0, *lengths])
    seen = np.zeros((starts[-1], starts[-1]), bool)
    found = []
    for segment, length in enumerate(lengths):
        path, at = [], segment
        while at != -1:
            path = [*range(starts[at], starts[at + 1]), *path]
            at = parents[at]
        for token in range(starts[segment], starts[segment] + length):
            before = path[: path.index(token) + 1]
            seen[token, before[-1 - left :] if left is not None else before] = True
            found.append(len(before) - 1)
    return seen, found


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("left", [None, 0, 1, 3, 7, 1000])
def test_a_token_sees_its_path(seed: int, left: int | None) -> None:
    rng = np.random.default_rng(seed)
    parents, lengths = random_tree(rng, int(rng.integers(1, 20)))
    mask = flexcp.tree(parents, lengths, left=left)
    seen, places = walked(parents, lengths, left)
    assert np.array_equal(mask.dense(sum(lengths)), seen)
    assert area(mask.slices(sum(lengths))).sum() == seen.sum()  # no pair is counted twice
    tree = tree_under(mask, sum(lengths))
    assert tree is not None and tree.depths().tolist() == places
    assert (depths(mask, sum(lengths)) is None) == (places == list(range(len(places))))


def test_a_segment_is_one_slice_and_a_chain_too() -> None:
    assert len(flexcp.tree([-1, 0, 1, 2], [3, 0, 2, 4]).slices(9)) == 1
    star = flexcp.tree([-1, 0, 0, 0], [5, 2, 2, 2])
    assert np.array_equal(star.slices(11), flexcp.masks.shared_question([2, 2, 2], 5).slices(11))


def test_a_shared_question_is_a_tree() -> None:
    for mask in (flexcp.masks.shared_question([2, 0, 3], 4), flexcp.tree([-1, 0, 0], [4, 2, 3])):
        tree = tree_under(mask, 9)
        assert tree is not None
        assert (
            tree.parents.tolist() == [-1, 0, 0] and tree.lengths.tolist() == [4, 2, 3] and tree.ends.tolist() == [1, 2]
        )
    assert tree_under(flexcp.masks.shared_question([5], 4), 9) is None


def test_sequences_end_where_it_is_said() -> None:
    tree = tree_of_mask(flexcp.tree([-1, 0, 1, 0], [2, 1, 2, 3]))
    assert tree.ends.tolist() == [2, 3] and tree.sequence_lengths.tolist() == [5, 5]
    tree = tree_of_mask(flexcp.tree([-1, 0, 1, 0], [2, 1, 2, 3], ends=[3, 1, 2, 3]))
    assert tree.sequence_lengths.tolist() == [5, 3, 5, 5]
    begin, stop = tree.sequences_through()
    assert [sorted(tree.by_end[a:b].tolist()) for a, b in zip(begin, stop, strict=True)] == [
        [0, 1, 2, 3],
        [1, 2],
        [2],
        [0, 3],
    ]
    assert tree.path(2).tolist() == [0, 1, 2, 3, 4] and tree.path(3).tolist() == [0, 1, 5, 6, 7]
    assert tree.predecessors().tolist() == [-1, 0, 1, 2, 3, 1, 5, 6]


def test_trees_are_the_same_if_their_tokens_and_sequences_have_the_same_paths() -> None:
    def tree(*arguments: list[int]) -> Tree:
        return tree_of_mask(flexcp.tree(*arguments))

    plain = tree([-1, 0, 0], [4, 2, 2])
    assert plain.same_as(tree([-1, 0, 1, 1], [1, 3, 2, 2]))  # one segment cut in two
    assert plain.same_as(tree([-1, 0, 0, 0], [4, 2, 2, 0], [1, 2]))  # a segment without tokens
    assert not plain.same_as(tree([-1, 0, -1], [4, 2, 2]))  # another path
    assert not plain.same_as(tree([-1, 0, 0], [4, 2, 2], [1]))
    assert not plain.same_as(tree([-1, 0, 0], [4, 2, 2], [2, 1]))  # sequences of the same lengths in another order
    nothing = tree([-1, -1], [0, 3], [0])
    assert nothing.same_as(tree([-1, -1], [3, 0], [1])) and not nothing.same_as(tree([-1], [3], [0]))


def test_a_tree_is_one_sequence_unless_it_branches() -> None:
    for parents, lengths, one in (
        ([-1, 0, 1], [2, 3, 1], True),
        ([-1, 0, 0], [2, 0, 3], True),
        ([-1, 0, 0], [2, 1, 3], False),
        ([-1, -1], [2, 3], False),
    ):
        assert tree_of_mask(flexcp.tree(parents, lengths)).is_one_sequence == one


def test_the_window_of_a_layer_or_a_tree_is_known_where_it_only_looks_back() -> None:
    assert [window_of(flexcp.window(*sides)) for sides in ((5, 0), (0, 0), (5, 1), (None, 0))] == [5, 0, None, None]
    assert window_of(flexcp.causal()) is None and window_of(flexcp.masks.lambda_(4, 8)) is None
    for left, known in ((None, None), (sys.maxsize, None), (0, 0), (7, 7)):
        assert window_of_tree(flexcp.tree([-1, 0], [3, 2], left=left)) == known


def test_a_window_over_the_longest_sequence_takes_no_more_slices_than_no_window() -> None:
    plain = flexcp.tree([-1, 0, 0], [4, 2, 3])
    assert np.array_equal(windowed(plain, 6).slices(9), plain.slices(9)) and len(plain.slices(9)) == 3
    for left, slices in ((5, 5), (1, 5), (0, 3)):  # one a segment, and the root for both others in reach
        mask = windowed(plain, left)
        assert len(mask.slices(9)) == NAMED["tree"].most_slices(mask, 9) == slices
    assert NAMED["tree"].most_slices(plain, 9) == 3


def test_a_window_of_the_most_slices_is_taken_and_one_more_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = flexcp.tree([-1, 0, 0], [4, 2, 3], left=2)
    module = import_module("flexcp.masks.tree")  # flexcp.masks.tree itself is the function
    monkeypatch.setattr(module, "MAX_WINDOW_SLICES", 5)
    assert len(mask.slices(9)) == 5
    monkeypatch.setattr(module, "MAX_WINDOW_SLICES", 4)
    with pytest.raises(NotImplementedError, match="takes more than 4 slices"):
        mask.slices(9)


def test_masks_of_other_ends_or_windows_are_others() -> None:
    masks = [
        flexcp.tree([-1, 0, 0], [4, 2, 3]),
        flexcp.tree([-1, 0, 0], [4, 2, 3], ends=[0, 1]),
        flexcp.tree([-1, 0, 0], [4, 2, 3], left=2),
        flexcp.tree([-1, 0, -1], [4, 2, 3]),
    ]
    assert len(set(masks)) == 4
    assert masks[0] == flexcp.tree([-1, 0, 0], np.array([4, 2, 3]), ends=[1, 2])  # type: ignore[arg-type]
    assert windowed(masks[0], 2) == masks[2]
    assert str(masks[2]) == "tree[3 segments, 2 sequences, 9 tokens, left 2]"


def test_the_order_of_segments() -> None:
    parents = [3, 0, 0, -1, 3, -1]
    order = flexcp.masks.tree_order(parents)
    assert order == [3, 0, 1, 2, 4, 5]
    with pytest.raises(ValueError, match="segment 1 has no root: its ancestors are a circle"):
        flexcp.masks.tree_order([-1, 2, 1])
    for parents in ([-1, 2], [-1, -2]):
        with pytest.raises(ValueError, match=rf"segment 1 has the parent {parents[1]}; parents are segments 0 to 1"):
            flexcp.masks.tree_order(parents)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ([-1, 2, 0], [1, 1, 1]),
            r"segment 1 has the parent 2, which comes no earlier: .* flexcp.masks.tree_order\(parents\)",
        ),
        (
            ([-1, 0, 0, 1], [1] * 4),
            r"segment 3 has the parent 1, whose subtree ended before segment 2 began: .*tree_order",
        ),
        (([0], [1]), "segment 0 has the parent 0, which comes no earlier"),
        (([-1, 7], [1, 1]), "segment 1 has the parent 7; parents are segments 0 to 1, or -1"),
        (([-1, 2], [1, 1]), "segment 1 has the parent 2; parents are segments 0 to 1, or -1"),
        (([-1, -2], [1, 1]), "segment 1 has the parent -2"),
        (([-1, 0], [1, -3]), "segment 1 has -3 tokens; a segment has 0 or more"),
        (([-1, 0], [1]), "2 parents for 1 lengths"),
        (([-1, 0], [1, 1.5]), "lengths holds whole numbers; got 1.5"),
        ((3, [1]), "parents is a list"),
        (([], []), "a document has at least 1 token"),
        (([-1], [0]), "a document has at least 1 token"),
        (([-1, 0], [1, 1], [2]), "sequence 0 ends in segment 2, but there are segments 0 to 1"),
        (([-1, 0], [1, 1], [0, -1]), "sequence 1 ends in segment -1, but"),
        (([-1, 0], [1, 1], []), "ends is empty"),
        (([-1, 0], [1, 1], None, -1), "left is how many"),
    ],
)
def test_wrong_input_is_one_clear_line(arguments: tuple, words: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ValueError, match=words) as raised:
        flexcp.tree(*arguments)
    assert "\n" not in str(raised.value)


def test_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="is for a document of 9 tokens but was given one of 8"):
        flexcp.tree([-1, 0, 0], [4, 2, 3]).slices(8)


def test_a_window_of_too_many_slices_is_refused_with_the_reason() -> None:
    chain = [-1, *range(1500), *range(1499)]  # two children at every segment of a long path
    order = flexcp.masks.tree_order(chain)
    place = {segment: at for at, segment in enumerate(order)}
    mask = flexcp.tree([place.get(chain[i], -1) for i in order], [1] * len(order), left=1000)
    with pytest.raises(NotImplementedError, match=f"takes more than {MAX_WINDOW_SLICES} slices, one for each segment"):
        mask.slices(len(order))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("least", [1, 2, 5])
def test_a_tree_of_token_ids_has_every_sequence(seed: int, least: int) -> None:
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(0, 2, rng.integers(1, 9)) for _ in range(int(rng.integers(1, 14)))]
    tree = flexcp.tree_of(sequences, least)
    assert len(tree.paths) == len(sequences)
    places = tree_of_mask(tree.mask).depths()
    for ids, path in zip(sequences, tree.paths, strict=True):
        assert tree.tokens[path].tolist() == ids.tolist() and places[path].tolist() == list(range(len(ids)))
    assert tree.saved == sum(map(len, sequences)) - len(tree)
    inner = {int(p) for p in tree.tree.parents if p >= 0}
    assert all(tree.tree.lengths[segment] >= least for segment in inner)
    if least == 1:  # every distinct prefix once
        assert len(tree) == len({tuple(ids[: n + 1].tolist()) for ids in sequences for n in range(len(ids))})


def test_segments_come_in_the_order_of_the_sequences() -> None:
    tree = flexcp.tree_of([[9, 9, 5], [1, 2], [9, 9, 3], [9, 9, 5]])
    assert tree.tokens.tolist() == [9, 9, 5, 3, 1, 2] and tree.tree.ends.tolist() == [1, 3, 2, 1]
    assert flexcp.tree_of([[-1, 3], [-1, 4]]).tokens.tolist() == [-1, 3, 4]


@pytest.mark.parametrize(
    ("sequences", "words"),
    [
        ([], "no sequences"),
        ([[1], []], "sequence 1 has no tokens; leave it out"),
        ([[1.5]], "sequence 0 is no list of token ids"),
        ([[1], [[1]]], "sequence 1 is no list of token ids"),
        (["ab"], "sequence 0 is no list of token ids"),
    ],
)
def test_wrong_sequences_are_one_clear_line(sequences: list, words: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ValueError, match=words) as raised:
        flexcp.tree_of(sequences)
    assert "\n" not in str(raised.value)


def test_many_segments_take_no_quadratic_memory() -> None:
    """10,000 segments have at most as many slices, and need less than one bit for each pair of segments."""
    rng = np.random.default_rng(0)
    parents, lengths = random_tree(rng, 10_000)
    tracemalloc.start()
    try:
        mask: Mask = flexcp.tree(parents, lengths)
        slices = mask.slices(sum(lengths))
        tree = tree_of_mask(mask)
        earlier = tree.predecessors()
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(slices) <= 10_000 and (earlier < np.arange(tree.tokens)).all()
    assert most < 10_000**2 // 8
