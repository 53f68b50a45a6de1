"""Checks of the model and data that ``flexcp train`` is given, made before torch is loaded or a rank is started.

A wrong name ends the command at once, and a file of document lengths is not taken for a text of digits.
"""

from __future__ import annotations

from pathlib import Path

from flexcp.data.lengths import DISTRIBUTIONS, draw_lengths, parse_count, parse_lengths
from flexcp.models.config import config_values
from flexcp.models.find import PRESETS, find_model
from flexcp.shape import Shape

LOOKED_AT = 1 << 16
"""The number of bytes at the beginning of a file that are examined for numbers and for zero bytes."""
DTYPES = ("float64", "float32", "bfloat16")
LAYOUTS = ("free", "contiguous", "zigzag")
HIGHEST_RATE = 1e6
"""The highest learning rate; the optimizer's products with one that is much higher do not fit its weights."""
JSON_LINES = (".jsonl", ".ndjson")


def check_model(name: str) -> None:
    """Raise ValueError for a model that ``flexcp train`` cannot train.

    ``gpt`` is our own small model. Other names must be paths of Hugging Face configurations with a ``model_type``; the
    known presets are refused, because they are too large for every rank to hold.
    """
    if name == "gpt":
        return
    _refuse_pipe("--model", name)
    if name in PRESETS:
        billions = PRESETS[name].parameters / 1e9
        raise ValueError(
            f"the preset {name} is too large to train here: every rank holds the whole model of {billions:.1f} billion "
            "parameters, its gradients and AdamW's moments; give the config.json of a small model, or --heads, "
            "--head-dim and --layers for a small GPT"
        )
    if not Path(name).exists():
        find_model(name)  # raises an error with the nearest known name
    if "model_type" not in config_values(Path(name)):
        raise ValueError(f"{name} has no model_type, by which Transformers finds the model's code")


def check_numbers(tokens: int, steps: int, dtype: str, layout: str, learning_rate: float) -> None:
    """Raise ValueError for invalid settings of a run."""
    if tokens < 1:
        raise ValueError(f"a step needs at least 1 token; got {tokens}")
    if steps < 1:
        raise ValueError(f"training needs at least 1 step; got {steps}")
    if dtype not in DTYPES:
        raise ValueError(f"train in float64, float32 or bfloat16; got {dtype!r}")
    if layout not in LAYOUTS:
        raise ValueError(f"a layout is free, contiguous or zigzag; got {layout!r}")
    if not 0 < learning_rate <= HIGHEST_RATE:
        raise ValueError(f"a learning rate is a number above 0 and at most {HIGHEST_RATE:g}; got {learning_rate}")


def gpt_sizes(
    heads: int = 4, kv_heads: int | None = None, head_dim: int = 32, hidden: int | None = None, layers: int = 2
) -> tuple[tuple[str, int], ...]:
    """Return the sizes of a small GPT by their names in its configuration; raise ValueError for impossible sizes."""
    shape = Shape(heads, heads if kv_heads is None else kv_heads, head_dim, head_dim)
    if layers < 1:
        raise ValueError(f"--layers is at least 1; got {layers}")
    if head_dim % 2:
        raise ValueError(f"--head-dim must be even, because rotary positions turn pairs of numbers; got {head_dim}")
    if hidden is not None and hidden != heads * head_dim:
        raise ValueError(
            f"the small GPT is heads x head-dim wide: {heads} x {head_dim} = {heads * head_dim}; got --hidden {hidden}"
        )
    return (("heads", heads), ("kv_heads", shape.kv_heads), ("head_dim", head_dim), ("layers", layers))


def check_data(source: str) -> None:
    """Raise ValueError for data that is neither a text file, nor ``@file`` with lengths, nor a known distribution.

    Text files that are empty, are JSON lines, or hold nothing but numbers are refused too.
    """
    _refuse_pipe("--data", source)
    if source.startswith("@"):
        parse_lengths(source)
        return
    path = Path(source)
    if not path.is_file():
        if path.is_dir() or "/" in source or path.suffix:
            raise ValueError(f"there is no text file {source!r} to train on")
        if source not in DISTRIBUTIONS:
            _refuse_lengths(source)
        draw_lengths(source, 1)
        return
    if not path.read_bytes().strip():
        raise ValueError(f"{source} holds no text to train on")
    if path.suffix.lower() in JSON_LINES:
        raise ValueError(
            f"{source} holds JSON lines, and train reads plain text; "
            "write the texts into a file, a blank line between two"
        )
    with path.open("rb") as file:
        if b"\0" in file.read(LOOKED_AT):
            raise ValueError(f"{source} is not a text file: it holds zero bytes; train reads plain text in UTF-8")
    if _holds_numbers(path):
        raise ValueError(
            f"{source} holds numbers: read as a text, its digits would be learnt; write --data @{source} to train on "
            "documents of these lengths"
        )


def _refuse_pipe(option: str, given: str) -> None:
    """Raise ValueError if an option names a pipe, which only one process can read, and only once."""
    if Path(given.removeprefix("@")).is_fifo():
        raise ValueError(
            f"{option} {given} is a pipe, and every rank of train reads it in a process of its own: write it to a file "
            "and give that"
        )


def _refuse_lengths(source: str) -> None:
    """Raise ValueError if ``source`` is a text form of lengths, such as ``700,20``, which ``--lengths`` takes."""
    name, _, tail = source.partition(":")
    if tail and name in DISTRIBUTIONS:
        raise ValueError(
            f"--data {source}: train takes the name of a distribution alone, --data {name}, and the tokens of a step "
            "from --tokens"
        )
    try:
        parse_lengths(source)
    except ValueError:
        return
    raise ValueError(
        f"--data {source} holds lengths themselves, and train takes @file (a file of document lengths, one a line), a "
        f"text file, or a length distribution: {', '.join(DISTRIBUTIONS)}"
    )


def _holds_numbers(path: Path) -> bool:
    """Return whether the beginning of a file consists of numbers only, below the name of a column or not."""
    with path.open("rb") as file:
        words = file.read(LOOKED_AT).split()
    numbers = words[1:] if len(words) > 2 and words[0].isalpha() else words
    try:
        return bool([parse_count(word.decode()) for word in numbers])
    except ValueError:  # includes UnicodeDecodeError
        return False
