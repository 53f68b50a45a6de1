"""Document lengths in the forms that users have: the grammar of ``--lengths``, JSON lines of texts or token ids,
Hugging Face data sets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from flexcp.data.lengths import JSONL, parse_lengths, refuse_other_counts, tokens_in
from flexcp.io.json_files import json_line
from flexcp.io.plain_values import shown, shown_names

FIELDS = ("input_ids", "tokens", "text", "content", "length")
"""Fields that are tried for a document when no field is named."""
EVERY = 10_000

Count = Callable[[str], int]


def document_lengths(
    text: str, tokenizer: str | None, field: str | None, tell: Callable[[str], None] = lambda _: None
) -> list[int]:
    """Return the lengths that ``text`` names. ``tokenizer`` counts the tokens of texts;
    ``tell`` receives progress messages.
    """
    if text.startswith("hf:"):
        rows = ((f"{text}, row {number}", row) for number, row in enumerate(_dataset(text)))
        return _lengths(rows, text, field, _counter(tokenizer), tell)
    path = Path(text.removeprefix("@"))
    if path.suffix.lower() in JSONL:
        return _lengths(_lines(path), str(path), field, _counter(tokenizer), tell)
    if tokenizer is not None or field is not None:
        raise ValueError(f"--tokenizer and --field are for .jsonl files and hf: data sets; {text!r} is neither")
    return parse_lengths(text)


def _lengths(
    records: Iterable[tuple[str, Any]], where: str, field: str | None, count: Count | None, tell: Callable[[str], None]
) -> list[int]:
    """Return the lengths of (place, document) pairs."""
    found: list[int] = []
    for number, (place, record) in enumerate(records, 1):
        found.append(_length(record, place, field, count))
        if number % EVERY == 0:
            tell(f"read {number:,} documents of {where}")
    if not found:
        raise ValueError(f"{where} holds no documents")
    return found


def _length(record: Any, where: str, field: str | None, count: Count | None) -> int:
    value = record
    if isinstance(record, dict):
        name = field or next((f for f in FIELDS if f in record), None)
        if name is None or name not in record:
            raise ValueError(
                f"{where} has no field {name or ' or '.join(FIELDS)}; it has {shown_names(record)}: "
                "name one with --field"
            )
        value = record[name]
        refuse_other_counts(record, value, field is not None, where)
    if isinstance(value, str):
        if count is None:
            raise ValueError(f"{where} is a text; name a tokenizer with --tokenizer to count its tokens")
        value = count(value)
    elif isinstance(value, list):
        value = tokens_in(value, where)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(
            f"{where}: {shown(value)} is no document; "
            "it should be a text, a list of token ids or a length of at least 1"
        )
    return value


def _lines(path: Path) -> Iterable[tuple[str, Any]]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    place = f"{path}, line {number}"
                    yield place, json_line(line, place)
    except OSError as error:
        raise ValueError(f"cannot read documents from {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"cannot read documents from {path}: it is not a text file") from None


def _dataset(text: str) -> Iterable[Any]:
    """Load ``hf:NAME`` or ``hf:NAME:SPLIT``, or a folder written by ``save_to_disk``."""
    try:
        import datasets  # type: ignore[import-untyped]
    except ImportError:
        raise ValueError(f"{text} needs the datasets package: pip install datasets") from None
    name, _, split = text.removeprefix("hf:").partition(":")
    try:
        found: Any = (
            datasets.load_from_disk(name)
            if Path(name).is_dir()
            else datasets.load_dataset(name, split=split or "train")
        )
    except Exception as error:  # errors of the hub, of Arrow and of loading scripts have no common class
        raise ValueError(f"cannot load the data set {name!r}: {_first_line(error)}") from None
    if isinstance(found, dict):
        if (split or "train") not in found:
            raise ValueError(
                f"the data set {name!r} has no split {split or 'train'!r}; it has {shown_names(found)}: name one, as "
                f"in hf:{name}:SPLIT"
            )
        found = found[split or "train"]
    elif Path(name).is_dir() and split and str(found.split) != split:
        raise ValueError(f"the folder {name!r} holds one data set, not the split {split!r}; write hf:{name}")
    records: Iterable[Any] = found
    return records


def _counter(tokenizer: str | None) -> Count | None:
    if tokenizer is None:
        return None
    if Path(tokenizer).is_file():
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ValueError("--tokenizer needs the tokenizers package: pip install tokenizers") from None
        try:
            made = Tokenizer.from_file(tokenizer)
        except Exception as error:  # the package raises a plain Exception
            raise ValueError(f"{tokenizer} is no tokenizer.json: {error}") from None
        return lambda text: len(made.encode(text).ids)
    if tokenizer.endswith(".json") or tokenizer.startswith((".", "/", "~")):
        raise ValueError(f"--tokenizer {tokenizer}: there is no such file")
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ValueError(f"--tokenizer {tokenizer} needs the transformers package: pip install transformers") from None
    try:
        named = AutoTokenizer.from_pretrained(tokenizer)
    except Exception as error:  # errors of the hub, a missing backend or a tokenizer's code have no common class
        raise ValueError(f"cannot load the tokenizer {tokenizer!r}: {_first_line(error)}") from None
    return lambda text: len(named(text)["input_ids"])


def _first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its repr if it has none."""
    return str(error).splitlines()[0] if str(error) else repr(error)
