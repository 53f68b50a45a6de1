"""The areas of ``benchmarks/mutants.py``: the sources it changes and the tests that belong to them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Area:
    """Source and test files of an area, relative to the root of the checkout."""

    sources: tuple[str, ...]
    tests: tuple[str, ...]


def _area(folder: str, sources: str, tests: str) -> Area:
    return Area(
        tuple(f"src/flexcp/{folder}/{name}.py" for name in sources.split()),
        tuple(f"tests/{name}.py" for name in tests.split()),
    )


AREAS = {
    "masks": _area(
        "masks",
        "named slices tree conversions mask",
        "masks/test_named masks/test_masks masks/test_masks_extremes masks/test_nested masks/test_tree "
        "fuzz/test_references",
    ),
    "planners": _area(
        "planners",
        "token_runs microbatch static/static static/dealing groups/groups groups/rows blocks/blocks auto/auto",
        "planners/test_token_runs planners/test_microbatch planners/test_dealing test_planner planners/test_strategies "
        "planners/test_auto planners/test_request planners/groups/test_groups planners/blocks/test_blocks "
        "fuzz/test_plans",
    ),
    "schedule": _area(
        "schedule",
        "work needs routes stages transfers",
        "schedule/test_routes schedule/test_stages schedule/test_transfers schedule/test_execution "
        "schedule/test_thin_ends schedule/test_inside_first schedule/test_predict simulator/test_slot_work "
        "test_planner fuzz/test_plans",
    ),
    "exchange": _area(
        "executor",
        "exchange/transports exchange/arena exchange/plan_agreement run/packing run/message_layout run/rank_program",
        "executor/run/test_in_memory executor/run/test_packing executor/run/test_rank_recipe "
        "executor/run/test_rank_program "
        "executor/run/test_one_machine executor/exchange/test_plan_agreement executor/exchange/test_transports "
        "executor/exchange/test_arena plan/test_slots executor/test_edges",
    ),
    "merge": _area(
        "executor/kernels",
        "__init__ cpu",
        "executor/kernels/test_kernels executor/run/test_in_memory executor/test_edges",
    ),
    "backward": _area(
        "executor",
        "kernels/sinks_and_delta run/executor run/one_device",
        "executor/kernels/test_sinks_and_delta executor/run/test_one_device executor/run/test_in_memory "
        "executor/run/test_one_machine executor/run/test_open_dq executor/run/test_finished_rows executor/test_edges "
        "executor/test_attention",
    ),
    "loader": _area(
        "data",
        "documents order loader reading/row_sharing reading/read_source reading/streams local_batch",
        "data/test_rows_of_a_rank data/test_state data/test_loader data/test_micro_batches data/test_grouped_samples "
        "data/test_failing_reads data/test_speeds",
    ),
    "report": _area(
        "report",
        "plan_data page markup plan_time timeline",
        "report/test_page report/test_plan_time report/test_timeline report/test_markup report/test_rounds_table "
        "report/test_training_table fuzz/test_report_check",
    ),
}
