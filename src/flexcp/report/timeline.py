"""The timeline of a report: what every rank does when, as bars.

Bars come from the event simulator, or from anything else with a rank, track, name, begin and end. There are many
transfers. To keep a page small, transfers of a rank on one track that are less than a two-thousandth of the whole time
apart are drawn as one bar (more coarsely if there are still too many), so zooming in shows no finer grain.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from flexcp.report.markup import Cell, figure, folded, table

MOST_BARS = 12_000
"""If there are more bars, transfers are merged more coarsely."""
TRACKS: dict[str, tuple[str, str, int]] = {
    "compute": ("computes attention", "attention", 0),
    "other": ("computes the rest of the layer", "linear", 0),
    "wait": ("waits", "exposed", 0),
    "receive inside": ("receives inside its node", "send", 1),
    "receive across": ("receives from another node", "across", 1),
    "send inside": ("sends inside its node", "send", 2),
    "send across": ("sends to another node", "across", 2),
}
"""For each track: what a rank does in it, the colour, and the row (compute above, then receives, then sends)."""


class Bar(Protocol):
    """One bar of a timeline: what a rank does on a track from ``begin`` to ``end``, in nanoseconds."""

    @property
    def rank(self) -> int: ...
    @property
    def track(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def begin(self) -> int: ...
    @property
    def end(self) -> int: ...


class _Merged(NamedTuple):
    rank: int
    track: str
    name: str
    begin: int
    end: int


def timeline_data(bars: Iterable[Bar]) -> dict[str, Any]:
    """Return bars as columns for a page, with each text listed once and transfers merged as far as needed.

    Raises ValueError for a track that :data:`TRACKS` does not have.
    """
    found = [_Merged(b.rank, b.track, b.name, b.begin, b.end) for b in bars if b.end > b.begin]
    unknown = {b.track for b in found} - TRACKS.keys()
    if unknown:
        raise ValueError(f"unknown tracks {sorted(unknown)}; a timeline has {', '.join(TRACKS)}")
    last = max((b.end for b in found), default=1)
    parts = 2_000
    while len(found) > MOST_BARS or parts == 2_000:
        found = _merged(found, last // parts)
        parts //= 2
        if not parts:
            break
    lanes, labels = list(TRACKS), list(dict.fromkeys(b.name for b in found))
    number = {text: i for i, text in enumerate(labels)}
    return {
        "end": last,
        "lanes": [{"name": says, "colour": colour, "row": row} for says, colour, row in TRACKS.values()],
        "labels": labels,
        "spans": {
            "rank": [b.rank for b in found],
            "lane": [lanes.index(b.track) for b in found],
            "start": [b.begin for b in found],
            "stop": [b.end for b in found],
            "label": [number[b.name] for b in found],
        },
    }


def _merged(bars: list[_Merged], gap: int) -> list[_Merged]:
    """Join transfers of a rank on a track that lie within ``gap`` nanoseconds of each other.

    The joint bar's name is what their names share.
    """
    found: list[_Merged] = []
    for bar in sorted(bars, key=lambda b: (b.rank, b.track, b.begin)):
        before = found[-1] if found else None
        joins = before is not None and (before.rank, before.track) == (bar.rank, bar.track) and TRACKS[bar.track][2] > 0
        if before is not None and joins and bar.begin - before.end <= gap:
            name = before.name if before.name == bar.name else _common(before.name, bar.name)
            found[-1] = before._replace(end=max(before.end, bar.end), name=name)
        else:
            found.append(bar)
    return found


def _common(one: str, other: str) -> str:
    """Return the common beginning of two comma-separated names, and "several" for the rest.

    ``a, b`` and ``a, c`` give ``a, several``.
    """
    shared = []
    for a, b in zip(one.split(", "), other.split(", "), strict=False):
        if a != b:
            break
        shared.append(a)
    return ", ".join([*shared, "several"] if "several" not in shared else shared)


def timeline_figure(number: int, data: dict[str, Any], ranks: int, caption: str) -> str:
    """Return the figure of a timeline, with a table of every rank's time on each track.

    ``number`` is the number of the section on the page, ``data`` the result of :func:`timeline_data`.
    """
    spent = [[0] * len(TRACKS) for _ in range(ranks)]
    spans = data["spans"]
    for rank, lane, start, stop in zip(spans["rank"], spans["lane"], spans["start"], spans["stop"], strict=True):
        spent[rank][lane] += stop - start
    rows: list[list[Cell]] = [[r, *(round(ns / 1e6, 4) for ns in spent[r])] for r in range(ranks)]
    waits = [times[list(TRACKS).index("wait")] for times in spent]
    says = f"{data['end'] / 1e6:.3f} ms in all; ranks wait {min(waits) / 1e6:.3f} to {max(waits) / 1e6:.3f} ms."
    keys = "".join(
        f'<span class="key"><i style="background:var(--{colour})"></i>{text}</span>'
        for colour, text in (
            ("attention", "attention"),
            ("linear", "the rest of the layer"),
            ("exposed", "waits"),
            ("send", "transfers inside a node"),
            ("across", "transfers between nodes"),
        )
    )
    behind = f'<p class="tools">{keys}</p>' + folded(
        "As a table", table(["rank", *(f"{track} ms" for track in TRACKS)], rows, "Time of every rank by what it does")
    )
    return figure("timeline", number, title="Timeline", says=says, caption=caption, behind=behind)
