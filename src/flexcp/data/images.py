"""Images: documents with images and videos in them, as the two batches that they are.

The *language* batch is the documents, in which an image or a video is a span of tokens that may see each other. The *encoder* batch is the
frames of all images and videos, in order of appearance: many small documents of patches with full attention. ``merge`` neighbouring patches
become one token of the span. Each batch has a plan of its own over the same ranks; ``sources`` says where the encoder's rows go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexcp.masks import Mask, causal, modality

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Span:
    """An image or a video in a document: its tokens ``start..stop``, and the frames that attend alone in the encoder."""

    start: int
    stop: int
    frames: int = 1


@dataclass(frozen=True)
class ImageBatch:
    """Documents of ``lengths`` tokens with ``spans[document]`` in them; ``merge`` patches make a token."""

    lengths: tuple[int, ...]
    spans: tuple[tuple[Span, ...], ...]
    merge: int = 4

    def __post_init__(self) -> None:
        if len(self.spans) != len(self.lengths):
            raise ValueError(f"{len(self.spans)} lists of spans for {len(self.lengths)} documents; give one each")
        for document, (n, spans) in enumerate(zip(self.lengths, self.spans, strict=True)):
            end = 0
            for span in spans:
                if not end <= span.start < span.stop <= n:
                    raise ValueError(
                        f"{span} does not lie in document {document} of {n} tokens after token {end}; spans ascend"
                    )
                if span.frames < 1 or (span.stop - span.start) * self.merge % span.frames:
                    patches = (span.stop - span.start) * self.merge
                    raise ValueError(f"{span} has {patches} patches, which are no {span.frames} frames of equal size")
                end = span.stop

    @property
    def encoder_lengths(self) -> list[int]:
        """Patches of every frame."""
        found: list[int] = []
        for span in (s for spans in self.spans for s in spans):
            found += [(span.stop - span.start) * self.merge // span.frames] * span.frames
        return found

    def masks(self) -> list[Mask]:
        """The documents' masks: causal, with both directions inside a span."""
        return [modality([(s.start, s.stop) for s in spans]) if spans else causal() for spans in self.spans]

    def sources(self) -> Ints:
        """``[tokens, merge]``: the encoder's rows that make each token of the stream; -1 for text."""
        found = np.full((sum(self.lengths), self.merge), -1, np.int64)
        begin = row = 0
        for n, spans in zip(self.lengths, self.spans, strict=True):
            for span in spans:
                count = (span.stop - span.start) * self.merge
                found[begin + span.start : begin + span.stop] = np.arange(row, row + count).reshape(-1, self.merge)
                row += count
            begin += n
        return found


def with_images(
    lengths: Sequence[int], shares: Sequence[float], merge: int = 4, frames: Sequence[int] | None = None
) -> ImageBatch:
    """A batch in which each document begins with a little text, then one span of about its share of the tokens, then text again."""
    spans = []
    for document, (n, share) in enumerate(zip(lengths, shares, strict=True)):
        size = int(n * share)
        count = 1 if frames is None else frames[document]
        size -= size % count  # whole tokens a frame
        start = min(16, n - size)
        spans.append((Span(start, start + size, count),) if size else ())
    return ImageBatch(tuple(int(n) for n in lengths), tuple(spans), merge)
