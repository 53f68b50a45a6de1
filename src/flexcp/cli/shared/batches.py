"""The batch of a command, from ``--lengths`` and ``--batch``.

Lengths on the command line are one batch; a file of lengths is a data set, which is cut into batches. They are cut as
``flexcp advise`` cuts passes, so both use the same documents; the result says which batch was taken. The cap on a
rank's tokens by which a batch was cut also holds for its plans, whether it was given or is the default.
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
"""A copy of ``flexcp.masks.MASK_SIGNATURES``, because help must not load NumPy.

tests/masks/test_named.py compares them.
"""
TOKENS_PER_RANK = 32_768
"""Tokens that a rank is assumed to hold if a file of lengths is cut and no cap is given."""

Lengths = Annotated[str, typer.Option(help="4096,4k,1 or 64x2048 or @file or NAME:TOKENS:SEED (web:131072:0).")]
MaybeMask = Annotated[str | None, typer.Option(help=f"{MASKS}; what the model's layers have, else causal, by default.")]


@dataclass(frozen=True)
class Taken:
    """The batch that a command uses.

    ``lengths`` are the tokens of its documents, ``max_tokens_per_rank`` is the most tokens a rank may keep of it (None:
    no cap), and ``words`` say which part of a file it is (empty if it is not part of a file).
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
        """The mask, or a list with one for each document; None if none was given."""
        from flexcp.masks import parse_mask

        return None if self.mask is None else parse_mask(self.mask)

    def layer_masks(self, model: Preset) -> dict[str, tuple[MaskLike, int]]:
        """Return the masks of the model's layers: its own, unless one was given for all."""
        rule = self.rule
        return dict(model.masks()) if rule is None else {"mask": (rule, model.model.layers)}

    def taken(self, ranks: int, max_tokens_per_rank: int | None) -> Taken:
        """Return the batch for this many ranks (see :func:`take_batch`)."""
        return take_batch(self.lengths, ranks, max_tokens_per_rank, self.batch)

    def announced(self, ranks: int, max_tokens_per_rank: int | None) -> Taken:
        """Return the batch for this many ranks; if it is part of a file, say on stderr which part."""
        taken = self.taken(ranks, max_tokens_per_rank)
        if taken.words:
            say(taken.words)
        return taken


def take_batch(text: str, ranks: int, max_tokens_per_rank: int | None, number: int | None) -> Taken:
    """Return the batch that ``--lengths text --batch number`` names, for this many ranks.

    Only a file of lengths is cut into batches, each of at most 7/8 of ``ranks * max_tokens_per_rank`` tokens, with
    ``TOKENS_PER_RANK`` if that is None; a longer document is a batch of its own. Raise ValueError if there is no batch
    ``number`` (from 1; None is the first), or if one of its documents is longer than all ranks together can keep.
    """
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
    first = sum(map(len, batches[: at - 1]))
    _refuse_too_long(taken, first, ranks, cap)
    if len(taken) == len(lengths):
        return Taken(lengths, max_tokens_per_rank)
    which = f"document {first}" if len(taken) == 1 else f"documents {first} to {first + len(taken) - 1}"
    own = ", which this one document exceeds" if sum(taken) > most else ""
    return Taken(
        taken,
        cap,
        f"batch {at} of {len(batches)} in {text.removeprefix('@')} ({which} of the file, counted from 0; "
        f"{sum(taken):,} of {sum(lengths):,} tokens; up to {most:,} a batch, "
        f"7/8 of {ranks} ranks x {cap:,}{own}; --batch and --max-tokens-per-rank choose others){left}",
    )


def _refuse_too_long(batch: list[int], first: int, ranks: int, cap: int) -> None:
    """Raise ValueError if a document has more tokens than ``ranks`` ranks of ``cap`` tokens can keep together.

    ``first`` is the number in the file of the batch's first document.
    """
    longest = max(batch, default=0)
    if longest > ranks * cap:
        raise ValueError(
            f"document {first + batch.index(longest)} of the file (counted from 0) has {longest:,} tokens, and {ranks} "
            f"ranks x {cap:,} tokens keep {ranks * cap:,}; raise --max-tokens-per-rank to {-(-longest // ranks):,}, "
            "use more ranks, choose another --batch, or cut the document"
        )


def _too_long_words(lengths: list[int], ranks: int, cap: int) -> str:
    """Return words on documents that ``ranks`` ranks of ``cap`` tokens cannot keep together; empty without any."""
    longer = [d for d, length in enumerate(lengths) if length > ranks * cap]
    if not longer:
        return ""
    others = f" and {len(longer) - 1:,} more" if len(longer) > 1 else ""
    return (
        f"document {longer[0]} of the file ({lengths[longer[0]]:,} tokens){others} can run in no batch: {ranks} ranks "
        f"x {cap:,} tokens keep {ranks * cap:,}"
    )
