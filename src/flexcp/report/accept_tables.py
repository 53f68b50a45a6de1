"""Report sections of ``flexcp accept``: the verdict and its checks, then tables of ranks, links and strategies."""

from __future__ import annotations

from flexcp.measure.accept.accept import Acceptance
from flexcp.measure.accept.link_speeds import level_words
from flexcp.report.markup import Cell
from flexcp.report.sections import Section, table_section, words_section


def accept_sections(found: Acceptance) -> list[Section]:
    """Return the sections of everything that was measured; tables of checks that did not run are left out."""
    verdict = "All checks passed." if found.passed else "Not accepted:"
    setting = found.setting
    figures = [
        ("cluster", str(setting.cluster)),
        ("ranks", f"{setting.cluster.ranks}"),
        ("backend", "NCCL" if setting.device == "cuda" else "gloo"),
        ("rehearsal", "yes" if setting.rehearsal else "no"),
    ]
    checks = [[c.name, c.verdict, c.value or c.missing] for c in found.checks]
    sections = [
        words_section("Verdict", [verdict, *found.failures], figures),
        table_section("Checks", ["check", "verdict", "found"], checks, "In the order in which they ran."),
    ]
    if found.cards:
        ranks: list[list[Cell]] = [
            [
                c.rank,
                c.host,
                setting.cluster.node_of(c.rank),
                c.gpu or c.device,
                c.flexcp,
                c.source,
                c.torch,
                c.python,
                c.nccl,
            ]
            for c in found.cards
        ]
        headers = ["rank", "host", "node", "device", "flexcp", "source", "torch", "Python", "NCCL"]
        says = "What each rank said of itself. The node is the cluster's, the host is where the rank ran."
        sections.append(table_section("Ranks", headers, ranks, says))
    if found.links:
        links: list[list[Cell]] = [
            [
                x.a,
                found.cards[x.a].host,
                x.b,
                found.cards[x.b].host,
                level_words(x.across),
                round(x.mbps, 1),
                round(x.latency_ns / 1000, 1),
            ]
            for x in found.links
        ]
        headers = ["rank", "host", "other rank", "its host", "level", "MB/s", "latency us"]
        sections.append(
            table_section("Links", headers, links, "Measured, each way, with all pairs of a level at the same time.")
        )
    if found.rows:
        rows: list[list[Cell]] = [
            [row.name, row.step_ms, row.predicted_ms or 0.0, f"{row.error or 0.0:+.0%}", row.bytes or 0]
            if row.step_ms is not None
            else [row.name, "", "", row.missing or "", ""]
            for row in found.rows
        ]
        headers = ["strategy", "measured ms", "predicted ms", "predicted / measured - 1", "bytes"]
        says = (
            "Attention forward and backward, the slowest rank in the fastest repeat; "
            "simulated with what was measured here."
        )
        sections.append(table_section("Strategies", headers, rows, says))
    return sections
