"""One call per stage against calls of few rounds, measured over slow links:
the gain or cost of ``bind(rounds_per_call=...)`` on gloo.

    sudo python benchmarks/rounds.py --nodes 4 --ranks 2 --mbit 400

Ranks are network namespaces (benchmarks/lib/box.py), and the kernel does nothing, so a step is its communication,
packing and reductions. Times are milliseconds of the slowest rank in the fastest of ``--repeats``, forward and
backward. Needs root and iproute2; skips without them.
"""

from __future__ import annotations

from box_options import box_cluster, box_parser, parsed
from flexcp.data.lengths import parse_lengths
from flexcp.executor.exchange.rank_calls import CallSettings, rank_calls
from flexcp.plan.plan import Plan
from flexcp.planner import Planner
from flexcp.planners.strategies import split_names
from lib.box import Box
from lib.step_time import slowest_ms, time_steps

CALLS = (None, 1, 4, 16)


def main() -> None:
    """Measure and print a table."""
    parser = box_parser(__doc__, nodes=4, mbit=400, repeats=5)
    parser.add_argument("--lengths", default="4096,512,1024,256,350,150,750,48,1000")
    parser.add_argument("--strategies", default="blocks,allgather,zigzag")
    asked = parsed(parser)
    if asked is None:
        return
    machine = box_cluster(asked, 20_000)
    print("| strategy | MB | rounds per call | calls in a stage, at most | ms |")
    print("| --- " * 5 + "|")
    with Box(asked.nodes, asked.ranks) as box:
        box.network.limit(asked.mbit)
        for strategy in split_names(asked.strategies):
            planner = Planner(8, 8, 64, dtype="float32", cluster=machine, strategy=strategy)
            plan = planner(parse_lengths(asked.lengths))
            moved = (plan.bytes().sum() + plan.bytes(backward=True).sum()) / 1e6
            for each in CALLS:
                calls = _most_calls(plan, each)
                ms = slowest_ms(box.run(time_steps, plan, "communication", asked.repeats, None, False, each))
                print(f"| {strategy} | {moved:.1f} | {each or 'all'} | {calls} | {ms:.0f} |", flush=True)


def _most_calls(plan: Plan, rounds_per_call: int | None) -> int:
    how = CallSettings(rounds_per_call)  # computes the rounds here, so that no rank has to
    found = [rank_calls(plan, r, 0, backward, how) for r in range(plan.ranks) for backward in (False, True)]
    return max(len(calls) for stages in found for calls in stages)


if __name__ == "__main__":
    main()
