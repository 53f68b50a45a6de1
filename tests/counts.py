"""Counts of a checkout, read from its files without running any of it.

    python tests/counts.py                   # this checkout
    python tests/counts.py OTHER             # another checkout beside this one, as "before" and "after"

Words of a page are those outside of code blocks, comments and the separator lines of tables. Arguments are those in a
call's signature, without ``self`` and without the ``**`` argument that accepts old spellings.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

from function_sizes import sizes

ROOT = Path(__file__).parents[1]
MOST_COLUMNS = 120
CALLS = {
    "Loader": ("data/loader.py", "Loader.__init__"),
    "Planner": ("planner.py", "Planner.__init__"),
    "attention": ("executor/attention.py", "attention"),
}


def counts(root: Path) -> dict[str, str]:
    """Return what is counted, in words, and the counts."""
    source, docs = root / "src", root / "docs"
    results = sorted((docs / "results").glob("*.md"))
    manual = [page for page in sorted(docs.glob("*.md")) if page.name not in ("api.md", "lab-notes.md")]
    functions = sizes(source)
    on_cpu = [size for size in functions if not size.on_gpu]
    longest = max(on_cpu, key=lambda size: size.lines)
    deepest = max(on_cpu, key=lambda size: (size.levels, size.lines))
    scripts = [
        path for room in ("src", "tests", "benchmarks", "examples", "docs") for path in (root / room).rglob("*.py")
    ]
    wide = [line for path in scripts for line in path.read_text().splitlines() if len(line) > MOST_COLUMNS]
    lines = sum(len(path.read_text().splitlines()) for path in source.rglob("*.py"))
    test = re.compile(r"^ *(?:async )?def test_", re.MULTILINE)
    tests = [found for path in (root / "tests").rglob("test_*.py") for found in test.findall(path.read_text())]
    return {
        "pages of the manual": f"{len(manual)}",
        "pages of results": f"{len(results)}",
        "words of README.md": f"{words(root / 'README.md'):,}",
        "words of the manual": f"{sum(map(words, manual)):,}",
        "words of results": f"{sum(map(words, results)):,}",
        "names of flexcp": f"{len(public_names(source / 'flexcp' / '__init__.py'))}",
        "names of flexcp.data": f"{len(public_names(source / 'flexcp' / 'data' / '__init__.py'))}",
        **{
            f"arguments of {name}": f"{arguments(source / 'flexcp' / file, path)}"
            for name, (file, path) in CALLS.items()
        },
        "lines of src": f"{lines:,}",
        "functions of src": f"{len(functions):,}",
        "longest function, lines": f"{longest.lines} ({longest.name})",
        "deepest function, levels": f"{deepest.levels} ({deepest.name})",
        f"Python lines over {MOST_COLUMNS} columns": f"{len(wide)}",
        "test functions": f"{len(tests):,}",
    }


def words(page: Path) -> int:
    """Return the number of words of a page as a reader sees it."""
    text = re.sub(r"^```.*?^```$|<!--.*?-->|<[^>\n]+>", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return len([word for word in text.split() if not re.fullmatch(r"[|#*-]+", word)])


def public_names(module: Path) -> list[str]:
    """Return the names in a module's ``__all__``."""
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def arguments(module: Path, path: str) -> int:
    """Return how many arguments a function takes; ``path`` is its name after the names of its classes."""
    node: ast.AST = ast.parse(module.read_text())
    for name in path.split("."):
        kinds = (ast.ClassDef, ast.FunctionDef)
        node = next(each for each in ast.iter_child_nodes(node) if isinstance(each, kinds) and each.name == name)
    assert isinstance(node, ast.FunctionDef)
    taken = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return len([name for name in taken if name != "self"])


def main() -> None:
    """Print the counts of this checkout, or those of another one beside it."""
    after = counts(ROOT)
    before = counts(Path(sys.argv[1])) if len(sys.argv) > 1 else None
    print("| what | before | after |\n| --- | --- | --- |" if before else "| what | how much |\n| --- | --- |")
    for name, value in after.items():
        print(f"| {name} | {before[name]} | {value} |" if before else f"| {name} | {value} |")


if __name__ == "__main__":
    main()
