"""Cases: all values that decide one run of the fuzzer, and their file.

The file is JSON with the case and what was found with it; ``flexcp verify @file`` runs it again. Reading a file of any
origin gives a case of the right structure, or one line that names the file. Whether the numbers in it make sense is
left to the planner, as with any user's numbers.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flexcp.clusters import Cluster, cluster
from flexcp.fuzz.mask_words import Words, rule_of
from flexcp.io.atomic_files import write_whole
from flexcp.io.json_files import read_json
from flexcp.io.plain_values import integer, items, mapping, shown, text
from flexcp.masks import Mask
from flexcp.planner import Planner
from flexcp.version import __version__

FORMAT = "flexcp-fuzz-1"
MOST_TOKENS_ON_RANKS = 4096
"""The most tokens of a batch that is executed token by token and on real ranks.

Longer batches are only planned, checked by ranges and simulated.
"""


@dataclass(frozen=True)
class Layer:
    """One of the model's masks, as plain values: the same for all documents, or with ``each`` one for every document.

    ``layers`` is the number of the model's layers that use it, and ``words`` the mask words, or with ``each`` a list of
    them.
    """

    name: str
    layers: int
    words: list[Any]
    each: bool = False

    def of_document(self, document: int) -> Words:
        """Return the mask words of one document."""
        words: Words = self.words[document] if self.each else self.words
        return words

    def rule(self) -> Mask | list[Mask]:
        """Return the mask, or the list of masks, that a planner takes."""
        return [rule_of(words) for words in self.words] if self.each else rule_of(self.words)


@dataclass(frozen=True)
class Run:
    """Options of the attention calls on real ranks.

    ``values`` says what the inputs are: ``"normal"``, ``"large"`` or ``"equal"`` numbers. ``lse_gradient`` gives the
    LSE a gradient too. ``rounds_per_call`` and ``chunk_bytes`` are arguments of ``bind``.
    """

    seed: int = 0
    softcap: float | None = None
    sinks: bool = False
    lse_gradient: bool = False
    kernel: str = "cpu"
    values: str = "normal"
    rounds_per_call: int | None = None
    chunk_bytes: int | None = None


@dataclass(frozen=True)
class Case:
    """A batch, a machine, an attention layer, the planner's options, and how ranks run the plan.

    ``machine`` are the arguments of :func:`flexcp.cluster`, ``attention`` and ``planner`` those of
    :class:`flexcp.Planner`, and ``call`` those of the planner's call. With ``micro_batches`` the batch may be planned
    in several parts.
    """

    lengths: list[int]
    layers: list[Layer]
    machine: dict[str, Any]
    attention: dict[str, Any]
    planner: dict[str, Any]
    call: dict[str, Any] = field(default_factory=dict)
    micro_batches: bool = False
    run: Run = Run()

    @property
    def cluster(self) -> Cluster:
        return cluster(**self.machine)

    @property
    def strategy(self) -> str:
        return str(self.planner["strategy"])

    @property
    def small(self) -> bool:
        """Whether the case has few enough tokens to be executed token by token."""
        return sum(self.lengths) <= MOST_TOKENS_ON_RANKS

    def made_planner(self) -> Planner:
        """Return the planner; its errors are not caught."""
        return Planner(**self.attention, **self.planner, cluster=self.cluster)

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of the planner's call, without the lengths."""
        if len(self.layers) == 1:
            return {"mask": self.layers[0].rule(), **self.call}
        return {"masks": {layer.name: (layer.rule(), layer.layers) for layer in self.layers}, **self.call}


def save_case(path: Path, case: Case, check: str, message: str) -> None:
    """Write a failing case with the name and the message of the check that it failed."""
    found = {"format": FORMAT, "flexcp": __version__, "check": check, "message": message[:2000], "case": asdict(case)}
    write_whole(path, json.dumps(found, indent=1) + "\n")


def is_case_file(path: Path) -> bool:
    """Return whether a file declares itself a case of the fuzzer."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return FORMAT.encode() in file.read(200)


def read_case(path: Path) -> Case:
    """Read the case of a file; raise a ValueError that names the file if it is none."""
    content = read_json(path, "case of flexcp fuzz", "write one with `flexcp fuzz`")
    try:
        whole = mapping(content, "the file")
        if whole.get("format") != FORMAT:
            raise ValueError(f"format must be {FORMAT!r}")
        return _case(mapping(whole.get("case"), "case"))
    except (ValueError, TypeError, KeyError) as error:
        words = error.args[0] if isinstance(error, ValueError) else shown(error, 200)
        raise ValueError(f"{path} is no case of flexcp fuzz: {words}") from None


def _case(facts: dict[str, Any]) -> Case:
    lengths = [integer(n, "a length") for n in items(facts.get("lengths"), "lengths")]
    layers = [_layer(mapping(layer, "a layer"), len(lengths)) for layer in items(facts.get("layers"), "layers")]
    if not layers or not lengths:
        raise ValueError("a case has at least one document and one mask")
    names = ("machine", "attention", "planner", "call")
    parts = {name: mapping(facts.get(name), name) for name in names}
    text(parts["planner"].get("strategy"), "strategy")
    return Case(
        lengths,
        layers,
        **parts,
        micro_batches=facts.get("micro_batches") is True,
        run=Run(**mapping(facts.get("run"), "run")),
    )


def _layer(facts: dict[str, Any], documents: int) -> Layer:
    words, each = items(facts.get("words"), "a mask"), facts.get("each") is True
    if each and len(words) != documents:
        raise ValueError(f"{len(words)} masks for {documents} documents")
    for one in words if each else [words]:
        text(items(one, "a mask")[0] if one else None, "the kind of a mask")
    return Layer(text(facts.get("name"), "name"), integer(facts.get("layers"), "layers"), words, each)
