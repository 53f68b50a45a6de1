"""Images: documents with images and videos, as two batches: one for the language model, one for the image encoder.

The *language* batch holds the documents, in which an image or a video is a span of tokens that see each other. The
*encoder* batch holds the frames of all images and videos, in order of appearance: each frame is a small document of
patches with full attention. ``merge`` neighbouring patches become one token of the span. Each batch has its own plan
over the same ranks; ``sources`` says which rows of the encoder make up which token.

An encoder with windows (Qwen2.5-VL) attends inside squares of ``window`` x ``window`` tokens in most layers, and over
whole frames in the others. The encoder batch then holds the patches of a frame window by window, in the order of the
model itself, so that a window is a range of rows. Both kinds of layers are masks of one plan. ``encoder_order`` gives
the order of the patches and ``encoder_masks`` the masks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from flexcp.masks import Mask, causal, from_slices, full, modality

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Span:
    """An image or a video in a document: its tokens ``start <= t < stop`` and its number of frames.

    In the encoder a frame attends only to itself. ``width`` is the number of patches in a row of a frame; only encoders
    with windows need it.
    """

    start: int
    stop: int
    frames: int = 1
    width: int = 0


@dataclass(frozen=True)
class ImageBatch:
    """Documents of ``lengths`` tokens with the images and videos ``spans[document]``, in ascending order.

    A square of ``merge`` encoder patches makes a token. ``window`` is the side, in tokens, of the squares inside which
    most layers of the encoder attend; 0 for an encoder without windows. Raise ValueError if a span is outside its
    document, overlaps another, or cannot be divided into its frames.
    """

    lengths: tuple[int, ...]
    spans: tuple[tuple[Span, ...], ...]
    merge: int = 4
    window: int = 0

    def __post_init__(self) -> None:
        if len(self.spans) != len(self.lengths):
            raise ValueError(f"{len(self.spans)} lists of spans for {len(self.lengths)} documents; give one each")
        for document, (n, spans) in enumerate(zip(self.lengths, self.spans, strict=True)):
            end = 0
            for span in spans:
                if not end <= span.start < span.stop <= n:
                    raise ValueError(
                        f"{span} must lie in document {document} of {n} tokens and begin at token {end} or later; "
                        "spans are in ascending order"
                    )
                if span.frames < 1 or (span.stop - span.start) * self.merge % span.frames:
                    patches = (span.stop - span.start) * self.merge
                    raise ValueError(f"{span} has {patches} patches, which {span.frames} equal frames cannot have")
                if self.window:
                    self._check_width(span)
                end = span.stop

    def _check_width(self, span: Span) -> None:
        """Raise ValueError unless the frames of a span are whole rows of tokens, each ``span.width`` patches wide."""
        tokens = (span.stop - span.start) // span.frames
        across = span.width // isqrt(self.merge)
        if across < 1 or span.width % isqrt(self.merge) or tokens % across:
            raise ValueError(
                f"{span} has no rows of width={span.width} patches, {tokens} tokens a frame of {self.merge} patches "
                "each; windows need the patches of a row, as in Span(start, stop, frames, width=grid[2])"
            )

    @property
    def encoder_lengths(self) -> list[int]:
        """The number of patches of every frame, which are the documents of the encoder batch."""
        found: list[int] = []
        for span in (s for spans in self.spans for s in spans):
            found += [(span.stop - span.start) * self.merge // span.frames] * span.frames
        return found

    def encoder_masks(self) -> dict[str, list[Mask]]:
        """Return the masks of the frames by kind of encoder layer: ``"full"`` and, with windows, ``"window"``."""
        found = [full()] * len(self.encoder_lengths)
        if not self.window:
            return {"full": found}
        tiles = [_tiled(*frame, self.window, self.merge)[1] for frame in self._frames()]
        return {"full": found, "window": tiles}

    def encoder_order(self) -> Ints:
        """Return the number of the patch at each row of the encoder batch.

        Patches are numbered frame by frame, in a frame token by token (row by row), and the ``merge`` patches of a
        token follow each other. With windows, the rows of a frame are ordered window by window instead.
        """
        if not self.window:
            return np.arange(sum(self.encoder_lengths))
        orders = [_tiled(*frame, self.window, self.merge)[0] for frame in self._frames()]
        begin = np.concatenate([[0], np.cumsum(self.encoder_lengths)])[:-1]
        return np.concatenate([begin[:0], *(order + at for order, at in zip(orders, begin, strict=True))])

    def _frames(self) -> list[tuple[int, int]]:
        """Return (height, width) of every frame, in tokens."""
        found: list[tuple[int, int]] = []
        for span in (s for spans in self.spans for s in spans):
            across = span.width // isqrt(self.merge)
            found += [((span.stop - span.start) // span.frames // across, across)] * span.frames
        return found

    def masks(self) -> list[Mask]:
        """Return the masks of the documents for the language model: causal, and full inside a span."""
        return [modality([(s.start, s.stop) for s in spans]) if spans else causal() for spans in self.spans]

    def sources(self) -> Ints:
        """Return ``[tokens, merge]``: the encoder rows that make up each token of the documents, -1 for text."""
        found = np.full((sum(self.lengths), self.merge), -1, np.int64)
        begin = row = 0
        for n, spans in zip(self.lengths, self.spans, strict=True):
            for span in spans:
                count = (span.stop - span.start) * self.merge
                found[begin + span.start : begin + span.stop] = np.arange(row, row + count).reshape(-1, self.merge)
                row += count
            begin += n
        if not self.window:
            return found
        row_of_patch = np.argsort(self.encoder_order())
        return np.where(found < 0, -1, row_of_patch[found])


@lru_cache(maxsize=1024)
def _tiled(height: int, width: int, window: int, merge: int) -> tuple[Ints, Mask]:
    """Return the patches of a frame window by window, and the mask under which each patch sees its window.

    ``height`` and ``width`` of the frame and the side ``window`` of a window are in tokens of ``merge`` patches.
    """
    down, across = (each.reshape(-1) for each in np.mgrid[:height, :width])
    order = np.lexsort((across, down, across // window, down // window))
    number = (down // window * width + across // window)[order]
    ends = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), height * width]
    slices = [(a * merge, b * merge, a * merge, b * merge, None, None) for a, b in pairwise(ends)]
    patches = (order[:, None] * merge + np.arange(merge)).reshape(-1)
    return patches, from_slices(height * width * merge, slices)
