"""Lengths: read document lengths from the text forms of ``--lengths``, and draw them from named distributions.

A named distribution is drawn with a token budget and a seed: ``web:131072:0`` is a batch of exactly 131,072 tokens.
Documents are drawn one after the other, each limited to the longest of the distribution (``web``: a quarter of the
budget, as in MagiAttention's benchmark), and the last is cut to fill the budget. Draws are integers from tables, or
rounded from closed forms, so they are the same on every machine.

Sources of the distributions: ``web`` are 13.5 million web documents, in bins published with MagiAttention;
``wikipedia`` are percentiles of lengths published with FlexSP; ``libra256k`` and ``libra1m`` are mixtures that
reproduce Libra's published percentiles; ``lognormal16k`` and ``bimodal`` are the synthetic sets of block-level FCP. Our
own choices are ``longalign`` (8K to 64K, like instruction sets of long documents), ``longtail`` (many short and few
very long documents, like LongDataCollections), ``video`` (clips of 2K to 128K tokens), ``images`` (encoder documents of
256 to 4,096 tokens), and ``equal`` (all documents have 8,192 tokens: a control in which no planner can gain anything).

Counts of tokens may be written with a letter, as context lengths are: ``4k`` is 4,096 and ``1m`` is 1,048,576.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from flexcp.io.plain_values import shown, shown_names

Rng = np.random.Generator
FORMS = "4096,4k,1 or 64x2048 or @file (one a line, or .jsonl) or NAME:TOKENS:SEED, as in web:131072:0"
LETTERS = {"": 1, "k": 1 << 10, "m": 1 << 20}
"""The factor for which the letter after a count of tokens stands: 4k is 4,096 tokens."""
JSONL = (".jsonl", ".ndjson")
PADDING_MASK = "attention_mask"
JSONL_FIELDS = ("input_ids", "tokens", "length")
"""The fields in which a document is searched, in this order; a length beside token ids has to be their number."""
ADVISE_ALONE = "texts (--tokenizer), other fields (--field), trees and hf: data sets are read by flexcp advise alone"
SLACK = 8
"""One in this many of the tokens that ranks may keep stays free in a batch (see :func:`batch_tokens`)."""
MOST_DOCUMENTS = 100_000_000
"""The most documents of ``NxLENGTH``: a larger number is a typing error and would fill the memory."""
MOST_DRAWN = 1 << 36
"""The most tokens of documents that are drawn; a larger number is a typing error and would fill the memory."""

_WEB_BINS = (
    (1, 10, 30254),
    (11, 50, 391188),
    (51, 100, 699596),
    (101, 200, 1377757),
    (201, 500, 3794735),
    (501, 1024, 3316785),
    (1025, 2048, 2106566),
    (2049, 4096, 988525),
    (4097, 8192, 410002),
    (8193, 16384, 173574),
    (16385, 32768, 115007),
    (32769, 65536, 18428),
    (65537, 131072, 22513),
    (131073, 196608, 18284),
)
_WIKIPEDIA = (
    (0, 2),
    (10_000, 39),
    (20_000, 48),
    (50_000, 67),
    (100_000, 88),
    (150_000, 103),
    (200_000, 122),
    (250_000, 146),
    (300_000, 172),
    (350_000, 207),
    (400_000, 244),
    (450_000, 292),
    (500_000, 350),
    (550_000, 414),
    (600_000, 474),
    (650_000, 558),
    (700_000, 687),
    (750_000, 868),
    (800_000, 1_107),
    (850_000, 1_487),
    (900_000, 2_146),
    (925_000, 2_732),
    (950_000, 3_752),
    (965_000, 4_896),
    (980_000, 7_129),
    (990_000, 11_050),
    (995_000, 15_878),
    (998_000, 26_539),
    (999_000, 36_815),
    (999_500, 50_436),
    (999_900, 91_215),
    (1_000_000, 255_988),
)


def _from_bins(rng: Rng, budget: int) -> int:
    """Draw a length of ``web``: a bin by its count, uniform inside the bin, and at most a quarter of ``budget``."""
    counts = [c for _, _, c in _WEB_BINS]
    at = int(rng.integers(sum(counts)))
    for low, high, count in _WEB_BINS:
        if at < count:
            return min(int(rng.integers(low, high + 1)), max(1, budget // 4))
        at -= count
    raise AssertionError("bins are exhausted")


def _from_percentiles(rng: Rng, budget: int) -> int:
    """Draw a length of ``wikipedia``: uniform between neighbouring percentiles (in millionths).

    ``budget`` is not used.
    """
    at = int(rng.integers(1_000_000))
    for (p, low), (q, high) in pairwise(_WIKIPEDIA):
        if at < q:
            return low + (high - low) * (at - p) // (q - p)
    raise AssertionError("percentiles end at 100 %")


def _lognormals(*parts: tuple[float, float, float], low: int, high: int) -> Callable[[Rng, int], int]:
    """Return a function that draws from a mixture of lognormals (weight, mu, sigma).

    Draws are clipped to ``low`` and ``high``.
    """

    def draw(rng: Rng, budget: int) -> int:
        u = int(rng.integers(1 << 32)) / (1 << 32)
        for weight, mu, sigma in parts:
            if u < weight or (weight, mu, sigma) == parts[-1]:
                break
            u -= weight
        z = NormalDist().inv_cdf((int(rng.integers(1, 1 << 32))) / (1 << 32))
        return min(max(round(math.exp(mu + sigma * z)), low), high)

    return draw


def _around(mean: float, sigma: float) -> tuple[float, float]:
    """Return (mu, sigma) of a lognormal with the given mean."""
    return math.log(mean) - sigma * sigma / 2, sigma


DISTRIBUTIONS: dict[str, Callable[[Rng, int], int]] = {
    "web": _from_bins,
    "wikipedia": _from_percentiles,
    "libra256k": _lognormals((0.97, 6.367, 1.08), (0.03, 10.0, 1.0), low=1, high=262_144),
    "libra1m": _lognormals((0.97, 6.424, 1.12), (0.03, 10.7, 1.0), low=1, high=1_048_576),
    "lognormal16k": _lognormals((1.0, *_around(16_384, 0.7)), low=1024, high=524_288),
    "bimodal": _lognormals((0.5, *_around(16_384, 0.5)), (0.5, *_around(65_536, 0.5)), low=1024, high=524_288),
    "longalign": _lognormals((1.0, *_around(20_000, 0.6)), low=8_192, high=65_536),
    "longtail": _lognormals((0.7, 7.0, 1.0), (0.3, 9.3, 0.8), low=64, high=131_072),
    "video": _lognormals((1.0, *_around(24_000, 1.0)), low=2_048, high=131_072),
    "images": _lognormals((1.0, *_around(1_024, 0.7)), low=256, high=4_096),
    "equal": lambda rng, budget: 8_192,
}


def draw_lengths(name: str, tokens: int, seed: int = 0) -> list[int]:
    """Draw document lengths from a named distribution until they add up to exactly ``tokens``; the last one is cut.

    Raise ValueError for an unknown name, fewer than 1 token, or more than ``MOST_DRAWN``.
    """
    if name not in DISTRIBUTIONS:
        close = difflib.get_close_matches(name, DISTRIBUTIONS, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"unknown length distribution {name!r}: {hint}known ones are {', '.join(DISTRIBUTIONS)}")
    if tokens < 1:
        raise ValueError(f"a batch needs a budget of at least 1 token; got {tokens}")
    if tokens > MOST_DRAWN:
        raise ValueError(f"{tokens:,} tokens are too many to draw documents of; at most {MOST_DRAWN:,} are")
    rng = np.random.default_rng(seed)
    found: list[int] = []
    left = tokens
    while left:
        found.append(min(DISTRIBUTIONS[name](rng, tokens), left))
        left -= found[-1]
    return found


def parse_count(word: str) -> int:
    """Return a count of tokens: digits that a sign may precede and k (1,024) or m (1,048,576) may follow.

    Raise a ValueError without a message for any other text; callers add the message.
    """
    match = re.fullmatch(r"([+-]?[0-9]{1,18})([km]?)", word.strip().lower())
    if match is None:
        raise ValueError
    return int(match[1]) * LETTERS[match[2]]


def parse_lengths(text: str) -> list[int]:
    """Return document lengths, in tokens, from a text form such as ``"4096,4k,1"``.

    The forms are lengths separated by commas (``4k`` is 4,096), ``64x2048`` for 64 documents of 2,048 tokens, ``@file``
    (or the path of an existing file) for a file with one length a line or a ``.jsonl`` (:func:`jsonl_lengths`), and
    ``NAME:TOKENS:SEED`` for a draw from a named distribution, as in ``web:131072:0`` (the seed is 0 by default). Raise
    ValueError for any other text, and for lengths below 1.
    """
    if is_lengths_file(text):
        return _read(Path(text.removeprefix("@")))
    if text.startswith("hf:"):
        raise ValueError(f"lengths {text!r}: {ADVISE_ALONE}; write {FORMS}")
    name, _, tail = text.partition(":")
    if tail:
        parts = tail.split(":")
        try:
            tokens, seed = parse_count(parts[0]), int(parts[1]) if len(parts) > 1 else 0
        except ValueError:
            parts = []
        if not 1 <= len(parts) <= 2 or seed < 0:
            raise ValueError(f"lengths {text!r}: after the name come a token budget and a seed, as in web:131072:0")
        return draw_lengths(name, tokens, seed)
    found: list[int] = []
    words = text.split(",")
    for at, word in enumerate(words):
        if at and re.match(r"\s*0[0-9]", word):
            raise ValueError(_thousands(text, words, at))
        count, x, length = word.strip().partition("x")
        try:
            times, each = (parse_count(count), parse_count(length)) if x else (1, parse_count(count))
        except ValueError:
            raise ValueError(_no_length(text, word)) from None
        if times < 1 or each < 1:
            what = f"{each} is not a length" if each < 1 else f"{times} is not a number of documents"
            raise ValueError(
                f"lengths {text!r}: {what}; a list holds lengths, as in 4096 or 64x2048, each at least 1, and no "
                "running totals"
            )
        if len(found) + times > MOST_DOCUMENTS:
            raise ValueError(
                f"lengths {text!r}: {times:,} documents are too many; at most {MOST_DOCUMENTS:,} are taken"
            )
        found += [each] * times
    return found


def is_lengths_file(text: str) -> bool:
    """Return whether a text form of lengths names a file: it begins with ``@``, or a file of that name exists.

    A pipe is a file here.
    """
    return text.startswith("@") or (not text.isdigit() and (_is(text, Path.is_file) or _is(text, Path.is_fifo)))


def batch_tokens(max_tokens_per_rank: int, ranks: int) -> int:
    """Return the tokens of a batch: 7/8 of what ``ranks`` ranks of ``max_tokens_per_rank`` tokens hold together.

    The rest is left free, so that ranks can keep different counts.
    """
    return max(1, max_tokens_per_rank * ranks * (SLACK - 1) // SLACK)


def cut_batches(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Cut documents, in their order, into batches of at most ``most`` tokens; a longer document is a batch of its own.

    A last batch of less than half of ``most`` is left out, because it is not typical, unless it is the only one.
    """
    found: list[list[int]] = [[]]
    filled = 0
    for length in lengths:
        if found[-1] and filled + length > most:
            found.append([])
            filled = 0
        found[-1].append(length)
        filled += length
    return found[:-1] if len(found) > 1 and filled < most // 2 else found


def left_out_words(lengths: Sequence[int], batches: Sequence[Sequence[int]], batch: str = "batch") -> str:
    """Describe the documents of ``lengths`` that :func:`cut_batches` left out; an empty text if it left out none.

    ``batches`` is its result, and ``batch`` the word for a batch in the description.
    """
    kept = sum(map(len, batches))
    left = lengths[kept:]
    if not left:
        return ""
    which = f"the last {len(left):,} documents" if len(left) > 1 else "the last document"
    return f"{which} ({sum(left):,} tokens), less than half a {batch}, {'are' if len(left) > 1 else 'is'} left out"


def _thousands(text: str, words: Sequence[str], at: int) -> str:
    """Return the error message for lengths with a part that begins with a zero, such as ``16,048``.

    Such parts come from numbers with thousands separators. ``text`` is the whole text, ``words`` its parts, and ``at``
    the part that begins with a zero.
    """
    parts = [word.strip() for word in words]
    first = last = at
    while first and re.match(r"[0-9]{3}(?![0-9])", parts[first]):
        first -= 1
    while last + 1 < len(parts) and re.match(r"[0-9]{3}(?![0-9])", parts[last + 1]):
        last += 1
    ways = []
    if first < at and re.fullmatch(r"([0-9]+x)?[1-9][0-9]{0,2}", parts[first]):
        ways.append(f"{''.join(parts[first : last + 1])} if {','.join(parts[first : last + 1])} is one number")
    if parts[at].strip("0"):
        ways.append(f"{parts[at].lstrip('0')} without the zero if it is a document")
    out = f"write {', or '.join(ways)}" if ways else f"write {FORMS}"
    return f"lengths {text!r}: {parts[at]!r} begins with a zero, and a comma parts documents, not thousands; {out}"


def _no_length(text: str, word: str) -> str:
    """Return the error message for ``word``, a part of the lengths ``text`` that is no length.

    A missing file and a distribution without a budget have messages of their own.
    """
    if text in DISTRIBUTIONS:
        return f"lengths {text!r}: a named distribution needs a token budget and a seed, as in {text}:131072:0"
    if word == text and text and _is(text, Path.is_dir):
        return f"lengths {text!r}: {text} is a folder; name a file in it, or write {FORMS}"
    if word == text and re.search(r"[./\\~]", text) and not re.fullmatch(r"[-+.\d]+", text):
        return f"lengths {text!r}: the file {text} does not exist; write {FORMS}"
    what = "is not a length, and there is no such file" if word == text else "is not a length"
    return f"lengths {text!r}: {word!r} {what}; write {FORMS}"


def _is(text: str, kind: Callable[[Path], bool]) -> bool:
    """Return whether ``text`` is a path of this kind; ``kind`` is a test of paths, such as ``Path.is_file``."""
    try:
        return kind(Path(text))
    except OSError:  # too long for a file name: the text is a list of lengths
        return False


def jsonl_lengths(path: Path | str, field: str | None = None) -> list[int]:
    """Read document lengths, in tokens, from a file with one JSON value a line.

    A line may be a number of tokens, a list of tokens, or an object that has one of these in ``field`` (by default the
    first of ``input_ids``, ``tokens`` and ``length`` that it has). Raise ValueError if the file cannot be read, holds
    nothing, or a line is anything else or has fewer than 1 token.
    """
    found = []
    try:
        with Path(path).open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    found.append(_json_length(line, field, f"{path}, line {number}"))
    except OSError as error:
        raise ValueError(f"cannot read lengths from {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"cannot read lengths from {path}: it is not a text file") from None
    if not found:
        raise ValueError(f"{path} holds no lengths; it should hold one JSON value a line")
    return found


def tokens_in(document: list[Any], where: str) -> int:
    """Return the number of token ids in a list from a file; ``where`` names the line in errors.

    Raise ValueError for a list of lists or objects, because that is several documents.
    """
    inner = next((x for x in document if isinstance(x, list | dict)), None)
    if inner is not None:
        raise ValueError(
            f"{where} holds a list of {'lists' if isinstance(inner, list) else 'objects'}, but a document is one list "
            "of token ids: write one document a line, without a batch dimension"
        )
    return len(document)


def refuse_other_counts(record: Mapping[str, Any], value: Any, chosen: bool, where: str) -> None:
    """Raise ValueError if fields beside a record's token ids say that it has another number of tokens.

    ``value`` is the document that was found in the record; only a list of token ids is checked. An ``attention_mask``
    with a 0 says that some ids are pads. ``length`` has to be the number of ids, unless the user named the field of the
    ids (``chosen``). ``where`` names the record in errors.
    """
    if not isinstance(value, list):
        return
    mask, length = record.get(PADDING_MASK), record.get("length")
    if isinstance(mask, list) and 0 in mask:
        raise ValueError(
            f"{where} is padded: its {PADDING_MASK} is 0 at token {mask.index(0)}, and pads would count as tokens; "
            f"tokenize without padding, and leave {PADDING_MASK} out"
        )
    if not chosen and type(length) is int and length != len(value):
        raise ValueError(
            f"{where} has a list of {len(value):,} token ids, but its length is {length:,}: correct one of the two, or "
            "leave it out"
        )


def _json_length(line: str, field: str | None, where: str) -> int:
    """Return the document length in one line of a JSON lines file; ``where`` names the line in errors.

    ``field`` is the field of an object that holds the document (None: the first of :data:`JSONL_FIELDS`).
    """
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError(f"{where} is not JSON: {line.strip()[:60]!r}") from None
    if isinstance(value, dict):
        name = field or next((n for n in JSONL_FIELDS if n in value), "")
        if name not in value:
            raise ValueError(
                f"{where} has no {field or ' or '.join(JSONL_FIELDS)}; it has {shown_names(value)}: "
                f"give lengths or lists of token ids; {ADVISE_ALONE}"
            )
        refuse_other_counts(value, value[name], field is not None, where)
        value = value[name]
    if isinstance(value, list):
        value = tokens_in(value, where)
    if type(value) is not int:
        raise ValueError(f"{where}: {str(value)[:60]!r} is neither a length nor a list of tokens; {ADVISE_ALONE}")
    if value < 1:
        raise ValueError(f"{where} has a document of {value} tokens; drop it: documents have at least 1 token")
    return value


def _read(path: Path) -> list[int]:
    """Read document lengths from a file: JSON lines, or one number of at least 1 a line.

    Raise ValueError for any other content.
    """
    if path.suffix.lower() in JSONL:
        return jsonl_lengths(path)
    try:
        lines = path.read_text("utf-8-sig").splitlines()  # files from spreadsheets begin with a byte order mark
    except OSError as error:
        raise ValueError(f"cannot read lengths from {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"cannot read lengths from {path}: it is not a text file") from None
    found = []
    for number, word in enumerate(map(str.strip, lines), 1):
        if not word:
            continue
        try:
            length = parse_count(word)
        except ValueError:
            length = 0
        if length < 1:
            raise ValueError(
                f"{path}, line {number}: {shown(word)} is not a length; the file holds one number a line, as in 4096 "
                "or 4k, each at least 1, and no running totals"
            )
        found.append(length)
    if not found:
        raise ValueError(f"{path} holds no lengths; it should hold one number a line")
    return found
