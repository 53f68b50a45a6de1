"""Trees: documents whose sequences share their beginnings, such as one prompt and its rollouts.

A tree is a list of *segments* in depth-first order. A token sees its own segment up to itself, and all tokens of every
ancestor segment. So the keys of a segment are seen by the rows from its first token to the end of its subtree. In
depth-first order these rows are one range, and the mask needs one slice per segment; a chain of only children needs one
slice in all. A *sequence* is the path from a root to the segment it ends in. By default one sequence ends in each
segment without children; ``ends`` can name other segments.

The *depth* of a token is the number of tokens before it on its path; position embeddings use it as the position. A
window measures distance on the path. Under a window the band of a slice depends on where rows and keys lie in the tree,
so the mask needs a slice for each segment and each ancestor that the window reaches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from flexcp.io.plain_values import shown
from flexcp.masks.mask import TREE, Mask, document_length, reach, token_count
from flexcp.masks.slices import UNBOUNDED, Ints

ROOT = -1
MAX_WINDOW_SLICES = 1 << 17
"""The most slices that a window over a tree may need; a mask with more raises NotImplementedError."""


@dataclass(frozen=True, eq=False)
class Tree:
    """Segments of tokens in depth-first order, and the sequences that end in them.

    ``parents[i]`` is the parent of segment i (-1 for a root), ``lengths[i]`` the number of its tokens, and ``ends[s]``
    the segment in which sequence s ends. A sequence is the path from a root to that segment. Tokens are numbered in the
    order of the segments.
    """

    parents: Ints
    lengths: Ints
    ends: Ints

    @cached_property
    def starts(self) -> Ints:
        """The first token of each segment."""
        return np.cumsum(self.lengths) - self.lengths

    @cached_property
    def after(self) -> Ints:
        """For each segment, the first segment after its subtree; the number of segments if there is none."""
        size = [1] * len(self.parents)
        for segment, parent in reversed(list(enumerate(self.parents.tolist()))):
            if parent != ROOT:
                size[parent] += size[segment]
        return np.arange(len(size)) + np.array(size, np.int64)

    @cached_property
    def above(self) -> Ints:
        """For each segment, the tokens of all its ancestors: the depth of its first token."""
        parents, lengths = self.parents.tolist(), self.lengths.tolist()
        found: list[int] = []
        for parent in parents:
            found.append(0 if parent == ROOT else found[parent] + lengths[parent])
        return np.array(found, np.int64)

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def is_one_sequence(self) -> bool:
        """Whether the tree does not branch: every token comes right after its predecessor on the path."""
        return bool(np.all((self.above == self.starts) | (self.lengths == 0)))

    @cached_property
    def sequence_lengths(self) -> Ints:
        """The number of tokens of each sequence."""
        return self.above[self.ends] + self.lengths[self.ends]

    def depths(self) -> Ints:
        """Return the depth of each token: the number of tokens before it on its path."""
        return np.arange(self.tokens) + np.repeat(self.above - self.starts, self.lengths)

    def predecessors(self) -> Ints:
        """Return, for each token, the token before it on its path; -1 if there is none."""
        parents, lengths, starts = self.parents.tolist(), self.lengths.tolist(), self.starts.tolist()
        last: list[int] = []  # the last token of the path that ends in each segment
        found = np.arange(-1, self.tokens - 1)
        for segment, parent in enumerate(parents):
            before = -1 if parent == ROOT else last[parent]
            last.append(starts[segment] + lengths[segment] - 1 if lengths[segment] else before)
            if lengths[segment]:
                found[starts[segment]] = before
        return found

    def path(self, segment: int) -> Ints:
        """Return the numbers of the tokens on the path from the root to the end of a segment."""
        parts = []
        while segment != ROOT:
            start = int(self.starts[segment])
            parts.append(np.arange(start, start + int(self.lengths[segment])))
            segment = int(self.parents[segment])
        return np.concatenate(parts[::-1])

    @cached_property
    def by_end(self) -> Ints:
        """The sequences sorted by the segment they end in; the sequences through any segment are then neighbours."""
        return np.argsort(self.ends, kind="stable")

    def sequences_through(self) -> tuple[Ints, Ints]:
        """Return, for each segment, the range (begin, stop) of :attr:`by_end` with the sequences it is part of."""
        ends = self.ends[self.by_end]
        return np.searchsorted(ends, np.arange(len(self.parents))), np.searchsorted(ends, self.after)

    def same_as(self, other: Tree) -> bool:
        """Return whether each token has the same path in both trees, and each sequence the same tokens."""
        return (
            np.array_equal(self.predecessors(), other.predecessors())
            and np.array_equal(self.sequence_lengths, other.sequence_lengths)
            and np.array_equal(self._last_tokens(), other._last_tokens())
        )

    def _last_tokens(self) -> list[int]:
        """Return the last token of each sequence, -1 for a sequence without tokens."""
        found: list[int] = []
        for segment in self.ends.tolist():
            at = segment
            while at != ROOT and not self.lengths[at]:
                at = int(self.parents[at])
            found.append(-1 if at == ROOT else int(self.starts[at] + self.lengths[at] - 1))
        return found

    def without_seams(self) -> Tree:
        """Return a tree in which tokens have the same paths, in the fewest segments, with one sequence for each leaf.

        Empty segments are left out, and only children are joined to their parents.
        """
        kept: list[int] = []  # the lengths of the segments that are not empty
        parents: list[int] = []
        place: list[int] = []  # for each segment, the entry of ``kept`` that holds the last tokens of its path
        for parent, tokens in zip(self.parents.tolist(), self.lengths.tolist(), strict=True):
            above = ROOT if parent == ROOT else place[parent]
            if tokens:
                place.append(len(kept))
                kept.append(tokens)
                parents.append(above)
            else:
                place.append(above)
        children = np.bincount(np.array(parents, np.int64) + 1, minlength=len(kept) + 1)[1:].tolist()
        joined: list[int] = []
        lengths: list[int] = []
        number: list[int] = []
        for parent, tokens in zip(parents, kept, strict=True):
            if parent != ROOT and children[parent] == 1:
                number.append(number[parent])
                lengths[number[parent]] += tokens
            else:
                number.append(len(lengths))
                lengths.append(tokens)
                joined.append(ROOT if parent == ROOT else number[parent])
        columns = np.array(joined, np.int64), np.array(lengths, np.int64)
        return Tree(*columns, leaves(columns[0]))


def leaves(parents: Ints) -> Ints:
    """Return the numbers of the segments without children, ascending."""
    return np.setdiff1d(np.arange(len(parents)), parents, assume_unique=False)


def tree(
    parents: Sequence[int], lengths: Sequence[int], ends: Sequence[int] | None = None, left: int | None = None
) -> Mask:
    """Make the mask of a tree of segments: a token sees its own segment up to itself, and all ancestor segments.

    ``parents[i]`` is the parent of segment i (-1 for a root) and ``lengths[i]`` the number of its tokens (0 or more).
    Segments must be in depth-first order, which :func:`flexcp.masks.tree_order` finds. By default the sequences are the
    paths from a root to each segment without children, in order. ``ends`` gives other sequences by the segment each
    ends in: a sequence may be the beginning of another, and several may end in one segment. With ``left``, a token sees
    at most that many tokens before it on its path, as in ``window(left)``.
    """
    above, tokens = _integers(parents, "parents"), _integers(lengths, "lengths")
    if len(above) != len(tokens):
        raise ValueError(f"{len(above)} parents for {len(tokens)} lengths; a tree has one of each for every segment")
    if any(n < 0 for n in tokens):
        at = next(i for i, n in enumerate(tokens) if n < 0)
        raise ValueError(f"segment {at} has {tokens[at]} tokens; a segment has 0 or more")
    total = document_length(sum(tokens))
    _check_depth_first(above)
    if ends is None:
        last = leaves(np.array(above, np.int64)).tolist()
    else:
        last = _integers(ends, "ends")
        for number, segment in enumerate(last):
            if not 0 <= segment < len(above):
                raise ValueError(
                    f"sequence {number} ends in segment {segment}, but there are segments 0 to {len(above) - 1}"
                )
        if not last:
            raise ValueError("ends is empty; name the segment in which each sequence ends, or leave ends out")
    back = UNBOUNDED if left is None else min(reach(left), UNBOUNDED)
    if back < 0:
        raise ValueError(f"left is how many tokens before it a token sees, 0 or more; got {left}")
    return Mask(TREE, (tuple(above), tuple(tokens), tuple(last), back), total)


def tree_order(parents: Sequence[int]) -> list[int]:
    """Return the segments in depth-first order, as :func:`flexcp.tree` takes them; siblings stay in their order.

    ``order[j]`` is the segment that comes j-th. With ``place = {segment: j for j, segment in enumerate(order)}`` the
    tree is ``tree([place.get(parents[i], -1) for i in order], [lengths[i] for i in order])``. Raise ValueError if a
    segment has no root.
    """
    above = _integers(parents, "parents")
    children: dict[int, list[int]] = {}
    for segment, parent in enumerate(above):
        if not ROOT <= parent < len(above):
            raise ValueError(
                f"segment {segment} has the parent {parent}; parents are segments 0 to {len(above) - 1}, "
                "or -1 for a root"
            )
        children.setdefault(parent, []).append(segment)
    order: list[int] = []
    waiting = children.get(ROOT, [])[::-1]
    while waiting:
        order.append(waiting.pop())
        waiting += children.get(order[-1], [])[::-1]
    if len(order) < len(above):
        lost = min(set(range(len(above))) - set(order))
        raise ValueError(f"segment {lost} has no root: its ancestors are a circle")
    return order


def tree_of_mask(mask: Mask) -> Tree:
    """Return the tree of a mask that :func:`tree` made."""
    parents, lengths, ends = (np.array(column, np.int64) for column in mask.params[:3])
    return Tree(parents, lengths, ends)


def window_of_tree(mask: Mask) -> int | None:
    """Return how many tokens before it a token sees under a mask that :func:`tree` made; None for no limit."""
    left = int(mask.params[3])  # type: ignore[arg-type]
    return None if left >= UNBOUNDED else left


def window_of(mask: Mask) -> int | None:
    """Return how many tokens before it a token sees under a ``window`` mask that does not look ahead.

    Return None for other masks and for a window without a limit.
    """
    if mask.name != "window" or mask.params[1] != 0 or int(mask.params[0]) >= UNBOUNDED:  # type: ignore[arg-type]
        return None
    return int(mask.params[0])  # type: ignore[arg-type]


def windowed(mask: Mask, left: int) -> Mask:
    """Return a mask of the same tree as ``mask``, in which a token sees at most ``left`` tokens before it.

    ``mask`` must be a tree mask; its own window is replaced.
    """
    parents, lengths, ends, _ = mask.params
    return tree(parents, lengths, ends, left)  # type: ignore[arg-type]


def tree_slices(mask: Mask) -> Ints:
    """Return the slices of a tree mask, ``[slices, 6]``; raise NotImplementedError if a window needs too many."""
    found, left = tree_of_mask(mask).without_seams(), window_of_tree(mask)
    if left is not None and left < int(found.sequence_lengths.max()) - 1:
        return _window_slices(found, left)
    starts = found.starts
    ends = np.append(starts, found.tokens)[found.after]
    rows = np.zeros_like(starts) - UNBOUNDED, np.zeros_like(starts)
    return np.stack([starts, ends, starts, starts + found.lengths, *rows], axis=1)


def _window_slices(found: Tree, left: int) -> Ints:
    """Return the slices of a tree in a window: one for each segment and each ancestor in reach, itself included.

    ``left`` is how many tokens before it on its path a token sees.
    """
    pairs = np.array(list(_in_reach(found, left)), np.int64).reshape(-1, 2)
    row, key = pairs[:, 0], pairs[:, 1]
    starts, lengths, above = found.starts, found.lengths, found.above
    # The distance of a row and a key on the path is their distance in the stream, less the tokens between them in the
    # stream that are not on the path (aside).
    aside = (starts[row] - above[row]) - (starts[key] - above[key])
    ends, hi = starts + lengths, np.zeros_like(aside)
    return np.stack([starts[row], ends[row], starts[key], ends[key], -left - aside, hi], axis=1)


def _in_reach(found: Tree, left: int) -> Iterator[tuple[int, int]]:
    """Yield (segment, ancestor) for each ancestor that the segment's first token still sees, itself included.

    A token sees ``left`` tokens before it. Raise NotImplementedError if there are more than ``MAX_WINDOW_SLICES``
    pairs.
    """
    parents, lengths, above = (x.tolist() for x in (found.parents, found.lengths, found.above))
    count = 0
    for segment, depth in enumerate(above):
        at = segment
        while at != ROOT and above[at] + lengths[at] - 1 >= depth - left:
            yield segment, at
            at = parents[at]
            count += 1
        if count > MAX_WINDOW_SLICES:
            raise NotImplementedError(
                f"a window of {left} tokens over a tree of {len(lengths)} segments takes more than {MAX_WINDOW_SLICES} "
                "slices, one for each segment and ancestor in reach; plan such layers with fewer branches at a time, "
                "or leave left= out"
            )


def most_slices(mask: Mask) -> int:
    """Return an upper bound of the number of slices of a tree mask.

    Raise NotImplementedError if a window needs too many.
    """
    found, left = tree_of_mask(mask).without_seams(), window_of_tree(mask)
    return len(found.parents) if left is None else sum(1 for _ in _in_reach(found, left))


def _check_depth_first(parents: list[int]) -> None:
    """Raise ValueError unless segments are in depth-first order.

    The parent of a segment must be the segment before it, an ancestor of that segment, or none.
    """
    path: list[int] = []
    for segment, parent in enumerate(parents):
        if parent < ROOT or parent >= len(parents):
            raise ValueError(
                f"segment {segment} has the parent {parent}; parents are segments 0 to {len(parents) - 1}, "
                "or -1 for a root"
            )
        while path and path[-1] != parent:
            path.pop()
        if parent != ROOT and not path:
            why = (
                "which comes no earlier"
                if parent >= segment
                else f"whose subtree ended before segment {segment - 1} began"
            )
            raise ValueError(
                f"segment {segment} has the parent {parent}, {why}: segments must be in depth-first order, each "
                "subtree in one piece; flexcp.masks.tree_order(parents) gives that order"
            )
        path.append(segment)


def _integers(given: Sequence[int], what: str) -> list[int]:
    """Return a list of plain ints; raise ValueError if ``given`` is no list of integers. ``what`` names it."""
    try:
        found = [token_count(x) for x in given]
    except TypeError:
        raise ValueError(f"{what} is a list with a number for each segment; got {shown(given)}") from None
    except ValueError:
        wrong = next(x for x in given if not hasattr(x, "__index__"))
        raise ValueError(f"{what} holds whole numbers; got {shown(wrong)}") from None
    return found
