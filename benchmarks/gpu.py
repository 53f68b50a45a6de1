"""The GPU suite: everything that needs a GPU, in one command that writes one JSON file.

    python benchmarks/gpu.py --write gpu.json                         all parts
    python benchmarks/gpu.py --only cases,recompiles                  some of them
    python benchmarks/gpu.py --plans plans.npz --make-plans           work lists of real plans, made where Numba is
    python benchmarks/gpu.py --nccl-cases c.pkl --make-nccl-cases     plans of ``nccl``, made where Mt-KaHyPar is

Parts: ``cases`` (1,000 random cases judged by the error rule), ``recompiles`` (100 random batches compile nothing),
``bench`` (our kernels and others), ``plans`` (work lists of real plans against the kernel's dense rate), ``margin``
(multiprocessors left to a copy that runs beside attention), and, only on request, ``nccl`` (2, 4 and 8 real ranks on
one GPU). Each part runs in its own processes; compilations run in parallel, timings do not. Needs only torch, Triton
and NumPy.
"""

from __future__ import annotations

import argparse
import json
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
PACKS = 5
RANKS_TIMED = 4
DATA = (("web", 8), ("web", 64), ("libra256k", 8), ("libra256k", 64))
TOKENS_PER_RANK = 8192
SIZES = ("rows", "keys", "shelf", "shelf_heads", "h0", "h1", "open_dq", "alone")
"""The fields of a ``Listed`` that the file of ``--make-plans`` keeps as one array of integers."""


def main() -> None:
    """Run the requested parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="cases,recompiles,bench,plans,margin")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--plans", type=Path, help="work lists made by --make-plans; planned here without it")
    parser.add_argument("--make-plans", action="store_true")
    parser.add_argument("--nccl-cases", type=Path, help="plans made by --make-nccl-cases; planned here without it")
    parser.add_argument("--make-nccl-cases", action="store_true")
    parser.add_argument("--nccl-checks", default="", help="some of the checks of nccl, by name; all without it")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--patience", type=int, default=280, help="seconds for each process")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--argument", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.make_plans:
        np.savez_compressed(asked.plans, **plan_work())
        return
    if asked.make_nccl_cases:
        from lib import gpu_checks, nccl_checks

        asked.nccl_cases.write_bytes(pickle.dumps(list(gpu_checks.gpu_cases(ranks_of=nccl_checks.RANKS))))
        return
    if asked.part:
        argument = json.loads(asked.argument)
        print("RESULT " + json.dumps(PARTS[asked.part](argument)), flush=True)
        return
    found: dict[str, Any] = {}
    for part in asked.only.split(","):
        begin = time.perf_counter()
        found[part] = _in_processes(part, _arguments(part, asked), asked.patience)
        print(f"== {part} ({time.perf_counter() - begin:.0f} s)", flush=True)
        for line in found[part]:
            print(json.dumps(line), flush=True)
        if asked.write:
            asked.write.write_text(json.dumps(found, indent=1))
    failed = [r for rows in found.values() for r in rows if r.get("failed")]
    sys.exit(1 if failed else 0)


def _arguments(part: str, asked: argparse.Namespace) -> list[Any]:
    from lib.kernel_cases import MODELS

    if part == "cases":
        each = -(-asked.cases // len(MODELS))
        return [{"model": i, "first": i * each, "last": min(asked.cases, (i + 1) * each)} for i in range(len(MODELS))]
    if part == "recompiles":
        # One model of each kernel.
        kernels = [m.kernel for m in MODELS]
        return [{"model": kernels.index(kernel)} for kernel in dict.fromkeys(kernels)]
    if part == "plans":
        return [{"file": str(asked.plans) if asked.plans else None}]
    if part == "nccl":
        file = str(asked.nccl_cases) if asked.nccl_cases else None
        checks = [name for name in asked.nccl_checks.split(",") if name]
        return [{"ranks": n, "file": file, "checks": checks} for n in (2, 4, 8)]
    return [{}]


def _in_processes(part: str, arguments: list[Any], patience: int) -> list[Any]:
    def run(argument: Any) -> Any:
        command = [sys.executable, __file__, "--part", part, "--argument", json.dumps(argument)]
        # Long parts print their progress on stderr; the others are quiet unless they fail.
        errors = None if part in ("nccl", "bench") else subprocess.PIPE
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, timeout=patience, check=False
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"no answer in {patience} s", "argument": argument}
        lines = [x[7:] for x in done.stdout.splitlines() if x.startswith("RESULT ")]
        if done.returncode or not lines:
            return {"failed": (done.stderr or "see above")[-1500:], "argument": argument}
        return json.loads(lines[-1])

    # Ranks that wait for each other take turns on the GPU, so running more of them at once would only take longer.
    with ThreadPoolExecutor(1 if part == "nccl" else 12) as pool:
        found = list(pool.map(run, arguments))
    return [row for answer in found for row in (answer if isinstance(answer, list) else [answer])]


def cases(argument: Any) -> Any:
    """Run random cases of one model."""
    from lib.kernel_cases import MODELS, check_cases

    worst = check_cases(MODELS[argument["model"]], range(argument["first"], argument["last"]))
    return {**asdict(worst.model), "cases": worst.cases, "failed": worst.failed, "error / allowed": worst.share}


def recompiled(argument: Any) -> Any:
    """Count the variants compiled by 100 random batches."""
    from lib.kernel_cases import MODELS, recompiles

    model = MODELS[argument["model"]]
    first, last = recompiles(model)
    return {"kernel": model.kernel, "variants": first, "after 100 batches": last, "failed": last - first}


def bench(argument: Any) -> Any:
    """Measure the rows of docs/results/kernels.md: each workload with the contenders that are fast on it;
    printed at once.
    """
    from flexcp.measure.kernels import bench as b

    dense, sparse = ["cute", "op", "fa4", "cudnn"], ["cute", "op", "fa4", "flex", "flexfa4"]
    rows = [("causal", 4_096, dense), ("full", 8_192, dense), ("causal", 16_384, dense), ("full", 16_384, dense)]
    rows += [("window", 16_384, dense), ("docs16", 16_384, dense), ("causal", 65_536, dense), ("docs16", 65_536, dense)]
    rows += [(name, 16_384, sparse) for name in ("docs64", "lambda", "question", "blockwise")]
    product, results = b.matrix_rate(), []
    for name, tokens, contenders in rows:
        results += b.bench([name], tokens, b.Heads(), contenders, rounds=3)
        print(b.table(results[-len(contenders) :], product).splitlines()[-1], file=sys.stderr, flush=True)
    return [{"matrix product": product}, *(asdict(r) for r in results)]


def plan_work() -> dict[str, Any]:
    """Return work lists of real plans: slices by ``data/ranks/seed/rank/direction/number``;
    further arrays hold the other fields of a ``Listed``.
    """
    import flexcp
    from flexcp.data.lengths import draw_lengths
    from flexcp.executor.run.rank_program import rank_program
    from flexcp.measure.kernels.lists import program_lists

    made: dict[str, Any] = {}
    for data, ranks in DATA:
        planner = flexcp.Planner(32, 8, 128, cluster=flexcp.cluster("h100", ranks // 8, 8))
        for seed in range(PACKS):
            plan = planner(draw_lengths(data, TOKENS_PER_RANK * ranks, seed))
            for rank in range(0, ranks, ranks // RANKS_TIMED):
                for direction in (0, 1):
                    slots = program_lists(rank_program(plan, rank, 0, bool(direction)), bool(direction))
                    for number, x in enumerate(x for lists in slots for x in lists):
                        key = f"{data}/{ranks}/{seed}/{rank}/{direction}/{number}"
                        made[key] = x.slices
                        made[key + "/shape"] = np.array([getattr(x, name) for name in SIZES])
                        if x.begins is not None:
                            made[key + "/begins"], made[key + "/finishes"] = x.begins, x.finishes
    return made


def plans(argument: Any) -> Any:
    """Measure the TFLOP/s of a rank's stages together against the kernel's rate on one full square, in turns,
    and the limit by tiles alone.
    """
    import torch

    from flexcp.executor.kernels.choose import choose_kernel
    from flexcp.measure.kernels import bench as b
    from flexcp.measure.kernels.lists import work_rate
    from flexcp.measure.kernels.work import workload

    made = dict(np.load(argument["file"])) if argument["file"] else plan_work()
    device = torch.device("cuda", 0)
    kernel = choose_kernel(device, torch.bfloat16, 128).kernel
    square, heads = workload("full", TOKENS_PER_RANK), b.Heads()
    calls = b.our_calls(kernel, square.slices(), b.random_tensors(square.tokens, heads, device), heads)
    flops = heads.flops(square.pairs()) / 1e9
    rows = []
    for data, ranks in DATA:
        row: dict[str, Any] = {"data": data, "ranks": ranks, "kernel": kernel}
        for backward, way in enumerate(("forward", "backward")):
            dense, worth = getattr(calls, way), flops * (b.BACKWARD if backward else 1.0)
            found = []
            for seed in range(PACKS):
                for rank in range(0, ranks, ranks // RANKS_TIMED):
                    lists = rank_lists(made, f"{data}/{ranks}/{seed}/{rank}/{backward}/")
                    rate, tiles, ms = work_rate(kernel, lists, bool(backward), dense, rounds=2)
                    found.append((rate, worth / ms, tiles))
            rate, square_rate, tiles = np.mean(found, axis=0)
            row |= {"samples": len(found), way: rate, f"dense {way}": square_rate, f"tiles allow {way}": tiles}
            row[f"{way} share"] = float(np.mean([rate / dense for rate, dense, _ in found]))
        rows.append(row)
    return rows


def rank_lists(made: dict[str, Any], prefix: str) -> list[Any]:
    """Return a rank's work lists of one direction, as :class:`flexcp.measure.kernels.lists.Listed`."""
    from flexcp.measure.kernels.lists import Listed

    keys = sorted(
        (k for k in made if k.startswith(prefix) and k.split("/")[-1].isdigit()), key=lambda k: int(k.split("/")[-1])
    )
    return [
        Listed(
            made[k],
            **dict(zip(SIZES, made[k + "/shape"].tolist(), strict=True)),
            **{name: made.get(f"{k}/{name}") for name in ("begins", "finishes")},
        )
        for k in keys
    ]


def margin(argument: Any) -> Any:
    """Measure attention with some multiprocessors left free, and a copy of few blocks beside it."""
    from flexcp.measure.kernels.margin import margin_table

    return margin_table()


def nccl(argument: Any) -> Any:
    """Run the checks on real NCCL ranks that share the GPU: correct and reproducible results, and no waiting host."""
    from lib.nccl_checks import run_all

    # The file was written by --make-nccl-cases, by the same user, so unpickling it is safe.
    cases = pickle.loads(Path(argument["file"]).read_bytes()) if argument["file"] else None
    return run_all(argument["ranks"], cases=cases, checks=argument["checks"])


PARTS: dict[str, Callable[[Any], Any]] = {
    "cases": cases,
    "recompiles": recompiled,
    "bench": bench,
    "plans": plans,
    "margin": margin,
    "nccl": nccl,
}


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "src"))
    main()
