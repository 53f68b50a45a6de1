"""Readers: change files of every kind that a user can pass at random; each must be read, or refused in one line.

A good file of each kind is changed as disks and cables do (bits, ranges, truncation), as careless editing does (values
of other types, missing and doubled entries), and as an attacker does (endless nesting, numbers beyond 64 bits, names
with terminal control characters). A refusal must name the file, for most kinds. A file that is read is then used as far
as commands use it before they compute.
"""

from __future__ import annotations

import base64
import copy
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexcp.calibration import Calibration, read_calibration
from flexcp.clusters import cluster
from flexcp.compare.tree_advice import read_trees
from flexcp.cost import CostModel
from flexcp.data.document_lengths import document_lengths
from flexcp.data.lengths import jsonl_lengths, parse_lengths
from flexcp.data.loader import Loader
from flexcp.data.loader_settings import Planning
from flexcp.fuzz.cases import Case, Layer, read_case, save_case
from flexcp.masks import causal, parse_mask
from flexcp.models.config import read_config
from flexcp.plan.file import PlanFormatError, load_plan, save_plan
from flexcp.planner import Planner
from flexcp.telemetry.dump import read_dump, write_dump
from flexcp.train.documents import Documents
from flexcp.train.source import check_data

LONGEST_MESSAGE = 1000
EXTREMES = (0, -1, 1, 2**31, 2**53, 2**62, 2**63, -(2**63), 10**30, 10**4000, 1e308, 1e-320, -0.0, 0.5)
ODD: tuple[Any, ...] = (None, True, "", "\x1b[2J\n", "\ud800", "x" * 3000, [], {}, [[]], {"a": 1}, [None], "NaN", "1e9")
NAMES = ("", "\x1b[2J\n", "\ud800", "x" * 3000, "length")
"""Names of fields in the place of those that a file had."""
TEXTS = (
    "[" * 100_000,
    '{"a":' * 50_000,
    "NaN",
    "-Infinity",
    "1e400",
    "9" * 5000,
    "",
    "null",
    "\x00",
    "\ufeff{}",
    '"\\ud800"',
)


@dataclass(frozen=True)
class Reader:
    """A kind of file: its suffix, the content of a good example, and the function that reads it.

    With ``named`` the errors of that function must name the file.
    """

    kind: str
    suffix: str
    good: bytes
    read: Callable[[Path], object]
    named: bool = True


def _mask_slices(path: Path) -> object:
    masks = parse_mask(f"@{path}")
    return [mask.slices(mask.length or 1) for mask in (masks if isinstance(masks, list) else [masks])]


def readers(folder: Path) -> list[Reader]:
    """Return all kinds of files that are checked.

    Some good examples are first written to ``folder`` by the code that writes them for users.
    """
    plan = Planner(4, 2, 8, cluster=cluster("cpu", 1, 2), strategy="blocks")([30, 5, 1])
    config = {
        "model_type": "qwen3",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "vocab_size": 100,
        "torch_dtype": "bfloat16",
        "head_dim": 16,
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": 1,
        "architectures": ["Qwen3ForCausalLM"],
        "layer_types": ["full_attention", "sliding_attention"],
    }
    mask = {"documents": [{"length": 9, "slices": [[0, 9, 0, 9, None, 0]]}, {"length": 3, "slices": []}]}
    tree = {"parents": [-1, 0, 0], "lengths": [4, 2, 3], "ends": [1, 2]}
    case = Case([3], [Layer("one", 1, ["causal"])], {"name": "cpu"}, {"heads": 1}, {"strategy": "dp"})
    save_case(folder / "case.json", case, "tokens", "why")
    step = {
        "number": 3,
        "hash": plan.hash,
        "plan": base64.b64encode(save_plan(plan)).decode(),
        "passes": [],
        "error": "",
    }
    dump = {**json.loads(write_dump(folder, "asked", "by hand", [], 0).read_bytes()), "steps": [step]}
    calibration = Calibration(CostModel(), "here", {"gflops": 100, "intra_mbps": 10}, {}, None)
    return [
        Reader("plan", ".plan", save_plan(plan), lambda path: load_plan(path.read_bytes()), named=False),
        Reader("mask", ".json", _json(mask), _mask_slices),
        Reader("lengths", ".txt", b"4096\n4k\n17\n1\n", lambda path: parse_lengths(f"@{path}")),
        Reader("lengths as JSON", ".jsonl", b'{"length": 4}\n[1, 2]\n7\n', jsonl_lengths),
        Reader(
            "documents",
            ".jsonl",
            b'{"input_ids": [4, 5], "source": "web"}\n{"tokens": [1]}\n{"length": 9}\n',
            lambda path: document_lengths(str(path), None, None),
        ),
        Reader("training text", ".txt", b"A first paragraph.\n\nA second one.\n", _training_text),
        Reader(
            "cost model", ".json", _json(calibration.to_json()), lambda path: read_calibration(path).on(cluster("h100"))
        ),
        Reader("dump", ".json", _json(dump), read_dump),
        Reader("trees", ".jsonl", _json(tree) + b"\n" + _json(tree) + b"\n", lambda path: _masks(read_trees(path))),
        Reader("model config", ".json", _json(config), lambda path: read_config(path).masks(causal())),
        Reader("fuzz case", ".json", (folder / "case.json").read_bytes(), read_case),
        Reader("loader state", ".json", _json(_loader().state_dict()), _load_state, named=False),
    ]


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _training_text(path: Path) -> object:
    check_data(str(path))
    return Documents(str(path), 8, 256).paragraphs


def _masks(trees: Any) -> object:
    return None if trees is None else [tree.slices(tree.length) for tree in trees]


def _loader() -> Loader:
    planner = Planner(4, 2, 8, cluster=cluster("cpu", 1, 1), strategy="dp")
    return Loader([[1, 2, 3], [4, 5]], planner, budget=8, group="alone", shuffle=True, planning=Planning(workers=0))


def _load_state(path: Path) -> object:
    """Load a loader's state; invalid JSON counts as read, because the user's trainer parses it."""
    try:
        state = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return None
    with _loader() as loader:
        loader.load_state_dict(state)
        return loader.state_dict()


def changed(reader: Reader, rng: random.Random) -> bytes:
    """Return the content of a randomly changed file of this kind."""
    way = rng.randrange(6)
    if way == 0:
        return rng.choice(TEXTS).encode("utf-8", errors="surrogatepass")
    if way < 3 or reader.kind in ("plan", "lengths", "training text"):
        return _changed_bytes(reader.good, rng)
    lines = [json.loads(line) for line in (reader.good.splitlines() if reader.suffix == ".jsonl" else [reader.good])]
    for _ in range(rng.choice((1, 1, 2, 4))):
        change_value(lines, rng)
    return b"\n".join(json.dumps(line).encode() for line in (lines if isinstance(lines, list) else [lines]))


def _changed_bytes(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at, size = rng.randrange(len(out) + 1), rng.choice((1, 2, 8, 64))
        what = rng.randrange(5)
        if what == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif what == 1:
            out = out[:at]
        elif what == 2:
            out[at : at + size] = rng.randbytes(size)
        elif what == 3:
            out[at : at + size] = b""
        else:
            out[at:at] = rng.choice((b"9" * 400, b"-", b".5", b"\x00", b"1e999", bytes(out[at : at + size])))
    return bytes(out)


def change_value(here: Any, rng: random.Random) -> None:
    """Change a random value inside nested JSON, in place; the outermost value stays."""
    while True:
        keys = list(here) if isinstance(here, dict) else list(range(len(here)))
        if not keys:
            return
        key = rng.choice(keys)
        if isinstance(here[key], dict | list) and here[key] and rng.random() < 0.8:
            here = here[key]
            continue
        what = rng.randrange(6)
        if what == 0:
            here.pop(key)
        elif what == 5 and isinstance(here, dict):
            here[rng.choice(NAMES)] = here.pop(key)
        elif what == 1 and isinstance(here, list):
            here.insert(key, copy.deepcopy(here[key]))
        elif what == 2:
            here[key] = rng.choice(EXTREMES)
        elif what == 3:
            here[key] = [here[key]] * rng.choice((1, 3, 300))
        else:
            here[key] = rng.choice(ODD)
        return


@dataclass(frozen=True)
class BadRead:
    """A file that was neither read nor refused correctly, and what went wrong."""

    kind: str
    content: bytes
    message: str


def fuzz_readers(count: int, seed: int, folder: Path) -> Iterator[tuple[str, bool, BadRead | None]]:
    """Yield (kind, whether it was read, what went wrong or None) for each of ``count`` changed files.

    The files are written to ``folder``.
    """
    kinds, rng = readers(folder), random.Random(seed)
    for number in range(count):
        reader = kinds[number % len(kinds)]
        data = changed(reader, rng)
        path = folder / f"changed{reader.suffix}"
        path.write_bytes(data)
        yield (reader.kind, *_outcome(reader, path, data))


def _outcome(reader: Reader, path: Path, data: bytes) -> tuple[bool, BadRead | None]:
    try:
        reader.read(path)
    except (ValueError, NotImplementedError) as refusal:
        words = str(refusal)
        problem = ""
        if isinstance(refusal, UnicodeError) and not isinstance(refusal, PlanFormatError):
            problem = f"{type(refusal).__name__}: {words[:200]}"
        elif not 0 < len(words) <= LONGEST_MESSAGE:
            problem = f"a message of {len(words)} characters: {words[:200]}"
        elif reader.named and path.name not in words:
            problem = f"a message that does not name the file: {words[:200]}"
        return False, BadRead(reader.kind, data, problem) if problem else None
    except Exception as error:
        return False, BadRead(reader.kind, data, f"{type(error).__name__}: {str(error)[:200]}")
    return True, None
