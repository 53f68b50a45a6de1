"""Mutations: small changes of a source file, of the kinds that people make by mistake.

A mutant is one change in one place: another comparison, a constant off by one, a negated condition, a removed
statement, two exchanged arguments. Changes are made in the syntax tree and written back as text of the changed lines,
so that a survivor reads as a diff. Docstrings, messages, types, logging and declarations are not changed, because no
test should depend on them.

Two more kinds of places are not changed. The two arguments of a symmetric function (:data:`SYMMETRIC`), and the two
axes of a tensor's ``transpose``, are not exchanged: the result is the same by the function's definition. Statements
that ask whether a device is a GPU, and those that run only on one (inside ``if device.type == "cuda"``), are checked
by ``benchmarks/gpu.py`` on a GPU machine; no test of this checkout runs them.
"""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
OPERATIONS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
SYMMETRIC = frozenset(
    (
        *("max", "min", "math.gcd", "math.lcm"),
        *(f"np.{name}" for name in ("maximum", "minimum", "logaddexp", "gcd", "lcm", "array_equal")),
        *(f"torch.{name}" for name in ("maximum", "minimum", "logaddexp", "equal")),
    )
)
"""Functions of two arguments, as sources write them, that give the same for ``(a, b)`` and ``(b, a)``. With a further
argument (``max(a, b, key=...)``) they are not among them.
"""
DEVICES = ("cuda", "cpu")


@dataclass(frozen=True)
class Mutant:
    """A changed file: kind and line of the change, the statement before and after, and the whole new text."""

    kind: str
    line: int
    before: str
    after: str
    source: str

    def diff(self) -> str:
        """Return the change as text for a table."""
        return f"line {self.line}: `{_short(self.before)}` -> `{_short(self.after)}`"


def _short(code: str) -> str:
    one = " ".join(code.split()).replace("|", "\\|")
    return one if len(one) <= 110 else f"{one[:110]}..."


def mutants(source: str, rng: random.Random) -> Iterator[Mutant]:
    """Yield mutants of a file in random order, each possible change once."""
    tree = ast.parse(source)
    places = [
        (statement, kind, number)
        for statement in _statements(tree)
        for kind, count in _changes(statement).items()
        for number in range(count)
    ]
    rng.shuffle(places)
    lines, unchanged = source.splitlines(keepends=True), _code(source)
    for statement, kind, number in places:
        changed = copy.deepcopy(statement)
        _change(changed, kind, number, rng)
        after = "pass" if kind == "statement left out" else ast.unparse(changed)
        before = ast.unparse(statement)
        if after == before:
            continue
        first, last = statement.lineno - 1, statement.end_lineno or statement.lineno
        indent = " " * statement.col_offset
        body = "".join(f"{indent}{line}\n" for line in after.splitlines())
        text = "".join([*lines[:first], body, *lines[last:]])
        try:
            same = _code(text) == unchanged
        except SyntaxError:  # the statement shares its line with another
            continue
        if same:
            continue
        shown_before, shown_after = before.splitlines()[0], after.splitlines()[0]
        if shown_before == shown_after:
            shown_before, shown_after = _first_difference(before, after)
        yield Mutant(kind, statement.lineno, shown_before, shown_after, text)


def _code(source: str) -> CodeType:
    """Return the compiled source without line numbers; a change that gives equal code is no mutant."""

    def bare(code: CodeType) -> CodeType:
        inside = tuple(bare(part) if isinstance(part, CodeType) else part for part in code.co_consts)
        return code.replace(co_consts=inside, co_linetable=b"", co_firstlineno=1)

    return bare(compile(source, "mutant", "exec"))


def _first_difference(before: str, after: str) -> tuple[str, str]:
    pairs = zip(before.splitlines(), after.splitlines(), strict=False)
    return next(((a.strip(), b.strip()) for a, b in pairs if a != b), (before, after))


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield simple statements, and the heads of compound ones, inside functions, each once."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        only_on_gpu = _only_on_gpu(function)
        for node in ast.walk(function):
            if node is function or not isinstance(node, ast.stmt) or isinstance(node, ast.FunctionDef | ast.ClassDef):
                continue
            if id(node) in only_on_gpu or _devices_asked(node):
                continue
            if isinstance(
                node, ast.Raise | ast.Import | ast.ImportFrom | ast.Pass | ast.Assert | ast.Nonlocal | ast.Try
            ):
                continue
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                continue  # a docstring
            yield node


def _only_on_gpu(function: ast.FunctionDef) -> set[int]:
    """The statements, by id, inside ``if device.type == "cuda"``, whatever else the condition asks."""
    asking = [node for node in ast.walk(function) if isinstance(node, ast.If) and "cuda" in _devices_asked(node)]
    return {id(inside) for node in asking for statement in node.body for inside in ast.walk(statement)}


def _devices_asked(statement: ast.stmt) -> set[str]:
    """Kinds of devices that the statement itself compares something with for equality."""
    compared = [n for n in _own_nodes(statement) if isinstance(n, ast.Compare) and isinstance(n.ops[0], ast.Eq)]
    texts = {side.value for n in compared for side in n.comparators if isinstance(side, ast.Constant)}
    return {name for name in DEVICES if name in texts}


def _own_nodes(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield expressions of the statement itself, without nested statements, messages and types."""
    todo: list[ast.AST] = [statement]
    while todo:
        node = todo.pop(0)
        yield node
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "type_comment"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not isinstance(child, ast.stmt | ast.JoinedStr | ast.ExceptHandler):
                    todo.append(child)


def _is_symmetric(function: ast.expr) -> bool:
    """Whether a function gives the same for exchanged arguments. With two axes, ``transpose`` is torch's: NumPy's would
    be that of a matrix, which sources write as ``.T``.
    """
    named = isinstance(function, ast.Attribute) and function.attr == "transpose"
    return named or ast.unparse(function) in SYMMETRIC


def _candidates(statement: ast.stmt, kind: str) -> list[ast.AST]:
    nodes = list(_own_nodes(statement))
    if kind == "another comparison":
        return [n for n in nodes if isinstance(n, ast.Compare) and type(n.ops[0]) in COMPARISONS]
    if kind == "another operation":
        return [n for n in nodes if isinstance(n, ast.BinOp) and type(n.op) in OPERATIONS]
    if kind == "a constant off by one":
        return [n for n in nodes if isinstance(n, ast.Constant) and type(n.value) is int and abs(n.value) < 1 << 20]
    if kind == "a condition negated":
        return [n for n in nodes if isinstance(n, ast.If | ast.IfExp | ast.While)]
    if kind == "arguments exchanged":
        return [
            n
            for n in nodes
            if isinstance(n, ast.Call)
            and len(n.args) == 2
            and not any(isinstance(a, ast.Starred) for a in n.args)
            and (n.keywords or not _is_symmetric(n.func))
        ]
    simple = isinstance(statement, ast.Expr | ast.AugAssign | ast.Continue | ast.Break)
    return [statement] if simple else []


KINDS = (
    "another comparison",
    "another operation",
    "a constant off by one",
    "a condition negated",
    "arguments exchanged",
    "statement left out",
)


def _changes(statement: ast.stmt) -> dict[str, int]:
    return {kind: len(_candidates(statement, kind)) for kind in KINDS}


def _change(statement: ast.stmt, kind: str, number: int, rng: random.Random) -> None:
    if kind == "statement left out":
        return
    node = _candidates(statement, kind)[number]
    if isinstance(node, ast.Compare):
        node.ops[0] = COMPARISONS[type(node.ops[0])]()
    elif isinstance(node, ast.BinOp):
        node.op = OPERATIONS[type(node.op)]()
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        node.value = int(node.value) + rng.choice((-1, 1))
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.Call):
        node.args.reverse()
    ast.fix_missing_locations(statement)
