"""Reads from the source, without running it, which module of flexcp imports which, and checks the order of its rooms.

    python tests/house.py           # the numbers that CONTRIBUTING.md gives
    python tests/house.py OTHER/src # those of another checkout

A *room* is a folder or a module directly in ``src/flexcp``, or a folder further down that :data:`FLOORS` names. An
*arrow* goes from one room to another that it imports. A room's *floor* is its place in :data:`FLOORS`. Every import
counts, also inside a function, and also where only a type is needed, since that is a dependency too.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"

FLOORS = (
    "version",
    "io",
    "arrays",
    "masks",
    "shape",
    "clusters",
    "batch",
    "cost",
    "calibration",
    "known_errors",
    "models",
    "plan",
    "executor.kernels",
    "executor.exchange",
    "executor.run",
    "executor",
    "telemetry",
    "data",
    "schedule",
    "simulator",
    "planners",
    "planner",
    "frameworks",
    "compare",
    "measure",
    "report",
    "train",
    "fuzz",
    "cli",
    "__init__",
    "__main__",
)
"""All rooms, from the ground up: a room may import only those before it.

The executor comes before the planners, so it cannot import them.
"""

PLANNING = (*FLOORS[: FLOORS.index("plan") + 1], "schedule", "simulator", "planners", "planner", "compare")
"""Rooms that work without torch."""

TAKES_TORCH = {"masks.conversions"}
"""The one planning module that may load torch: it evaluates a ``mask_mod``, which is a function of tensors."""


@dataclass(frozen=True)
class Import:
    """``source`` imports ``target``: modules of flexcp without ``flexcp.``, or another package's name in full."""

    source: str
    target: str
    line: int
    for_types: bool
    """Whether the import is under ``if TYPE_CHECKING``, so that nothing is loaded."""

    def __str__(self) -> str:
        return f"{self.source}, line {self.line}, imports {self.target}"


def module_files(source: Path) -> dict[str, Path]:
    """Return the modules below ``source / "flexcp"`` by their names without ``flexcp.``.

    A package has its folder's name, flexcp itself is ``__init__``.
    """
    found = {}
    for path in sorted((source / "flexcp").rglob("*.py")):
        parts = path.relative_to(source / "flexcp").with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return found


def imports(source: Path) -> list[Import]:
    """Return all imports of all modules."""
    files = module_files(source)
    return [found for name, path in files.items() for found in _imports_of(name, ast.parse(path.read_text()), files)]


def _imports_of(name: str, tree: ast.Module, files: dict[str, Path]) -> Iterator[Import]:
    for node, for_types in _with_types(tree, False):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, (
                f"{name}, line {node.lineno}: imports name the whole path here, not {'.' * node.level}"
            )
            targets = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            yield Import(name, _module(target, files), node.lineno, for_types)


def _with_types(node: ast.AST, for_types: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Yield all statements, and whether each is under ``if TYPE_CHECKING``; no expression holds an import."""
    guarded = node.body if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING") else []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            continue
        inside = for_types or child in guarded
        yield child, inside
        yield from _with_types(child, inside)


def _module(target: str, files: dict[str, Path]) -> str:
    """Return the module that a name is imported from: ``plan.plan`` for ``flexcp.plan.plan.Plan``."""
    first, *parts = target.split(".")
    if first != "flexcp":
        return target
    while parts and ".".join(parts) not in files:
        parts.pop()
    return ".".join(parts) or "__init__"


def room_of(module: str) -> str:
    """Return the room of a module of flexcp."""
    within = [room for room in FLOORS if module == room or module.startswith(room + ".")]
    return max(within, key=len) if within else module.split(".")[0]


def arrows(found: list[Import], files: dict[str, Path]) -> dict[tuple[str, str], list[Import]]:
    """Return the pairs of rooms of which the first imports the second, with these imports."""
    pairs: dict[tuple[str, str], list[Import]] = {}
    for each in found:
        if each.target in files:
            pair = room_of(each.source), room_of(each.target)
            if pair[0] != pair[1]:
                pairs.setdefault(pair, []).append(each)
    return pairs


def reached(start: str, pairs: set[tuple[str, str]]) -> set[str]:
    """Return all rooms or modules that can be reached from ``start``."""
    targets: dict[str, set[str]] = {}
    for source, target in pairs:
        targets.setdefault(source, set()).add(target)
    met, waiting = set[str](), [start]
    while waiting:
        new = targets.get(waiting.pop(), set()) - met
        met |= new
        waiting += new
    return met


def ways_to_torch(found: list[Import]) -> list[str]:
    """Return the planning modules that load torch, directly or through others, with the import that loads it."""
    loading = [each for each in found if not each.for_types and each.source not in TAKES_TORCH]
    steps = {(each.source, target) for each in loading for target in _loaded(each.target)}
    direct = {each.source: each for each in loading if each.target.split(".")[0] == "torch"}
    ways = []
    for module in sorted({each.source for each in loading if room_of(each.source) in PLANNING}):
        for end in sorted(({module} | reached(module, steps)) & direct.keys()):
            ways.append(f"{module} reaches torch: {direct[end]}")
    return ways


def _loaded(target: str) -> Iterator[str]:
    """Return a module and the packages around it, which are loaded before it."""
    parts = target.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def circles(pairs: set[tuple[str, str]]) -> list[list[str]]:
    """Return groups of rooms that all import each other, directly or through others."""
    reach = {room: reached(room, pairs) for pair in pairs for room in pair}
    found = {tuple(sorted(b for b in reach[a] if a in reach[b])) for a in reach if a in reach[a]}
    return sorted(map(list, found))


def arrows_up(pairs: dict[tuple[str, str], list[Import]]) -> list[str]:
    """Return the imports of rooms on a higher floor than the importing room."""
    height = {room: floor for floor, room in enumerate(FLOORS)}
    up = [found for (low, high), found in pairs.items() if height[low] < height[high]]
    return [f"{each} ({room_of(each.source)} stands below {room_of(each.target)})" for found in up for each in found]


def counts(source: Path) -> dict[str, int]:
    """Return the numbers of a checkout, under the names that the table in CONTRIBUTING.md gives them."""
    files = module_files(source)
    folders = Counter(path.parent for path in files.values())
    pairs = arrows(imports(source), files)
    around = circles(set(pairs))
    return {
        "modules in the root": folders[source / "flexcp"],
        "modules in a folder, at most": max(folders.values()),
        "rooms": len({room_of(module) for module in files}),
        "arrows between rooms": len(pairs),
        "circles of rooms": len(around),
        "arrows inside circles": sum(any(set(pair) <= set(circle) for circle in around) for pair in pairs),
    }


def main() -> None:
    """Print the numbers of a checkout."""
    for name, count in counts(Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCE).items():
        print(f"{name:30}{count}")


if __name__ == "__main__":
    main()
