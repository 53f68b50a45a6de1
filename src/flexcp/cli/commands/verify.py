"""``flexcp verify``: run a plan, or the plans of a dump, on real processes and compare with one device.

A dump is a file that a rank with ``flexcp.Telemetry`` wrote; it holds the plans of its last steps.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flexcp.cli.commands.fuzz import replay_case
from flexcp.cli.shared import options as o
from flexcp.cli.shared.batches import BatchOptions, Lengths
from flexcp.cli.shared.plan_options import PlannerOptions, PlanOptions
from flexcp.cli.shared.progress import compiling, console, plain
from flexcp.io.terminal_text import visible, visible_lines

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.status import Status

    from flexcp.measure.replay_dumps import Replay
    from flexcp.measure.verify import Verdict

DumpPath = Annotated[
    str,
    typer.Argument(
        metavar="[@DUMP]",
        help="Replay the plans of a dump, or of all dumps in a folder, or a case of `flexcp fuzz`, instead.",
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of the random inputs.")]
LARGEST_SEED = (1 << 63) - 1
"""The largest seed; torch refuses larger ones on the ranks, and a replay would take that for a mistake of the plan."""
Kernel = Annotated[str, typer.Option(help="cpu or reference.")]


class MaybeBatchOptions(BatchOptions):
    """A batch; it is left out if a dump is replayed."""

    lengths: Lengths = ""


class ExactPlannerOptions(PlannerOptions):
    """A planner whose default dtype is float64, so that errors come from mistakes and not from rounding."""

    dtype: Annotated[str | None, typer.Option(help="bfloat16, float16, float32 or float64.")] = "float64"


class VerifyOptions(PlanOptions):
    """All options that decide the plan to verify."""

    batch: MaybeBatchOptions
    planner: ExactPlannerOptions


def verify(
    asked: VerifyOptions,
    dump: DumpPath = "",
    seed: Seed = 0,
    kernel: Kernel = "cpu",
    as_json: o.Json = False,
) -> None:
    """Run a plan forward and backward on real processes and compare each mask with dense float64 attention on one.

    Exit code 1: an error is larger than allowed, or the bytes sent differ from the plan's.

    Example: `flexcp verify --lengths 700,31,1 --ranks 3 --strategy blocks --heads 4 --kv-heads 2`, or `flexcp verify
    @dumps` for what ranks with `flexcp.Telemetry("dumps")` left behind (only --seed and --kernel count then).
    """
    if abs(seed) > LARGEST_SEED:
        raise ValueError(f"--seed is a whole number of at most {LARGEST_SEED}; got {seed}")
    if bool(dump) == bool(asked.batch.lengths):
        raise ValueError("verify takes either --lengths, for a plan made now, or @DUMP, for those of a dump")
    if dump:
        replay_dump(dump, seed, kernel, as_json)
        return
    from flexcp.measure.ranks import RankPool, check_size

    planner, lengths = asked.taken(asked.made_planner((4, 4, 32)))
    check_size(planner.cluster.ranks, "the cluster of a verification")
    with compiling():
        plan = asked.plan(planner, lengths)
    plan.check()
    from flexcp.measure.verify import Options, check_verifiable, verifying

    check_verifiable(plan, Options(seed=seed, kernel=kernel))
    verdicts: dict[str, Verdict] = {}
    with console().status(plain("starting processes")) as status, RankPool(plan.ranks) as pool:
        for number, mask in enumerate(plan.batch.masks):
            options = Options(seed=seed, kernel=kernel, mask=number)
            told = partial(_tell, status, f"mask {mask.name!r}: " if len(plan.batch.masks) > 1 else "")
            verdicts[mask.name] = pool.run(verifying, plan, options, on_item=told)[0]
    typer.echo(json.dumps(verdict_data(verdicts), indent=2) if as_json else verdict_text(verdicts))
    if not all(verdict.passed for verdict in verdicts.values()):
        raise typer.Exit(1)


def _tell(status: Status, before: str, text: str) -> None:
    """Show on the spinner what is being done: ``text`` with ``before`` in front of it."""
    status.update(plain(before + text))


def verdict_data(verdicts: Mapping[str, Verdict]) -> dict[str, object]:
    """Return the verdicts of a plan's masks, by mask name, with the documented JSON keys.

    The errors at the top level are the largest of all masks. Those of each mask are listed only if there are several.
    """
    found = list(verdicts.values())
    each = {name: {**v.errors, "bytes_match": v.bytes_match} for name, v in verdicts.items()}
    return {
        **{name: max(verdict.errors[name] for verdict in found) for name in found[0].errors},
        "bytes_match": all(verdict.bytes_match for verdict in found),
        "passed": all(verdict.passed for verdict in found),
        **({"masks": each} if len(each) > 1 else {}),
    }


def verdict_text(verdicts: Mapping[str, Verdict]) -> str:
    """Return the verdicts of a plan's masks, by mask name, as text; masks are named only if there are several."""
    lines = []
    for mask, verdict in verdicts.items():
        if len(verdicts) > 1:
            lines.append(f"layers with the mask {visible(mask)!r}:")
        for name, error in verdict.errors.items():
            lines.append(f"{name:>4}  error {error:.2e}   allowed {verdict.allowed[name]:.2e}")
        lines.append(f"bytes on the wire {'equal' if verdict.bytes_match else 'DIFFER FROM'} the plan's")
    lines.append("passed" if all(verdict.passed for verdict in verdicts.values()) else "FAILED")
    return "\n".join(lines)


def replay_dump(dump: str, seed: int, kernel: str, as_json: bool) -> None:
    """Replay what ranks dumped, or a case that ``flexcp fuzz`` wrote, and print the result.

    ``dump`` is ``@file`` or ``@folder``. Exit with code 1 if a plan is bad, if ranks held different plans in the same
    step, or if the case fails.
    """
    from flexcp.fuzz.cases import is_case_file
    from flexcp.measure.replay_dumps import replay

    if not dump.startswith("@"):
        raise ValueError(f"a dump is given as @file or @folder, as in @{dump}; got {dump!r}")
    path = Path(dump[1:])
    if is_case_file(path):
        replay_case(path, as_json)
        return
    _refuse_plan(path)
    with console().status("reading") as status:
        found = replay(path, seed, kernel, lambda text: status.update(plain(text)))
    typer.echo(json.dumps(_as_data(found), indent=2) if as_json else _as_text(found))
    if not found.passed:
        raise typer.Exit(1)


def _refuse_plan(path: Path) -> None:
    """Raise ValueError if the file is a plan instead of a dump, and name the command that reads plans."""
    from flexcp.plan.file import MAGIC

    if path.is_file():
        with path.open("rb") as file:
            if file.read(len(MAGIC)) == MAGIC:
                raise ValueError(f"{path} is a plan, not a dump of a run: check it with `flexcp show {path} --check`")


def _as_data(found: Replay) -> dict[str, object]:
    return {
        "dumps": [
            {"file": str(d.path), "rank": d.global_rank, "reason": d.reason, "message": d.message} for d in found.dumps
        ],
        "plans": [
            {
                "hash": p.plan.hash,
                "held": [{"rank": rank, "step": step} for rank, step in p.held],
                "problem": p.problem,
                "not_run": p.not_run,
                "masks": {name: {**v.errors, "bytes_match": v.bytes_match} for name, v in p.verdicts.items()},
                "passed": p.passed,
            }
            for p in found.plans
        ],
        "disagreements": found.disagreements,
        "passed": found.passed,
    }


def _as_text(found: Replay) -> str:
    lines = [
        f"{visible(d.path.name)}: rank {d.global_rank}, {visible(d.reason)}: {visible_lines(d.message, '  ')}"
        for d in found.dumps
    ]
    lines += [f"ranks held different plans in {words}" for words in found.disagreements]
    for p in found.plans:
        held = ", ".join(sorted({f"step {step}" for _, step in p.held}))
        lines += ["", f"{visible(repr(p.plan))} ({held}): {'passed' if p.passed else 'BAD'}"]
        if p.problem or p.not_run:
            lines.append(f"  {visible_lines(p.problem or f'checked symbolically only: {p.not_run}', '    ')}")
        for name, verdict in p.verdicts.items():
            worst = max(verdict.errors, key=lambda n: verdict.errors[n] / verdict.allowed[n])
            match = "bytes equal the plan's" if verdict.bytes_match else "BYTES DIFFER from the plan's"
            lines.append(
                f"  {visible(name)}: worst {worst}, error {verdict.errors[worst]:.2e} (allowed "
                f"{verdict.allowed[worst]:.2e}), {match}"
            )
    return "\n".join(lines)
