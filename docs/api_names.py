"""The public names with their arguments and what each is for, as a list in docs/api.md that a git host shows too.

    python docs/api_names.py --write

The list lies between two comments and is made from the code: names from ``flexcp.__all__`` and ``flexcp.data.__all__``, the parts of
classes and the adapters' functions from the tables below, arguments and first sentences from the objects. A test compares it.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flexcp
import flexcp.data

PAGE = Path(__file__).parent / "api.md"
BEGIN, END = "<!-- names: made by docs/api_names.py --write -->\n", "<!-- end of names -->\n"
PARTS = {
    "Planner": ("__call__", "micro_batches"),
    "Plan": ("hash", "check", "bytes", "inter_node_bytes", "work", "memory"),
    "Step": (
        "local_tokens", "indices", "positions", "shard", "gather", "labels", "loss", "roll", "relayout", "restore", "prepare",
        "cp_rank", "cp_size", "calls", "sent_bytes", "kernels",
    ),
    "Loader": ("state_dict", "load_state_dict", "close"),
}  # fmt: skip
"""What users take from a class; the rest is there for other parts of flexcp."""
MADE = {"Plan", "Step", "LocalBatch", "Stats"}
"""Classes that users are given and do not make."""
ADAPTERS = {
    "frameworks": ("used",),
    "frameworks.huggingface": ("turn_on", "register", "planner", "masks", "inputs"),
    "frameworks.huggingface_trainer": ("FlexcpTrainer", "prepared"),
    "frameworks.fsdp": ("sum_gradients",),
    "frameworks.multimodal": ("turn_on", "qwen2_vl", "image_rows", "VisionDocument"),
    "frameworks.pipeline": ("PlannedMicroBatches", "PlannedStage"),
}
"""Adapters that need nothing but torch and Transformers; torchtitan's and Megatron's are in their own pages."""


def names() -> str:
    """The list."""
    found = ["\n### `flexcp`\n\n"]
    found += [line for name in flexcp.__all__ for line in _entry(name, getattr(flexcp, name))]
    found.append("\n### `flexcp.data`\n\n")
    found += [line for name in flexcp.data.__all__ for line in _entry(name, getattr(flexcp.data, name))]
    for home, members in ADAPTERS.items():
        found.append(f"\n### `flexcp.{home}`\n\n")
        module = importlib.import_module(f"flexcp.{home}")
        found += [line for name in members for line in _entry(name, getattr(module, name))]
    return "".join(found) + "\n"


def _entry(name: str, thing: Any) -> Iterator[str]:
    arguments = "" if name in MADE else _arguments(thing)
    yield f"- `{name}{arguments}`: {_sentence(inspect.getdoc(thing))}\n"
    for part in PARTS.get(name, ()):
        member = inspect.getattr_static(thing, part, None)
        shown = name.lower() if part == "__call__" else f".{part}"
        yield f"    - `{shown}{_arguments(member)}`: {_sentence(_part_doc(thing, part))}\n"


def _arguments(thing: Any) -> str:
    """Names and defaults; an exception is raised by flexcp and an attribute takes none."""
    if not callable(thing) or (isinstance(thing, type) and issubclass(thing, BaseException)):
        return ""
    found = inspect.signature(thing)
    parameters = [
        p.replace(annotation=p.empty, default=_default(p)) for p in found.parameters.values() if p.name != "self"
    ]
    return str(found.replace(parameters=parameters, return_annotation=found.empty)).replace("Ellipsis", "...")


def _default(parameter: inspect.Parameter) -> Any:
    value = parameter.default
    plain = value is parameter.empty or isinstance(value, (int, float, str, bool, type(None), tuple))
    return value if plain else ...


def _part_doc(owner: type, part: str) -> str | None:
    """A method's or property's docstring, or the one below an attribute in ``__init__`` or the class."""
    member = inspect.getattr_static(owner, part, None)
    if member is not None:
        return inspect.getdoc(member)
    below = re.search(
        rf'^ +(?:self\.)?{part}\b[^\n]*\n +"""(.*?)"""', inspect.getsource(owner), re.MULTILINE | re.DOTALL
    )
    return below[1] if below else None


def _sentence(doc: str | None) -> str:
    """The first sentence, in Markdown."""
    if not doc:
        raise ValueError("a public name has no docstring")
    first = re.split(r"(?<=\.)\s(?=[^a-z])", " ".join(doc.split("\n\n")[0].split()))[0]
    return re.sub(r":[a-z]+:`~?(?:flexcp\.)?([^`]+)`", r"`\1`", first).replace("``", "`")


def page() -> str:
    """docs/api.md with the list as it should be."""
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    return before + BEGIN + names() + END + rest.split(END)[1]


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python docs/api_names.py --write")
    PAGE.write_text(page())
