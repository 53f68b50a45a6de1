"""Grouped samples: merge samples with common beginnings, such as the rollouts of a prompt, into one sample: a tree.

A tree holds the common beginnings of its sequences once (:func:`flexcp.tree_of`). A field of the samples says which
belong together. In a map-style dataset, all samples with the same value form a group, wherever they are; groups are in
the order of their first samples. In a stream, a group is a run of consecutive samples with the same value. The grouped
sample has the token ids of the tree, its mask, its labels if the loader has a ``labels`` field, and a list with the
remaining fields of every sample. These may differ from sequence to sequence, even for sequences that share tokens.

A tree of more than ``most`` tokens is cut into several (:mod:`flexcp.data.reading.cut_trees`), each a grouped sample of
its own. For a map-style dataset this requires reading all samples when the loader is made.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from flexcp.data.reading.cut_trees import TreePart, parts_that_fit
from flexcp.data.reading.document_masks import MaskChoice, Masks
from flexcp.data.reading.samples import REPEATED_FIELD, TOKENS, TREE_FIELD, Fields, token_ids
from flexcp.data.reading.sources import is_map_style
from flexcp.data.reading.streams import FlatStream
from flexcp.masks import Mask, causal, tree_of, window_of, windowed

SAMPLES = "samples"
"""The field of a grouped sample that lists the remaining fields of each of its samples."""


def grouped(dataset: Any, field: str, fields: Fields, least_shared: int, most: int | None = None) -> Any:
    """Return the dataset with the samples of equal ``field`` merged into trees of at most ``most`` tokens.

    The result is map-style if the dataset is, and a stream otherwise. ``fields`` names the fields with token ids and
    labels, and ``least_shared`` is the argument of :func:`flexcp.tree_of`. If ``most`` is None, trees have no limit.
    """
    if is_map_style(dataset):
        return GroupedSamples(dataset, field, fields, least_shared, most)
    kind = StatefulGroupedStream if hasattr(dataset, "state_dict") else GroupedStream
    return kind(dataset, field, fields, least_shared, most)


def masks_of_trees(base: Masks) -> Masks:
    """Return how grouped samples get their masks: each has that of its tree, with the windows of the masks in ``base``.

    Raise ValueError if ``base`` has masks per document, or masks that are neither causal nor windows that do not look
    ahead.
    """
    named = base.named if base.named is not None else base.one
    if (
        base.function
        or base.by_number is not None
        or base.spans_by_number is not None
        or base.spans_field
        or named is None
    ):
        raise ValueError("tree_by makes the mask of each document: leave out mask_fn, spans and lists of masks")
    choices = {"": (named, 1)} if isinstance(named, Mask) else dict(named)
    for name, (mask, _) in choices.items():
        if not isinstance(mask, Mask) or (mask != causal() and window_of(mask) is None):
            what = f"the mask {mask} of {name!r}" if name else f"mask={mask}"
            raise ValueError(
                f"{what} is neither causal nor a window that does not look ahead; trees take no other masks"
            )

    def of_sample(sample: Any) -> MaskChoice:
        """Return the masks of a grouped sample."""
        tree: Mask = sample[TREE_FIELD]
        found: dict[str, tuple[Mask, int]] = {}
        for name, (mask, layers) in choices.items():
            left = window_of(mask)  # type: ignore[arg-type]
            found[name] = (tree if left is None else windowed(tree, left), layers)
        return found[""][0] if isinstance(named, Mask) else found

    return Masks(function=of_sample)


class GroupedSamples:
    """A map-style dataset whose samples are the groups of another map-style dataset."""

    def __init__(self, dataset: Any, field: str, fields: Fields, least_shared: int, most: int | None) -> None:
        self.dataset, self.fields, self.least_shared, self.field = dataset, fields, least_shared, field
        groups: dict[Hashable, list[int]] = {}
        for number, value in enumerate(self._values()):
            groups.setdefault(value, []).append(number)
        self.groups = [TreePart(numbers) for numbers in groups.values()]
        if most is not None:
            self.groups = [part for group in self.groups for part in self._cut(group.sequences, most)]

    def _cut(self, numbers: list[int], most: int) -> list[TreePart]:
        """Divide the group of the samples with these numbers into trees of at most ``most`` tokens."""
        samples = [self.dataset[i] for i in numbers]
        parts = _parts(samples, self.field, self.fields, self.least_shared, most, f"sample {numbers[0]}")
        return [TreePart([numbers[i] for i in part.sequences], part.repeated) for part in parts]

    def _values(self) -> Iterator[Hashable]:
        """Yield the value of the group field of every sample."""
        # A table with columns gives the values without reading the other fields.
        if self.field in (getattr(self.dataset, "column_names", None) or ()):
            for value in self.dataset[self.field]:
                yield group_value({self.field: value}, self.field, "")
            return
        for number in range(len(self.dataset)):
            yield group_value(self.dataset[number], self.field, f"sample {number}")

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, number: int) -> dict[str, Any]:
        group = self.groups[number]
        samples, where = [self.dataset[i] for i in group.sequences], f"sample {group.sequences[0]}"
        return one_sample(samples, self.field, self.fields, self.least_shared, where, group.repeated)


class GroupedStream:
    """A stream whose samples are the groups of another stream: runs of samples with the same group value."""

    def __init__(self, dataset: Any, field: str, fields: Fields, least_shared: int, most: int | None) -> None:
        self.dataset, self.field, self.fields, self.least_shared, self.most = dataset, field, fields, least_shared, most
        self._flat: FlatStream | None = None
        self._unfinished: list[Any] = []
        """Samples that were taken but not yielded: later parts of a group, and the first sample of the next group."""
        self._restored: list[Any] = []
        """The samples of a loaded state that were read but not yielded, until the stream is iterated."""
        if hasattr(dataset, "set_epoch"):
            self.set_epoch = dataset.set_epoch

    @property
    def waiting(self) -> list[Any]:
        """The samples that were read from the other stream but not yielded, also where yielding the next one failed."""
        return [*self._restored, *self._unfinished, *([] if self._flat is None else self._flat.rest)]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self._flat is not None and not hasattr(self.dataset, "load_state_dict"):
            self._flat.check_begins_again()
        flat = self._flat = FlatStream(self.dataset, self._restored)
        group: list[Any] = []
        self._restored, self._unfinished = [], group
        for count in itertools.count():
            where = f"sample {count} of the stream"
            taken = flat.take(where)
            if taken is None:
                break
            group.append(pickle.loads(taken[1]))  # a copy: the stream may make its next sample in the same memory
            flat.settle()
            value = group_value(group[-1], self.field, where)
            if value != group_value(group[0], self.field, ""):
                yield from self._given(group[:-1], group[-1:], f"the group before sample {count}")
                group = self._unfinished = group[-1:]
        if group:
            yield from self._given(group, [], "the last group")

    def _given(self, group: list[Any], behind: list[Any], where: str) -> Iterator[dict[str, Any]]:
        """Yield the trees of a group, and keep ``_unfinished`` up to date.

        ``behind`` are the samples that were taken after the group, and ``where`` names the group in errors.
        """
        parts = _parts(group, self.field, self.fields, self.least_shared, self.most, where)
        for number, part in enumerate(parts):
            samples = [group[i] for i in part.sequences]
            made = one_sample(samples, self.field, self.fields, self.least_shared, where, part.repeated)
            later = sorted(i for other in parts[number + 1 :] for i in other.sequences)
            self._unfinished = [*(group[i] for i in later), *behind]
            yield made


class StatefulGroupedStream(GroupedStream):
    """A :class:`GroupedStream` over a stream with ``state_dict``; it has one too, which includes samples read ahead."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the underlying stream and the samples that were read from it but not yielded."""
        return {"stream": self.dataset.state_dict(), "waiting": self.waiting}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of :meth:`state_dict`."""
        self.dataset.load_state_dict(state["stream"])
        self._restored, self._unfinished, self._flat = list(state["waiting"]), [], None


def group_value(sample: Any, field: str, where: str) -> Hashable:
    """Return the value of a sample's group field; a 0-D tensor or array becomes a plain number.

    Raise ValueError if the sample has no such field or the value is not hashable; ``where`` names the sample.
    """
    if not isinstance(sample, Mapping) or field not in sample:
        has = f"has fields {sorted(map(str, sample))}" if isinstance(sample, Mapping) else "is its token ids alone"
        raise ValueError(f"tree_by={field!r} names a field of every sample, and {where} {has}")
    value = sample[field]
    value = value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value
    if not isinstance(value, Hashable):
        raise ValueError(f"tree_by={field!r}: {where} has {value!r}, and groups are told apart by a number or a text")
    return value


def _parts(
    samples: list[Any], field: str, fields: Fields, least_shared: int, most: int | None, where: str
) -> list[TreePart]:
    """Divide the samples of a group into trees of at most ``most`` tokens (None: no limit).

    A part has the indices of its sequences in ``samples``.
    """
    if most is None:
        return [TreePart(list(range(len(samples))))]
    return parts_that_fit([ids.numpy() for _, ids in _ids(samples, field, fields, where)], least_shared, most)


def _ids(samples: list[Any], field: str, fields: Fields, where: str) -> list[tuple[str, Tensor]]:
    """Return (name of the token field, token ids) of each sample of a group."""
    return [token_ids(sample, fields, f"{where} of {field!r} {samples[0][field]!r}") for sample in samples]


def one_sample(
    samples: list[Any], field: str, fields: Fields, least_shared: int, where: str, repeated: int = 0
) -> dict[str, Any]:
    """Merge the samples of a group, or of a part of a group, into one sample that is a tree.

    ``where`` names the group in errors. ``repeated`` is how many tokens of this part an earlier part of the group has
    too.
    """
    found = _ids(samples, field, fields, where)
    tree = tree_of([ids.numpy() for _, ids in found], least_shared)
    left_out = {found[0][0], field, fields.labels}
    made: dict[str, Any] = {
        fields.tokens or TOKENS: tree.tokens,
        TREE_FIELD: tree.mask,
        REPEATED_FIELD: repeated,
        field: samples[0][field],
        SAMPLES: [{name: x for name, x in sample.items() if name not in left_out} for sample in samples],
    }
    if fields.labels is not None:
        made[fields.labels] = _shared_labels(samples, tree.paths, len(tree), fields.labels, where)
    return made


def _shared_labels(samples: list[Any], paths: list[Any], tokens: int, field: str, where: str) -> Any:
    """Return the label of each token of a tree of ``tokens`` tokens, from the field ``field`` of its samples.

    ``paths`` has, for each sample, the places of its tokens in the tree. Raise ValueError if a sample does not have a
    label for each of its tokens or no field ``field``, or if samples have different labels for a token that they share.
    """
    labels, known = np.zeros(tokens, np.int64), np.zeros(tokens, bool)
    for sample, path in zip(samples, paths, strict=True):
        if field not in sample:
            raise ValueError(
                f"{where} has a sample without the field {field!r} that Samples(labels={field!r}) names; it has "
                f"{sorted(map(str, sample))}: give every sample labels, or leave labels= out to train on next tokens"
            )
        given = np.asarray(sample[field])
        if given.shape != path.shape:
            raise ValueError(f"{where}: field {field!r} has shape {list(given.shape)} for {len(path)} tokens")
        if np.any(known[path] & (labels[path] != given)):
            raise ValueError(
                f"{where}: samples of one tree have different labels in {field!r} for a token that they share; give "
                "each a mask of its own, and weights by edges.weights(tokens=masks)"
            )
        labels[path], known[path] = given, True
    return labels
