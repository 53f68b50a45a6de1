"""The closed form by which ``auto`` compares placements (flexcp/schedule/predict.py) against the event simulator,
on whole steps.

    python benchmarks/closed_form.py

Both use the same cost model without contention, so the differences come from the form: ranks that wait for each other's
work, and ports that several stages or ranks need at once. Prints every case and the errors by strategy; then attention
alone in DCP's setting (dcp.py), where the network is slow and no other layer hides it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import dcp
from flexcp.clusters import cluster
from flexcp.data.lengths import draw_lengths
from flexcp.masks import causal
from flexcp.measure.calibrate.fit import errors
from flexcp.models.find import find_model
from flexcp.planner import Planner
from flexcp.schedule.predict import predict
from flexcp.simulator.passes import Rules
from flexcp.simulator.step_parts import Training
from flexcp.simulator.training import simulate
from simulated import STATIC, scaled_lengths

CASES = (
    ("blocks", "priced"),
    ("blocks", "equal"),
    ("groups", "priced"),
    ("zigzag:8", "priced"),
    ("minheap", "priced"),
    ("usp", "priced"),
)
LENGTHS = ("web", "libra256k", "longtail", "libra1m", "video", "bimodal")


def main() -> None:
    """Print the tables."""
    preset = find_model("llama3-8b")
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    print(
        "| lengths | nodes | strategy | tokens | events ms | closed form / events |\n| --- | --- | --- | --- | --- | "
        "--- |"
    )
    for lengths in LENGTHS:
        for nodes in (1, 4):
            machine = cluster("h100", nodes, 8)
            batch = draw_lengths(lengths, 8192 * machine.ranks, 0)
            for strategy, tokens in CASES:
                planner = Planner(32, 8, cluster=machine, strategy=strategy, model=preset.model)
                plan = planner(batch, masks={"all": (causal(), preset.model.layers)}, tokens=tokens)
                step = simulate(plan, rules=Rules(contention=False), training=Training(preset, "none")).step
                assert step is not None
                head = plan.cost.vocabulary_ns(
                    plan.placement.tokens, preset.head_flops_per_token, plan.shape, machine
                ).max()
                events = step.total_ns - int(head)
                short = predict(plan.placement, plan.shape, machine, plan.cost).total_ns
                for name in (f"{strategy}, {tokens}", "all"):
                    found[name].append((short, events))
                print(
                    f"| {lengths} | {nodes} | {strategy} | {tokens} | {events / 1e6:.0f} | {short / events:.3f} |",
                    flush=True,
                )
    by_strategy(found)
    attention_alone()


def attention_alone() -> None:
    """Print closed form over events for attention, forward and backward,
    on 4x8 A100 with a network port for each rank.
    """
    print("\n| mask | lengths | strategy | events ms | closed form / events |\n| --- | --- | --- | --- | --- |")
    where = replace(dcp.MICRO, rules=Rules(contention=False))
    for mask, rule in dcp.MASKS.items():
        for lengths, scale in (("longalign", 1.0), ("longtail", 4.0)):
            batch = scaled_lengths(lengths, dcp.TOKENS, scale, 0)
            for row in where.compare(batch, ("blocks", "groups", *STATIC), rule).ran:
                assert row.prediction is not None
                share = row.prediction.total_ns / row.ns
                print(f"| {mask} | {lengths} x {scale:g} | {row.name} | {row.ns / 1e6:.2f} | {share:.3f} |", flush=True)


def by_strategy(found: dict[str, list[tuple[float, float]]]) -> None:
    """Print the errors of each strategy."""
    print("\n| strategy | median error | 90th percentile | worst |\n| --- | --- | --- | --- |")
    for name, pairs in found.items():
        e = errors([p for p, _ in pairs], [m for _, m in pairs])
        print(f"| {name} | {e.median:.1%} | {e.p90:.1%} | {e.worst:.1%} |")


if __name__ == "__main__":
    main()
