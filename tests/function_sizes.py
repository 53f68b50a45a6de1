"""Measures how long the functions of flexcp are and how deeply their statements are nested, from the source alone.

    python tests/function_sizes.py           # the longest and the deepest
    python tests/function_sizes.py OTHER/src # those of another checkout

Lines are counted from ``def`` to the end, docstring included. A *level* is a block of statements: a function's body is
the first, the body of a loop, an ``if``, a ``with``, a ``try`` or a ``match`` in it the second, and so on. What follows
``elif`` or ``else`` is on the level of what follows the ``if``.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from house import SOURCE, module_files

MOST_LINES, MOST_LEVELS = 80, 5
SHOWN = 12
GPU_DECORATORS = ("triton.jit", "gluon.jit", "cute.jit", "cute.kernel")

IN_ONE_PIECE = {
    "executor.kernels.cute.backward.Backward.__call__",
    "executor.kernels.cute.backward.Backward.compute",
    "executor.kernels.cute.backward.Backward.kernel",
    "executor.kernels.cute.backward_moves.BackwardMoves.load",
    "executor.kernels.cute.backward_moves.BackwardMoves.store",
    "executor.kernels.cute.forward.Forward.compute",
    "executor.kernels.cute.forward_moves.ForwardMoves.fetch_results",
    "executor.kernels.hopper.forward._compute",
    "executor.kernels.hopper.keys._compute",
    "executor.kernels.hopper.queries._compute",
    "executor.kernels.triton.forward._tile",
    "executor.kernels.triton.forward.forward_kernel",
    "executor.kernels.triton.keys._keys_tile",
    "executor.kernels.triton.keys.keys_kernel",
    "executor.kernels.triton.queries._queries_tile",
    "executor.kernels.triton.queries.queries_kernel",
}
"""GPU functions that may exceed the limits; their docstrings say why, after "In one piece"."""


@dataclass(frozen=True)
class Size:
    """How large a function is; ``name`` is its module (without ``flexcp.``), its classes and its own name."""

    name: str
    lines: int
    levels: int
    on_gpu: bool
    docstring: str

    @property
    def too_large(self) -> bool:
        """Whether the function exceeds a limit."""
        return self.lines > MOST_LINES or self.levels > MOST_LEVELS

    def __str__(self) -> str:
        return f"{self.lines:4} lines  {self.levels} levels  {self.name}"


def sizes(source: Path) -> list[Size]:
    """Return the size of every function below ``source / "flexcp"``."""
    return [size for name, path in module_files(source).items() for size in sizes_in(name, ast.parse(path.read_text()))]


def sizes_in(name: str, tree: ast.AST) -> Iterator[Size]:
    """Yield the size of every function in a module, class or function called ``name``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            gpu = any(ast.unparse(each).startswith(GPU_DECORATORS) for each in node.decorator_list)
            levels = max(map(_levels, node.body))
            yield Size(f"{name}.{node.name}", lines, levels, gpu, ast.get_docstring(node) or "")
            yield from sizes_in(f"{name}.{node.name}", node)
        elif isinstance(node, ast.ClassDef):
            yield from sizes_in(f"{name}.{node.name}", node)
        else:
            yield from sizes_in(name, node)


def _levels(statement: ast.AST) -> int:
    """Return the levels of one statement, itself the first; functions and classes inside it are not counted."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return 1
    if isinstance(statement, ast.If) and len(statement.orelse) == 1 and isinstance(statement.orelse[0], ast.If):
        return max(1 + max(map(_levels, statement.body)), _levels(statement.orelse[0]))
    inside = [child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.stmt)]
    for branch in ast.iter_child_nodes(statement):
        if isinstance(branch, ast.ExceptHandler | ast.match_case):
            inside += branch.body
    return 1 + max(map(_levels, inside), default=0)


def main() -> None:
    """Print the largest functions of a checkout."""
    found = sizes(Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCE)
    print("longest\n" + "\n".join(map(str, sorted(found, key=lambda size: -size.lines)[:SHOWN])))
    print("\ndeepest\n" + "\n".join(map(str, sorted(found, key=lambda size: (-size.levels, -size.lines))[:SHOWN])))
    large = [size for size in found if size.too_large]
    print(f"\nover {MOST_LINES} lines or {MOST_LEVELS} levels: {len(large)} of {len(found)} functions", end="")
    print(f", {len([size for size in large if not size.on_gpu])} of them not on a GPU")


if __name__ == "__main__":
    main()
