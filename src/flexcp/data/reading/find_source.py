"""Find source: choose how the samples of a dataset are read, by what is known of them beforehand."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexcp.data.lengths import parse_lengths
from flexcp.data.reading.known_source import KnownSource
from flexcp.data.reading.read_source import ReadSource
from flexcp.data.reading.row_sharing import Peers
from flexcp.data.reading.sources import Reading, is_map_style
from flexcp.masks import Mask

Ints = NDArray[np.int64]


def find_source(dataset: Any, lengths: Any, reading: Reading, peers: Peers) -> KnownSource | ReadSource:
    """Return the source for a dataset: a ``KnownSource`` if lengths and masks are known without reading samples.

    ``lengths`` defaults to the dataset's attribute of that name. Raise ValueError if arguments need a map-style dataset
    and it is none, or if there is not one mask, list of spans or length for each sample.
    """
    by_number = [s for s in (reading.masks.by_number, reading.masks.spans_by_number) if s is not None]
    by_number += [m for m, _ in (reading.masks.named or {}).values() if not isinstance(m, Mask)]
    if not is_map_style(dataset):
        if lengths is not None or by_number or reading.shuffle:
            what = "lengths=" if lengths is not None else "a mask for each document" if by_number else "shuffle=True"
            raise ValueError(
                f"{what} needs a map-style dataset, with numbers; {type(dataset).__name__} can only be iterated"
            )
        return ReadSource(dataset, None, reading, peers)
    for given in by_number:
        if len(given) != len(dataset):
            raise ValueError(
                f"{len(given)} masks or spans for {len(dataset)} samples; give one for each, or one for all"
            )
    lengths = getattr(dataset, "lengths", None) if lengths is None else lengths
    if lengths is None or not reading.masks.known:
        return ReadSource(dataset, len(dataset), reading, peers)
    return KnownSource(dataset, _checked_lengths(lengths, len(dataset)), reading)


def _checked_lengths(lengths: Any, samples: int) -> Ints:
    """Return the lengths as an array; raise ValueError unless there is a positive one for each of ``samples`` samples.

    ``lengths`` is a sequence of numbers, or a text for :func:`~flexcp.data.lengths.parse_lengths`.
    """
    given = np.asarray(parse_lengths(lengths) if isinstance(lengths, str) else lengths)
    if given.shape != (samples,) or not np.issubdtype(given.dtype, np.integer):
        raise ValueError(
            f"lengths must be one whole number for each of the {samples} samples; got {given.dtype} {given.shape}"
        )
    if samples == 0:
        raise ValueError("the dataset has no samples")
    if given.min() < 1:
        raise ValueError(f"document {int(np.argmin(given))} has no tokens; drop it: documents have at least 1 token")
    return given.astype(np.int64)
