"""Document lengths for ``flexcp advise``: of texts, token ids and Hugging Face data sets, or as in ``--lengths``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from flexcp.data.lengths import JSONL, parse_lengths, refuse_other_counts, tokens_in
from flexcp.io.json_files import json_line
from flexcp.io.plain_values import shown, shown_names

LENGTH = "length"
FIELDS = ("input_ids", "tokens", "text", "content", LENGTH)
"""Fields of a JSON object or row in which a document is searched, in this order, if no field is named."""
EVERY = 10_000

Count = Callable[[str], int]


def document_lengths(
    text: str, tokenizer: str | None, field: str | None, tell: Callable[[str], None] = lambda _: None
) -> list[int]:
    """Return the number of tokens of each document that ``text`` names.

    ``text`` is ``hf:NAME``, ``hf:NAME:SPLIT`` or ``hf:FOLDER`` for a Hugging Face data set, the path of a ``.jsonl``
    file (with or without ``@``), or a form of :func:`~flexcp.data.lengths.parse_lengths`. Data sets and ``.jsonl``
    files may have objects or rows with several fields; ``field`` is the one that holds the document (by default the
    first of :data:`FIELDS`). ``tokenizer``, a tokenizer.json or the name of a Hugging Face tokenizer, counts the tokens
    of texts. ``tell`` is called with progress messages. Raise ValueError for anything that is no document.
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
    """Return the lengths of documents, given as pairs of a place and a document; raise ValueError if there are none.

    A place, such as ``a.jsonl, line 3``, names the document in errors, and ``where`` names all of them.
    """
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
        if isinstance(record, dict) and name == LENGTH:
            raise ValueError(f"{where}: length is the text {shown(value)}; write lengths as numbers, without quotes")
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
    """Return the rows of the data set that ``hf:NAME``, ``hf:NAME:SPLIT`` or ``hf:FOLDER`` names.

    The split is ``train`` by default. The folder was written by ``save_to_disk``. Raise ValueError if it cannot be
    loaded.
    """
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
