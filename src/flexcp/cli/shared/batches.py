"""The batch that a command is about. Lengths on the command line are one batch; a file of them is a data set,
of which batches are cut.

Batches are cut as ``flexcp advise`` cuts passes, so both look at the same documents; which one was taken is said beside
the result. The cap on a rank's tokens by which a batch was cut holds for its plans too, told or not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from flexcp.cli.shared.option_groups import OptionGroup
from flexcp.cli.shared.progress import say

if TYPE_CHECKING:
    from flexcp.batch import MaskLike
    from flexcp.models.preset import Preset

MASKS = "causal, full, window:W, lambda:S,W, shared-question:N,SHARE, blockwise:B,L, chunked:C, prefix:P, @mask.json"
"""``flexcp.masks.MASK_SIGNATURES``, written out because help must not load NumPy;
tests/masks/test_named.py compares them.
"""
TOKENS_PER_RANK = 32_768
"""What a rank is taken to hold where no cap is given."""

Lengths = Annotated[str, typer.Option(help="4096,4k,1 or 64x2048 or @file or NAME:TOKENS:SEED (web:131072:0).")]
MaybeMask = Annotated[str | None, typer.Option(help=f"{MASKS}; what the model's layers have, else causal, by default.")]


@dataclass(frozen=True)
class Taken:
    """Lengths of one batch, the most tokens a rank may keep of it, and which part of a file it is;
    no words where it is all there is.
    """

    lengths: list[int]
    max_tokens_per_rank: int | None
    words: str = ""


class BatchOptions(OptionGroup):
    """One batch of documents, and their mask."""

    lengths: Lengths
    batch: Annotated[int | None, typer.Option(help="Which batch of a lengths file; the first by default.")] = None
    mask: MaybeMask = None

    @property
    def rule(self) -> MaskLike | None:
        """The mask, or a list with one for each document; None where nothing is told."""
        from flexcp.masks import parse_mask

        return None if self.mask is None else parse_mask(self.mask)

    def layer_masks(self, model: Preset) -> dict[str, tuple[MaskLike, int]]:
        """The masks of the model's layers: its own, unless one is told for all."""
        rule = self.rule
        return dict(model.masks()) if rule is None else {"mask": (rule, model.model.layers)}

    def taken(self, ranks: int, max_tokens_per_rank: int | None) -> Taken:
        """The batch, for so many ranks."""
        return take_batch(self.lengths, ranks, max_tokens_per_rank, self.batch)

    def announced(self, ranks: int, max_tokens_per_rank: int | None) -> Taken:
        """The same; which part of a file it is, is said at once."""
        taken = self.taken(ranks, max_tokens_per_rank)
        if taken.words:
            say(taken.words)
        return taken


def take_batch(text: str, ranks: int, max_tokens_per_rank: int | None, number: int | None) -> Taken:
    """The batch that ``--lengths text --batch number`` names, for so many ranks."""
    from flexcp.data.lengths import batch_tokens, cut_batches, is_lengths_file, left_out_words, parse_lengths

    lengths = parse_lengths(text)
    if not is_lengths_file(text):
        if number is not None:
            raise ValueError(f"--batch {number} is for a file of lengths; {text!r} is one batch")
        return Taken(lengths, max_tokens_per_rank)
    cap = TOKENS_PER_RANK if max_tokens_per_rank is None else max_tokens_per_rank
    most = batch_tokens(cap, ranks)
    batches = cut_batches(lengths, most)
    at = 1 if number is None else number
    left = left_out_words(lengths, batches)
    left = "".join(f"; {words}" for words in (left, _too_long_words(lengths, ranks, cap)) if words)
    if not 1 <= at <= len(batches):
        count = f"{len(batches)} batches" if len(batches) > 1 else "1 batch"
        raise ValueError(f"--batch {at}: {text} makes {count} of up to {most:,} tokens, numbered from 1{left}")
    taken = batches[at - 1]
    if len(taken) == len(lengths):
        return Taken(lengths, max_tokens_per_rank)
    first = sum(map(len, batches[: at - 1]))
    which = f"document {first}" if len(taken) == 1 else f"documents {first} to {first + len(taken) - 1}"
    own = ", which this one document exceeds" if sum(taken) > most else ""
    return Taken(
        taken,
        cap,
        f"batch {at} of {len(batches)} in {text.removeprefix('@')} ({which} of the file, counted from 0; "
        f"{sum(taken):,} of {sum(lengths):,} tokens; up to {most:,} a batch, "
        f"7/8 of {ranks} ranks x {cap:,}{own}; --batch and --max-tokens-per-rank choose others){left}",
    )


def _too_long_words(lengths: list[int], ranks: int, cap: int) -> str:
    """Which documents all ranks together cannot keep; none where they can."""
    longer = [d for d, length in enumerate(lengths) if length > ranks * cap]
    if not longer:
        return ""
    others = f" and {len(longer) - 1:,} more" if len(longer) > 1 else ""
    return (
        f"document {longer[0]} of the file ({lengths[longer[0]]:,} tokens){others} can run in no batch: {ranks} ranks "
        f"x {cap:,} tokens keep {ranks * cap:,}"
    )
