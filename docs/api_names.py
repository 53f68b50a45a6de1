"""The reference of docs/api.md: signature and docstring of every public name in plain Markdown,
which a git host shows too. What is around it on the page is written by hand.

    python docs/api_names.py --write

Names come from ``flexcp.__all__`` in the order of ``GROUPS``, those of other modules from ``OTHERS``, everything else
from the objects. A test compares the page with the code.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import flexcp
import flexcp.data

PAGE = Path(__file__).parent / "api.md"
WIDTH = 120
GROUPS = {
    "Planning": (
        "Planner",
        "Plan",
        "cluster",
        "Cluster",
        "Shape",
        "Model",
        "Preset",
        "Training",
        "choose_static",
    ),
    "Masks": ("Mask", "full", "causal", "window", "tree", "tree_of", "from_slices"),
    "Running": ("bind", "Step", "attention", "slice_attention", "packed_slices", "latent_attention"),
    "Plans in files": ("save_plan", "load_plan"),
    "Telemetry": ("Telemetry",),
}
MASKS = (
    "lambda_",
    "shared_question",
    "causal_blockwise",
    "chunked",
    "prefix",
    "modality",
    "tree_order",
    "TokenTree",
    "from_key_ranges",
    "from_cu_seqlens",
    "from_mask_mod",
)
"""What users take from ``flexcp.masks`` besides the masks that ``flexcp`` has itself."""
PARTS = {
    "Planner": ("__call__", "micro_batches"),
    "Plan": ("hash", "check", "bytes", "inter_node_bytes", "work", "memory", "rounds", "peers"),
    "Step": (
        "local_tokens",
        "indices",
        "positions",
        "shard",
        "gather",
        "labels",
        "edges",
        "log_probs",
        "gather_sequences",
        "loss",
        "share",
        "roll",
        "relayout",
        "restore",
        "prepare",
        "cp_rank",
        "cp_size",
        "calls",
        "sent_bytes",
        "kernels",
    ),
    "Edges": ("pairs", "weights"),
    "TokenTree": ("paths", "saved"),
    "Loader": ("state_dict", "load_state_dict", "close"),
    "LatentForms": ("planner", "fastest", "step_ns"),
    "Telemetry": ("planning", "log", "trace", "dump", "close"),
    "CostModel": ("to_json", "from_json"),
    "Topology": ("arguments",),
    "RolloutPart": ("inputs", "of", "returned", "log_probs"),
    "StaticChoice": ("words",),
}
"""What users take from a class; the rest is there for other parts of flexcp."""
MADE = {"Plan", "Step", "Edges", "TokenTree", "LocalBatch", "Stats", "Topology", "StaticChoice", "RolloutPart"}
"""Classes that users are given and do not make."""
OTHERS = {
    "masks": MASKS,
    "data": tuple(flexcp.data.__all__),
    "cost": ("CostModel",),
    "models.topology": ("topology", "Topology"),
    "compare.static_choice": ("StaticChoice",),
    "compare.latent_forms": ("LatentForms",),
    "executor.losses.edges": ("Edges",),
    "executor.kernels.choose": ("choose_kernel",),
    "executor.fastest_kernel": ("fastest_kernel",),
    "executor.exchange.transports": ("ExchangeError",),
    "plan.file": ("PlanFormatError",),
    "telemetry.sample": ("MismatchError",),
    "frameworks": ("used",),
    "frameworks.huggingface": ("turn_on", "register", "planner", "masks", "inputs"),
    "frameworks.huggingface_trainer": ("FlexcpTrainer", "prepared"),
    "frameworks.shared_forward": ("share_forward",),
    "frameworks.rollouts": ("shared_rollouts", "RolloutPart"),
    "frameworks.fsdp": ("sum_gradients",),
    "frameworks.multimodal": ("turn_on", "encoder_masks", "qwen_vl", "image_rows", "VisionDocument"),
    "frameworks.pipeline": ("PlannedMicroBatches", "PlannedStage"),
    "report.page": ("write_report",),
    "report.plan_tables": ("plan_section",),
    "report.strategies_table": ("strategies_section",),
    "report.sections": ("words_section", "code_section", "table_section", "lines_section"),
}
"""Modules that need nothing but torch and Transformers; docs/frameworks.md describes torchtitan and Megatron."""
BEGIN, END = "<!-- written by docs/api_names.py: -->", "<!-- end of what is written -->"


def page() -> str:
    """docs/api.md as it should be: the reference between its two comments, other words as they are."""
    head, _, rest = PAGE.read_text().partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not end:
        raise ValueError(f"{PAGE} needs the lines {BEGIN} and {END}, between which the reference is written")
    return f"{head}{BEGIN}\n\n{reference()}\n{END}{tail}"


def reference() -> str:
    """Signature and docstring of every public name."""
    left = [name for name in flexcp.__all__ if not any(name in names for names in GROUPS.values())]
    if left:
        raise ValueError(f"public names without a group in docs/api_names.py: {', '.join(left)}")
    lines: list[str] = []
    for title, names in GROUPS.items():
        lines += [f"## {title}\n", *(line for name in names for line in _entry("flexcp", name, getattr(flexcp, name)))]
    for home, members in OTHERS.items():
        lines.append(f"## `flexcp.{home}`\n")
        module = importlib.import_module(f"flexcp.{home}")
        for name in members:
            lines += _entry(f"flexcp.{home}", name, getattr(module, name))
    return "\n".join(lines)


def _entry(home: str, name: str, thing: Any) -> Iterator[str]:
    """A heading, the signature, the docstring, and the parts that users take."""
    yield f"### `{name}`\n"
    if _takes_arguments(thing) and name not in MADE:
        yield _code(f"{home}.{name}", thing)
    yield _markdown(inspect.getdoc(thing), name)
    described = {**_attribute_docs(thing)} if dataclasses.is_dataclass(thing) and name in MADE - set(PARTS) else {}
    for part, doc in described.items():
        yield f"- `{part}`: {_markdown(doc, part).strip()}"
    if described:
        yield ""
    for part in PARTS.get(name, ()):
        yield from _part(name, thing, part)


def _part(owner: str, thing: type, part: str) -> Iterator[str]:
    member = inspect.getattr_static(thing, part, None)
    called = owner.lower() if part == "__call__" else f"{owner.lower()}.{part}"
    yield f"#### `{called}`\n"
    if _takes_arguments(member):
        yield _code(called, getattr(thing, part))
    yield _markdown(inspect.getdoc(member) if member is not None else _attribute_docs(thing).get(part), part)


def _takes_arguments(thing: Any) -> bool:
    """Exceptions are raised by flexcp, and attributes take none."""
    called = callable(thing) or isinstance(thing, (classmethod, staticmethod))
    return called and not (isinstance(thing, type) and issubclass(thing, BaseException))


def _code(name: str, thing: Any) -> str:
    """The signature as a block of code, an argument a line where it is long."""
    found = inspect.signature(thing)
    arguments = [_argument(p) for p in found.parameters.values() if p.name != "self"]
    stars = [i for i, p in enumerate(found.parameters.values()) if p.kind is p.KEYWORD_ONLY]
    if stars and not any(p.kind is p.VAR_POSITIONAL for p in found.parameters.values()):
        arguments.insert(stars[0] - ("self" in found.parameters), "*")
    returns = "" if found.return_annotation in (found.empty, None, "None") else f" -> {found.return_annotation}"
    line = f"{name}({', '.join(arguments)}){returns}"
    if len(line) > WIDTH:
        line = f"{name}(\n" + "".join(f"    {argument},\n" for argument in arguments) + f"){returns}"
    return f"```text\n{line}\n```\n"


def _argument(parameter: inspect.Parameter) -> str:
    star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    kind = "" if parameter.annotation is parameter.empty else f": {parameter.annotation}"
    value = parameter.default
    if value is parameter.empty:
        return f"{star}{parameter.name}{kind}"
    plain = isinstance(value, (int, float, str, bool, type(None), tuple))
    return f"{parameter.name}{kind} = {value!r}" if plain else f"{parameter.name}{kind} = ..."


def _attribute_docs(owner: type) -> dict[str, str]:
    """The strings below attributes in a class or its ``__init__``."""
    found = {}
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(owner)))):
        statements = node.body if isinstance(node, (ast.ClassDef, ast.FunctionDef)) else []
        for one, below in pairwise(statements):
            name, doc = _assigned(one), _string(below)
            if name is not None and doc is not None:
                found[name] = inspect.cleandoc(doc)
    return found


def _assigned(statement: ast.stmt) -> str | None:
    """The name that an assignment gives a value: ``x`` of ``x: int = 1`` and of ``self.x = 1``."""
    if isinstance(statement, ast.AnnAssign):
        target: ast.expr = statement.target
    elif isinstance(statement, ast.Assign):
        target = statement.targets[0]
    else:
        return None
    return target.attr if isinstance(target, ast.Attribute) else ast.unparse(target)


def _string(statement: ast.stmt) -> str | None:
    """The text of a statement that is nothing but a string."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def _markdown(doc: str | None, name: str) -> str:
    """A docstring in Markdown: roles and double backquotes become code, sessions become blocks."""
    if not doc:
        raise ValueError(f"the public name {name} has no docstring")
    text = re.sub(r":[a-z]+:`~?(?:[^`]*\.)?([^`.]+)`", r"`\1`", doc).replace("``", "`")
    return re.sub(r"^(>>> .*(?:\n(?!\s*$).+)*)", r"```pycon\n\1\n```", text, flags=re.MULTILINE) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python docs/api_names.py --write")
    PAGE.write_text(page())
