"""Checks of everything that flexcp assumes about a cluster, on all ranks, in the order in which things can go wrong.

1. *Versions* and *hosts*, from the ranks' cards, without a process group. If one of these fails, the rest is not run.
2. *Exactness*: small plans of several strategies against dense attention on one rank, over the backend of real steps.
3. *Links* inside nodes and across them, pair by pair.
4. *Predicted time*: a cost model is fitted to kernels and links as measured here, then every strategy is planned,
   predicted and timed. On GPUs the median error is judged. CPU ranks and the ranks of a rehearsal share cores or GPUs,
   so their times are shown but not judged.

:func:`accept` is collective. It adds its results to an :class:`Acceptance` as it goes, so that a run which ends early
still has a report.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from typing import Any

import torch.distributed as dist

from flexcp.batch import make_batch
from flexcp.calibration import Calibration
from flexcp.clusters import Cluster
from flexcp.compare.compare import planned, without_linear
from flexcp.cost import CostModel, dense_model
from flexcp.masks import causal
from flexcp.measure.accept.checks import Check, hosts_check, versions_check
from flexcp.measure.accept.link_speeds import (
    PairLink,
    level_words,
    link_times_of,
    links_check,
    measure_level,
    usual_mbps,
)
from flexcp.measure.accept.rank_cards import RankCard
from flexcp.measure.bench_step import BenchTask, Measured, bench_strategy, median_error
from flexcp.measure.calibrate.calibrate import calibrated, measure
from flexcp.measure.calibrate.kernels import GPU_TOKENS, GPU_WORK, KernelTask
from flexcp.measure.verify import Options, verify_on
from flexcp.planners.request import Refused, Request
from flexcp.shape import Shape

FORMAT = "flexcp-accept-1"
MOST_ERROR = 0.3
"""The largest accepted error of predicted times on GPUs, as a fraction: the median over strategies."""
LONGEST_EXACT = 2048
"""The most tokens of a document in the exactness check, whose reference is dense attention."""
CPU_TOKENS, CPU_WORK = (256, 512, 1024), ("causal", "full", "docs4", "docs16")
Begin = Callable[[str], None]
"""Called with the name of each step before it begins."""


@dataclass(frozen=True)
class Setting:
    """What to check: the cluster that the ranks should form, and the attention, documents and strategies to run on it.

    In a ``rehearsal`` ranks may share hosts and GPUs, and speeds are not compared with the cluster's.
    """

    cluster: Cluster
    shape: Shape
    lengths: tuple[int, ...]
    strategies: tuple[str, ...]
    device: str = "cpu"
    rehearsal: bool = False
    repeats: int = 3


@dataclass
class Acceptance:
    """The results of an acceptance run so far: cards of ranks, checks, links, and times of strategies (``rows``)."""

    setting: Setting
    cards: list[RankCard] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    links: list[PairLink] = field(default_factory=list)
    rows: list[Measured] = field(default_factory=list)
    calibration: Calibration | None = None

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def failures(self) -> list[str]:
        """All failures, one line each."""
        return [f"{check.name}: {line}" for check in self.checks for line in check.failures]

    def to_json(self) -> dict[str, Any]:
        """Return the results as JSON values, with the keys that docs/commands.md explains."""
        setting = self.setting
        return {
            "format": FORMAT,
            "date": date.today().isoformat(),
            "passed": self.passed,
            "failures": self.failures,
            "cluster": str(setting.cluster),
            "backend": "nccl" if setting.device == "cuda" else "gloo",
            "rehearsal": setting.rehearsal,
            "shape": asdict(setting.shape),
            "lengths": list(setting.lengths),
            "checks": [
                {**asdict(check), "failures": list(check.failures), "verdict": check.verdict} for check in self.checks
            ],
            "ranks": [asdict(card) for card in self.cards],
            "links": [
                {
                    "ranks": [x.a, x.b],
                    "across": x.across,
                    "mbps": round(x.mbps, 1),
                    "latency_us": round(x.latency_ns / 1000, 1),
                }
                for x in self.links
            ],
            "strategies": [{**asdict(row), "error": row.error} for row in self.rows],
            "calibration": None if self.calibration is None else self.calibration.to_json(),
        }


def accept(found: Acceptance, start: Callable[[], dist.ProcessGroup], begin: Begin = lambda _: None) -> bool:
    """Run all checks; collective over the ranks whose cards ``found`` holds. Return on every rank whether all passed.

    ``found`` has the results on rank 0. ``start`` makes the process group and is called only if the checks before it
    passed; ``begin`` is called with the name of each step.
    """
    setting = found.setting
    found.checks += [
        versions_check(found.cards),
        hosts_check(found.cards, setting.cluster, setting.rehearsal),
    ]
    if not found.passed:
        wrong = " and ".join(check.name for check in found.checks if not check.passed)
        found.checks += [Check(name, "", missing=f"{wrong} first") for name in ("exactness", "links", "predicted time")]
        return False
    begin("the group's start")
    group = start()
    found.checks.append(_exactness(group, setting, begin))
    for across in (False, True):
        begin(f"links {level_words(across)}")
        found.links += measure_level(group, setting.cluster, across, setting.device)
    found.checks.append(links_check(found.links, setting.cluster, found.cards, setting.rehearsal))
    found.calibration = _calibration(group, found, begin)
    found.checks.append(_predictions(group, found, begin))
    verdict = [found.passed]
    dist.broadcast_object_list(verdict, group=group, group_src=0)
    return verdict[0]


def _exactness(group: dist.ProcessGroup, setting: Setting, begin: Begin) -> Check:
    """Check the exactness of every strategy; the result is complete on rank 0, other ranks find no failures."""
    ranks = setting.cluster.ranks
    batch = make_batch([min(LONGEST_EXACT, 32 * ranks + 5), min(LONGEST_EXACT, 8 * ranks), 17, 1], causal())
    shape = setting.shape if setting.device == "cuda" else replace(setting.shape, dtype="float64")
    options = Options(kernel=None, device=setting.device)
    ran, failures, worst = [], [], 0.0
    for name in setting.strategies:
        begin(f"exactness of {name}")
        try:
            name, plan = planned(Request(batch, shape, setting.cluster, CostModel()), name)
        except Refused:
            continue
        verdict = verify_on(group, plan, options)
        ran.append(name)
        if verdict is None:
            continue
        worst = max(worst, *verdict.errors.values())
        failures += [
            f"{name}: {what} is off by {error:.1e}, where {verdict.allowed[what]:.1e} is allowed; run flexcp doctor on "
            "these hosts, and check their GPUs"
            for what, error in verdict.errors.items()
            if not error <= verdict.allowed[what]
        ]
        if not verdict.bytes_match:
            failures.append(f"{name}: bytes on the wire differ from the plan's; run flexcp doctor on these hosts")
    if not ran:
        return Check(
            "exactness", "", missing=f"none of {', '.join(setting.strategies)} takes {ranks} ranks; try others"
        )
    return Check("exactness", f"{', '.join(ran)}: largest error {worst:.1e} ({shape.dtype})", tuple(failures))


def _calibration(group: dist.ProcessGroup, found: Acceptance, begin: Begin) -> Calibration:
    """Fit the cost model of these ranks and links; collective, with the same result on every rank."""
    setting = found.setting
    work = (GPU_TOKENS, GPU_WORK) if setting.device == "cuda" else (CPU_TOKENS, CPU_WORK)
    task, model = KernelTask(setting.shape, setting.device, *work), dense_model(setting.shape)

    def run(function: Callable[..., Any], *arguments: Any) -> list[Any]:
        answers: list[Any] = [None] * setting.cluster.ranks
        dist.all_gather_object(answers, function(group, *arguments), group=group)
        return answers

    measured = measure(run, 1, task, model, begin)
    begin("one more message")
    if found.links:
        measured = replace(measured, links=link_times_of(group, found.links, setting.device))
    begin("fitting the cost model")
    shared: list[Any] = [None]
    if dist.get_rank(group) == 0:  # contention of kernels and copies is measured here, and would differ between ranks
        shared = [calibrated(measured, task, model, "accepted", found.cards[0].gpu or "CPU ranks")]
    dist.broadcast_object_list(shared, group=group, group_src=0)
    calibration: Calibration = shared[0]
    return replace(calibration, speeds={**calibration.speeds, **_speeds(found.links)})


def _speeds(links: list[PairLink]) -> dict[str, int]:
    """Return the median speeds of the measured levels (inside and across nodes) as fields of a cluster.

    The latency is that of links across nodes, if there are any.
    """
    speeds: dict[str, int] = {}
    for across, name in ((False, "intra_mbps"), (True, "inter_mbps")):
        level = [link for link in links if link.across == across]
        if level:
            speeds[name] = max(1, round(usual_mbps(level)))
            speeds["latency_ns"] = round(statistics.median(link.latency_ns for link in level))
    return speeds


def _predictions(group: dist.ProcessGroup, found: Acceptance, begin: Begin) -> Check:
    """Plan, predict and time every strategy, and check the median error; collective."""
    setting, fitted = found.setting, found.calibration
    assert fitted is not None
    task = BenchTask(
        setting.lengths,
        causal(),
        setting.shape,
        fitted.on(setting.cluster),
        without_linear(fitted.cost),
        setting.strategies,
        setting.device,
        setting.repeats,
        tiles=fitted.tiles if setting.device == "cuda" else None,
    )
    for name in setting.strategies:
        begin(f"time of {name}")
        found.rows.append(bench_strategy(group, task, name))
    error = median_error(found.rows)
    if error is None:
        return Check("predicted time", "", missing=f"none of {', '.join(setting.strategies)} ran; try others")
    words = f"median error {error:.0%} over {sum(row.error is not None for row in found.rows)} strategies"
    if setting.rehearsal or setting.device == "cpu":
        return Check("predicted time", f"{words}, not judged: ranks share what they run on")
    wrong = (
        f"predicted times are off by {error:.0%} (median), more than {MOST_ERROR:.0%}; see that nothing else runs on "
        "these hosts, then run again, and let the file of this run say which strategies are off"
    )
    return Check("predicted time", words, (wrong,) if error > MOST_ERROR else ())
