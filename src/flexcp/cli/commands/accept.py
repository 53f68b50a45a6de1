"""``flexcp accept``: check a cluster before the first job on it, under torchrun, in 10 minutes at most."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexcp.cli.shared import options as o
from flexcp.cli.shared.model_and_cluster_options import HeadsOptions, find_cluster
from flexcp.cli.shared.progress import compiling
from flexcp.io.atomic_files import write_whole
from flexcp.io.terminal_text import visible

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from flexcp.measure.accept.accept import Acceptance, Setting
    from flexcp.measure.accept.watch import Watch

ALL_SECONDS = 600.0
STRATEGIES = "auto,ring,zigzag,allgather,ulysses,blocks"
HEADS = {"cuda": (32, 8, 128), "cpu": (8, 8, 64)}
"""Default query heads, KV heads and head size, by device."""
TOKENS_PER_RANK = {"cuda": 8192, "cpu": 256}

ClusterName = Annotated[
    str | None,
    typer.Option("--cluster", help="What the ranks should be, as in h100:4x8; torchrun's own shape by default."),
]
Lengths = Annotated[str, typer.Option(help="Documents of the timed strategies; web:TOKENS by default.")]
Rehearsal = Annotated[
    bool, typer.Option("--rehearsal", help="Ranks may share hosts and GPUs; times are shown, not judged.")
]
Timeout = Annotated[float, typer.Option(help="Seconds that a step may take before a rank is said to stand still.")]
Write = Annotated[Path, typer.Option(callback=o.writable, help="The JSON file.")]
Page = Annotated[Path, typer.Option("--html", callback=o.writable, help="The page.")]
WriteCost = Annotated[
    Path | None, typer.Option(callback=o.writable, help="Write the cost model fitted on these ranks, for --cost.")
]


def accept(
    described: HeadsOptions,
    cluster: ClusterName = None,
    rehearsal: Rehearsal = False,
    strategies: o.Strategies = STRATEGIES,
    lengths: Lengths = "",
    dtype: o.MeasuredDtype = "",
    cost: o.CostFile = None,
    timeout: Timeout = 120.0,
    write: Write = Path("accept.json"),
    html: Page = Path("accept.html"),
    write_cost: WriteCost = None,
    as_json: o.Json = False,
) -> None:
    """Check a cluster before the first job: hosts, versions, exactness, links, predicted time.

    Exit code 1: a check failed. Runs under torchrun, on all ranks of the cluster, for 10 minutes at most. Link speeds
    in --cost replace the preset's.

    Example: `torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint $HEAD:29500 -m flexcp accept
    --cluster h100:4x8`
    """
    if not timeout > 0:
        raise ValueError(f"--timeout is a number of seconds above 0; got {timeout:g}")
    o.refuse_same_file(write=write, html=html, write_cost=write_cost)
    setting = _setting(described, cluster, rehearsal, strategies, lengths, dtype, cost)

    def written(found: Acceptance) -> None:
        try:
            _write(found, write, html, write_cost)
        finally:  # what a cluster took minutes to find is not lost with the files
            _show(found, as_json, write, html)

    with compiling("waiting for all ranks") as progress:
        passed = _run(setting, timeout, written, progress.update)
    if not passed:
        raise typer.Exit(1)


def _setting(
    described: HeadsOptions,
    cluster: str | None,
    rehearsal: bool,
    strategies: str,
    lengths: str,
    dtype: str,
    cost: Path | None,
) -> Setting:
    described.attention(HEADS["cpu"])  # finds mistakes before torch is loaded
    from flexcp.data.lengths import parse_lengths
    from flexcp.planners.strategies import find_strategy

    names, calibration = o.chosen_strategies(strategies), o.cost_of(cost)
    for name in names:
        find_strategy(name)
    documents = parse_lengths(lengths) if lengths else None
    shaped = cluster is not None and ":" in cluster
    find_cluster(cluster, None, *((None, None) if shaped else (1, 1)))
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise ValueError(
            "accept runs on all ranks of a cluster: torchrun --nproc-per-node 8 -m flexcp accept (see docs/launch.md)"
        )
    import torch

    from flexcp.measure.accept.accept import Setting

    ranks = int(os.environ["WORLD_SIZE"])
    each = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    default = "h100" if device == "cuda" else "cpu"
    nodes, of_node = (None, None) if shaped else (max(1, ranks // each), each)
    found = find_cluster(cluster, None, nodes, of_node, default=default)
    if found.ranks != ranks:
        raise ValueError(
            f"cluster {found} has {found.ranks} ranks, but {ranks} were started ({each} on this host); change "
            "--cluster, or torchrun's --nnodes and --nproc-per-node"
        )
    shape = replace(described.attention(HEADS[device]), dtype=dtype or ("float32" if device == "cpu" else "bfloat16"))
    documents = documents or parse_lengths(f"web:{TOKENS_PER_RANK[device] * ranks}:0")
    return Setting(calibration.on(found), shape, tuple(documents), names, device, rehearsal)


def _run(setting: Setting, timeout: float, written: Any, say: Any) -> bool:
    """Run all checks on this rank; return whether they passed.

    ``timeout`` is the seconds that a step may take. ``written(found)`` writes and prints the report; it is called on
    rank 0 or, if the run ends early, on the rank that reports this. ``say(step)`` shows on rank 0 which step begins.
    """
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    from flexcp.executor.exchange.start_group import start_group
    from flexcp.measure.accept.accept import Acceptance, accept
    from flexcp.measure.accept.checks import Check
    from flexcp.measure.accept.rank_cards import own_card, roll_call
    from flexcp.measure.accept.watch import Watch
    from flexcp.measure.shared_gpu import share_gpu

    store, rank, ranks = _store(timeout)
    if setting.device == "cuda":
        local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        torch.cuda.set_device(local % count)
        if setting.rehearsal and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > count:
            share_gpu(rank)
    found = Acceptance(setting)

    def ended(line: str) -> None:
        found.checks.append(Check("all ranks to the end", "ended early", (line,)))
        written(found)

    with Watch(PrefixStore("accept", store), rank, ranks, timeout, ALL_SECONDS, ended) as watch:

        def begin(step: str) -> None:
            watch.begin(step)
            if rank == 0:
                say(step)

        begin("roll call")
        found.cards = roll_call(watch.store, own_card(rank, setting.device), ranks, timeout)
        watch.names = {card.rank: card.name for card in found.cards}
        limit = timedelta(seconds=2 * ALL_SECONDS)  # the watch ends earlier, and explains more
        start = partial(start_group, setting.device == "cuda", store=store, rank=rank, world_size=ranks, timeout=limit)
        passed = accept(found, start, begin)
        begin("report")
        if rank == 0:
            written(found)
        _after_rank_0(watch, rank)
    if dist.is_initialized():
        dist.destroy_process_group()
    return passed


def _store(timeout: float) -> tuple[Store, int, int]:
    """Return torch's store that the launcher's environment variables name, this rank, and the number of ranks.

    Raise ValueError if the store does not answer within ``timeout`` seconds.
    """
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    try:
        store, rank, ranks = next(iter(rendezvous("env://", timeout=timedelta(seconds=timeout))))
    except dist.DistError as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise ValueError(
            f"rank {os.environ['RANK']} found no store at {where} within {timeout:g} s "
            f"({' '.join(str(error).split())[:200]}); see that all ranks run and reach that address"
        ) from None
    return store, rank, ranks


def _after_rank_0(watch: Watch, rank: int) -> None:
    """Wait until rank 0 has written the report; rank 0 itself calls this when it has.

    Without this wait the report could be lost: a launcher stops all ranks as soon as one ends with a failure.
    """
    import time

    if rank == 0:
        watch.store.set("written", "yes")
    while not watch.store.check(["written"]):  # the watch ends this if it takes too long
        time.sleep(0.1)


def _write(found: Acceptance, write: Path, html: Path, write_cost: Path | None) -> None:
    from flexcp.report.accept_tables import accept_sections
    from flexcp.report.page import write_report

    write_whole(write, json.dumps(found.to_json(), indent=2) + "\n")
    title = f"{found.setting.cluster}: {'accepted' if found.passed else 'not accepted'}"
    write_report(html, accept_sections(found), title, "The first run of flexcp on this cluster")
    if write_cost is not None and found.calibration is not None:
        write_whole(write_cost, json.dumps(found.calibration.to_json(), indent=2) + "\n")


def _show(found: Acceptance, as_json: bool, write: Path, html: Path) -> None:
    """Print the checks as a table or as JSON, and a line on stderr for each failure."""
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
    else:
        from rich.console import Console
        from rich.table import Table

        table = Table(
            "check", "verdict", "found", title=f"{found.setting.cluster}, {found.setting.cluster.ranks} ranks"
        )
        for check in found.checks:
            table.add_row(check.name, check.verdict, visible(check.value or check.missing))
        Console().print(table)
    for line in found.failures:
        print(f"flexcp: {visible(line)}", file=sys.stderr)
    if not as_json:
        verdict = "accepted" if found.passed else "NOT accepted"
        rehearsed = " (a rehearsal: times mean nothing)" if found.setting.rehearsal else ""
        typer.echo(f"{verdict}{rehearsed}; {write} and {html} say more")
    sys.stdout.flush()
