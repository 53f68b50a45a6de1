"""The batch that a command is about. Lengths on the command line are one batch; a file of them is a data set, of which batches are cut.

Batches are cut as ``flexcp advise`` cuts passes, so both look at the same documents; which one was taken is said beside the result.
"""

from __future__ import annotations

from dataclasses import dataclass

TOKENS_PER_RANK = 32_768
"""What a rank is taken to hold where no cap is given."""


@dataclass(frozen=True)
class Taken:
    """Lengths of one batch, and which part of a file they are; no words where they are all there is."""

    lengths: list[int]
    words: str = ""


def take_batch(text: str, ranks: int, max_tokens_per_rank: int | None, number: int | None) -> Taken:
    """The batch that ``--lengths text --batch number`` names, for so many ranks."""
    from flexcp.data.lengths import batch_tokens, cut_batches, is_lengths_file, parse_lengths

    lengths = parse_lengths(text)
    if not is_lengths_file(text):
        if number is not None:
            raise ValueError(f"--batch {number} is for a file of lengths; {text!r} is one batch")
        return Taken(lengths)
    cap = TOKENS_PER_RANK if max_tokens_per_rank is None else max_tokens_per_rank
    most = batch_tokens(cap, ranks)
    batches = cut_batches(lengths, most)
    at = 1 if number is None else number
    if not 1 <= at <= len(batches):
        raise ValueError(f"--batch {at}: {text} makes {len(batches)} batches of up to {most:,} tokens, numbered from 1")
    taken = batches[at - 1]
    if len(taken) == len(lengths):
        return Taken(lengths)
    return Taken(
        taken,
        f"batch {at} of {len(batches)} in {text.removeprefix('@')} ({sum(taken):,} of {sum(lengths):,} tokens; up to {most:,} a batch, "
        f"7/8 of {ranks} ranks x {cap:,}; --batch and --max-tokens-per-rank choose others)",
    )
