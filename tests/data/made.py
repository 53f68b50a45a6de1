"""Synthetic datasets: every token id encodes the number of its sample and its row within the sample."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from flexcp.data import Batches, Planning, Samples

LENGTHS = [30, 1, 2, 77, 5, 64, 3, 1, 90, 12, 41, 8, 8, 1, 55, 19, 100, 2, 6, 33, 47, 21, 1, 9]
ROWS = 1000


def arguments(**given: Any) -> dict[str, Any]:
    """Return arguments of a Loader from a flat list of its settings: ``workers=0`` becomes
    ``planning=Planning(workers=0)``; names that are no field of ``Samples``, ``Batches`` or ``Planning`` stay as they
    are.
    """
    found: dict[str, Any] = {}
    for part, kind in (("samples", Samples), ("batches", Batches), ("planning", Planning)):
        names = [field.name for field in dataclasses.fields(kind) if field.name in given]
        found[part] = kind(**{name: given.pop(name) for name in names})
    return {**given, **found}


def token(number: int, row: int) -> int:
    return number * ROWS + row


def sample(number: int, length: int) -> dict[str, Any]:
    """Return a sample with token ids, a vector for each token, a span of an image and two values of the document."""
    rows = torch.arange(length, device="cpu")
    return {
        "tokens": number * ROWS + rows,
        "weight": np.stack([rows.numpy() + number, -rows.numpy()], 1).astype(np.float32),
        "images": [(length // 3, length // 2)] if length > 8 else [],
        "id": f"sample {number}",
        "score": number / 2,
    }


class Numbered:
    """A map-style dataset that records which samples are read."""

    def __init__(self, lengths: list[int] = LENGTHS, known: bool = False, broken: int | None = None) -> None:
        self.sizes, self.broken = lengths, broken
        if known:
            self.lengths = lengths
        self.reads: list[int] = []

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, number: int) -> dict[str, Any]:
        if number == self.broken:
            raise OSError(f"sample {number} is on a bad disk")
        self.reads.append(number)
        return sample(number, self.sizes[number])


class Stream:
    """An iterable dataset without a state of its own."""

    def __init__(self, lengths: list[int] = LENGTHS) -> None:
        self.sizes = lengths
        self.reads: list[int] = []

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number, length in enumerate(self.sizes):
            self.reads.append(number)
            yield sample(number, length)


class StatefulStream(Stream):
    """An iterable dataset that resumes from a state and never repeats earlier samples. It yields lists of three."""

    at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < len(self.sizes):
            some = range(self.at, min(self.at + 3, len(self.sizes)))
            self.at = some.stop
            self.reads += some
            yield [sample(n, self.sizes[n]) for n in some]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class EpochStream(StatefulStream):
    """An iterable dataset that ignores a state of another epoch than its own, as Hugging Face's do."""

    epoch = 0
    loaded: tuple[int, int] | None = None
    """The (epoch, place) of a loaded state, until the dataset is iterated."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        epoch, at = self.loaded or (self.epoch, 0)
        self.at, self.loaded = at if epoch == self.epoch else 0, None
        return super().__iter__()

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state["epoch"], state["at"]


def batches_by_hand(numbers: list[int], lengths: list[int], budget: int) -> list[list[int]]:
    """Fill sample numbers into batches in order, each of at most ``budget`` tokens."""
    found: list[list[int]] = [[]]
    for n in numbers:
        if sum(lengths[i] for i in found[-1]) + lengths[n] > budget:
            found.append([])
        found[-1].append(n)
    return found
