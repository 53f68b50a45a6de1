"""Lists the tests that ``make test`` leaves out because a shorter test shows the same with other values.

``make test-all`` (``pytest --long``) runs everything. Names are node ids without ``tests/``. Of sampled tests the first
case is kept and every n-th after it. Tests were chosen by their CPU seconds on two slow cores.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

LEFT_OUT = (
    # Another test of the same file compiles a model, under more conditions.
    "frameworks/test_parallelisms.py::test_a_whole_model_compiles_without_a_graph_break",
    "frameworks/test_averaging.py::test_a_hugging_face_loss_is_said_where_it_is_trained_on[DDP, compiled]",
    # The Hugging Face Trainer's own resume test stays; these test the same under other trainers. make trainers runs
    # them too.
    "frameworks/test_trainer_resumes.py::",
    "frameworks/test_torchtitan.py::test_torchtitans_trainer_trains_the_same_model",
    "frameworks/test_trainer_examples.py::test_a_trainer_logs_what_one_process_does[torchtitan_pretrain]",
    # The Hugging Face Trainer, TRL's SFT, the RL loop, Lightning and Megatron stay. make trainers runs all.
    "frameworks/test_trainer_examples.py::test_a_trainer_logs_what_one_process_does[trl_dpo]",
    "frameworks/test_trainer_examples.py::test_a_trainer_logs_what_one_process_does[trl_grpo]",
    # CP2 x TP2 and CP2 x PP2 stay. make trainers runs all.
    "frameworks/test_megatron.py::test_five_steps_equal_stock_megatron[CP4]",
    # That every adapter is imported by its name stays, and so do the tests that train with this adapter.
    "test_imports.py::test_rooms_and_their_modules_are_attributes_without_an_import_of_their_own[True]",
    # The same command in this process stays, and other commands as installed.
    "cli/test_cli.py::test_installed_verify_passes_on_two_ranks",
    # Ctrl-C before (while the ranks' server imports) and after (while ranks run) stays. make faults runs all.
    "cli/test_interrupt.py::test_an_interrupted_command_leaves_nothing_behind[while ranks are made]",
    # 1, 2, 3, 4, 5 and 8 ranks stay. make verify-all runs all, with every strategy, mask and cluster.
    "benchmarks/test_matrix.py::test_the_chosen_half_on_ranks[6]",
    "benchmarks/test_matrix.py::test_the_chosen_half_on_ranks[7]",
)

ONE_IN = {
    "arrays/test_jit.py::test_what_others_may_have_written_is_never_executed": 3,
    "data/test_loader.py::test_the_union_of_all_ranks_is_the_batch": 2,
    "data/test_resume.py::test_a_killed_run_ends_with_the_same_samples_and_losses": 2,
    "executor/exchange/test_arena.py::test_layers_and_steps_share_one_arena": 2,
    "executor/exchange/test_arena.py::test_planned_memory_is_what_is_allocated_and_touched": 2,
    "executor/exchange/test_transports.py::test_calls_of_few_rounds_give_the_same_results_and_bytes_as_one_call": 2,
    "executor/exchange/test_transports.py::test_delays_change_no_bit": 2,
    "frameworks/test_elastic_restart.py::test_a_checkpoint_is_resumed_on_another_number_of_ranks": 2,
    "frameworks/test_huggingface_training.py::test_losses_and_gradients_are_those_of_one_process": 3,
    "frameworks/test_multimodal.py::test_two_plans_equal_one_process": 2,
    "frameworks/test_parallelisms.py::test_heads_split_over_another_mesh_axis": 2,
    "frameworks/test_qwen_vl.py::test_two_plans_equal_the_stock_model": 3,
    "fuzz/test_plans.py::test_random_cases_pass": 2,
    "measure/kernels/test_kernel_work.py::test_slices_and_mask_mod_agree": 3,
    "models/test_families.py::test_a_file_is_read_as_transformers_reads_it_or_refused": 3,
    "models/test_text_parts.py::test_a_text_model_is_read_as_transformers_reads_it": 2,
    "models/test_text_parts.py::"
    "test_of_two_that_say_whether_matrices_are_tied_the_one_counts_that_counts_for_transformers": 2,
    "plan/test_check.py::test_a_broken_transfer_is_caught": 2,
    "plan/test_check.py::test_a_cell_outside_every_range_is_caught": 2,
    "plan/test_rounds.py::test_rounds_of_real_plans": 3,
    "planners/hypergraph/test_hypergraph.py::test_yardstick_keeps_both_balances_and_moves_no_more_than_blocks": 2,
    "planners/test_published_dcp.py::test_moves_what_its_hypergraph_says": 2,
    "report/test_browser.py::test_names_of_strategies_are_drawn_whole": 2,
    "simulator/test_slot_work.py::test_work_is_the_executors": 3,
    "test_imports.py::test_planning_never_loads_torch": 2,
    "test_planner.py::test_hashes_are_the_same_in_another_process": 2,
}


def long_among(names: Iterable[str]) -> set[str]:
    """Return those of the node ids ``names``, in the order of collection, that are left out."""
    seen, found = Counter[str](), set[str]()
    for name in names:
        short = name.removeprefix("tests/")
        function = short.partition("[")[0]
        if short.startswith(LEFT_OUT) or seen[function] % ONE_IN.get(function, 1):
            found.add(name)
        seen[function] += 1
    return found
