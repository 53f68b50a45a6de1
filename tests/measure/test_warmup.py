"""Tests that after ``flexcp warmup`` no plan has to compile a loop."""

from __future__ import annotations

import json
import subprocess
import sys

PROCESS = """
import importlib, json, pathlib, random
import flexcp
from flexcp.measure.warmup import warm
from flexcp.plan.rounds import plan_rounds


def compiled():
    found, root = set(), pathlib.Path(flexcp.__file__).parent
    for file in root.rglob("compiled*.py"):
        module = ".".join(["flexcp", *file.relative_to(root).with_suffix("").parts])
        for name, loop in vars(importlib.import_module(module)).items():
            found |= {module + "." + name + str(signature) for signature in getattr(loop, "signatures", ())}
    return found


warm()
before, planned, draw = compiled(), 0, random.Random(0)
masks = [flexcp.causal(), flexcp.full(), flexcp.window(30, 0), flexcp.masks.lambda_(4, 60)]
masks += [flexcp.masks.shared_question(), flexcp.masks.causal_blockwise(32, 2), flexcp.masks.prefix(20)]
for _ in range(150):
    nodes, each = draw.choice([(1, 1), (1, 3), (1, 4), (2, 3), (4, 8), (3, 2)])
    ranks, lengths = nodes * each, [draw.randint(1, 3000) for _ in range(draw.randint(1, 12))]
    options = {
        "strategy": draw.choice(["blocks", "blocks", "auto", "groups"]),
        "compute_tolerance": draw.choice([None, 0.05]),
        "token_tolerance": draw.choice([None, 0.05]),
        "max_tokens_per_rank": draw.choice([None, None, -(-sum(lengths) // ranks) + 5]),
    }
    scattered = [list(range(r, sum(lengths), ranks)) for r in range(ranks)]
    call = draw.choice([{}, {"tokens": "equal"}, *({"layout": x} for x in ("zigzag", "contiguous", scattered))])
    call |= draw.choice(
        [
            {"mask": draw.choice(masks)},
            {"mask": [draw.choice(masks) for _ in lengths]},
            {"masks": {"a": (draw.choice(masks), 2), "b": (draw.choice(masks), 1)}},
        ]
    )
    where = flexcp.cluster("h100", nodes, each, draw.choice([None, [draw.choice([1, 0.8]) for _ in range(ranks)]]))
    try:
        plan = flexcp.Planner(*draw.choice([(8, 2), (8, 8), (4, 1)]), 16, cluster=where, **options)(lengths, **call)
        plan_rounds(plan.programs[0][0], plan.shape, where, draw.choice([None, 5000]))
        planned += 1
    except ValueError:
        pass  # these options do not go together
modules = sorted({name.split("(")[0].rpartition(".")[0] for name in before})
print(json.dumps({"before": modules, "planned": planned, "new": sorted(compiled() - before)}))
"""


def test_nothing_is_left_to_compile() -> None:
    """This runs in a process of its own, because other tests may have compiled loops in this one."""
    done = subprocess.run([sys.executable, "-c", PROCESS], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {
        "flexcp.planners.blocks.compiled_node",
        "flexcp.planners.blocks.compiled_even",
        "flexcp.plan.compiled_rounds",
    } <= set(found["before"])
    assert found["planned"] > 50
    assert found["new"] == []
