"""Hooks of the site, so that nothing is forgotten: pages that the navigation does not name are put under "How to" or "Numbers", public
names that the reference does not name at its end.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import flexcp

NUMBERS = "Numbers"
HOW_TO = "How to"


def on_config(config: Any) -> Any:
    """Add every page that the navigation does not name: tables of measurements say how they were made, the others are how-tos."""
    folder = Path(config.docs_dir)
    named = set(_pages(config.nav))
    for page in sorted(folder.glob("*.md")):
        if page.name not in named:
            text = page.read_text()
            title = next((line.lstrip("# ") for line in text.split("\n") if line.startswith("# ")), page.stem)
            group = NUMBERS if "make " in text[:1500] or "simulated" in text[:600].lower() else HOW_TO
            next(entry for entry in config.nav if group in entry)[group].append({title: page.name})
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Add every public name to the reference that it lacks."""
    if page.file.src_uri != "api.md":
        return markdown
    missing = [
        f"::: flexcp.{home}.{name}\n" for name, home in flexcp._HOMES.items() if not _named(name, home, markdown)
    ]
    return markdown + ("\n## More\n\n" + "\n".join(missing) if missing else "")


def _named(name: str, home: str, markdown: str) -> bool:
    listed = re.search(rf"::: flexcp\.{re.escape(home)}\n(?:    .*\n)*?.*members: \[(.*)\]", markdown)
    return f"::: flexcp.{home}.{name}\n" in markdown or (listed is not None and name in listed[1].split(", "))


def _pages(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    if isinstance(nav, dict):
        return [page for value in nav.values() for page in _pages(value)]
    return [page for entry in nav for page in _pages(entry)]
