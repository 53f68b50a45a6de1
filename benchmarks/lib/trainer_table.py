"""The table of trainers: what each one is, how many lines change,
and which test shows each feature that works or is refused.

No feature counts as working without a test. ``benchmarks/trainers.py`` runs the tests and writes the table; a test of
the docs compares the page with this file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import unified_diff
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = "tests/frameworks"
COLUMNS = ("packing", "windows", "FSDP2", "TP", "PP", "recompute", "compile", "resume", "evaluation")
UNTESTED, WORKS, REFUSED, FAILED = "untested", "yes", "refused", "FAILED"

EXAMPLES = "test_trainer_examples.py::test_a_trainer_logs_what_one_process_does"
TRAINER = "test_huggingface_trainer.py::test_the_trainer_trains_as_without_flexcp"
REFUSALS = "test_huggingface_trainer.py::test_what_would_make_another_loss_is_refused"
TITAN = "test_torchtitan.py::test_torchtitans_trainer_trains_the_same_model"
TITAN_WINDOWS = "test_torchtitan.py::test_gpt_oss_has_its_windows_and_sinks"
TITAN_REFUSALS = "test_torchtitan.py::test_what_torchtitan_would_do_otherwise_is_refused"
RESUMES = "test_trainer_resumes.py::test_a_run_goes_on_in_the_middle_of_an_epoch"
LEAKS = "test_leaks.py::test_a_changed_document_changes_its_own_positions_alone"
MEGATRON = "test_megatron.py::test_five_steps_equal_stock_megatron"
AXOLOTL = "test_axolotl.py::test_the_plugin_logs_what_one_process_does"


@dataclass(frozen=True)
class Trainer:
    """A row of the table: for each column the test that shows that it works or is refused, and further remarks."""

    name: str
    package: str
    where: str
    """A link to a page, or the name of an example that has a version without flexcp."""
    works: Mapping[str, str]
    refuses: Mapping[str, str]
    else_refused: str
    environment: str = ".venv"
    """The virtual environment with the package, in which its tests run."""
    version: str = ""
    """Of the package, where it is installed in another environment than this one."""

    @property
    def tests(self) -> set[str]:
        """All tests of this row."""
        return {*self.works.values(), *self.refuses.values()}


TRAINERS = (
    Trainer(
        "Transformers `Trainer`",
        "transformers",
        "trainer",
        {
            "packing": TRAINER,
            "windows": TRAINER,
            "evaluation": EXAMPLES,
            "FSDP2": "test_huggingface_trainer.py::test_under_fsdp2_the_trainer_trains_as_under_ddp",
            "resume": "test_huggingface_trainer.py::test_a_run_goes_on_in_the_middle_of_an_epoch",
        },
        {"TP": REFUSALS},
        "`cp_size` and `sp_size` above 1, `average_tokens_across_devices=False`",
    ),
    Trainer(
        "TRL `SFTTrainer`",
        "trl",
        "trl_sft",
        {"packing": EXAMPLES, "resume": RESUMES, "evaluation": EXAMPLES},
        {"TP": REFUSALS},
        "packing without positions, images, prompt learning",
    ),
    Trainer(
        "TRL `DPOTrainer`",
        "trl",
        "trl_dpo",
        {"resume": RESUMES, "evaluation": EXAMPLES},
        {"TP": REFUSALS},
        "images",
    ),
    Trainer("TRL `GRPOTrainer`", "trl", "trl_grpo", {"resume": RESUMES}, {"TP": REFUSALS}, "continuous batching"),
    Trainer(
        "Lightning",
        "lightning",
        "lightning_fsdp2",
        {"packing": EXAMPLES, "FSDP2": EXAMPLES, "resume": RESUMES, "evaluation": EXAMPLES},
        {},
        "",
    ),
    Trainer(
        "axolotl",
        "axolotl",
        "axolotl_sft",
        {"packing": AXOLOTL, "evaluation": AXOLOTL},
        {},
        "",
        environment=".venv-axolotl",
        version="0.19.0",
    ),
    Trainer("an RL loop of your own", "torch", "rl_loop", {"packing": EXAMPLES}, {}, "a rank without any rollout"),
    Trainer(
        "torchtitan",
        "torchtitan",
        "torchtitan_pretrain",
        {**dict.fromkeys(("packing", "FSDP2", "recompute", "resume"), TITAN), "windows": TITAN_WINDOWS},
        dict.fromkeys(("PP", "evaluation"), TITAN_REFUSALS),
        "`context_parallel_degree` above 1",
    ),
    Trainer(
        "Megatron-Core",
        "megatron-core",
        "megatron_pretrain",
        {
            "packing": MEGATRON,
            "TP": MEGATRON,
            "evaluation": EXAMPLES,
            "windows": "test_megatron.py::test_what_a_layer_may_be_is_honoured",
            "PP": "test_pipeline.py::test_megatron_stages_of_one_shape_equal_stock_megatron",
            "resume": "test_trainer_resumes.py::test_megatron_goes_on_from_its_distributed_checkpoint",
        },
        {},
        "[its limits](frameworks.md#megatron-core-not-supported)",
    ),
    Trainer(
        "a loop of your own",
        "transformers",
        "[its section](frameworks.md#hugging-face-transformers)",
        {
            "packing": LEAKS,
            "windows": LEAKS,
            "FSDP2": "test_parallelisms.py::test_fsdp2_with_other_token_counts_on_every_rank",
            "TP": "test_parallelisms.py::test_heads_split_over_another_mesh_axis",
            "PP": "test_pipeline.py::test_two_stages_equal_one_process",
            "recompute": "test_parallelisms.py::test_full_recompute_runs_attention_again",
            "compile": "test_parallelisms.py::test_a_whole_model_compiles_without_a_graph_break",
            "resume": "test_elastic_restart.py::test_a_checkpoint_is_resumed_on_another_number_of_ranks",
            "evaluation": "test_parallelisms.py::test_evaluation_under_another_plan_between_training_steps",
        },
        {},
        "attention dropout, padding masks, 4-D masks",
    ),
)


def example_file(name: str) -> Path | None:
    """Return the example of this name, a script or a file of settings; None where there is none."""
    folder = ROOT / "examples"
    return next((path for path in (folder / f"{name}.py", folder / f"{name}.yaml") if path.exists()), None)


def added_lines(example: str) -> list[str]:
    """Return the lines that a trainer's example has in addition to its version without flexcp,
    without the module docstring or the comment at its head.
    """
    old, new = (_program(f"{example}{twin}") for twin in ("_plain", ""))
    return [line for line in unified_diff(old, new, n=0) if line[0] == "+" and line[1:].strip() and line[:3] != "+++"]


def _program(name: str) -> list[str]:
    """Return the lines of an example after the words at its head."""
    file = example_file(name)
    assert file is not None, name
    text = file.read_text()
    lines = text[text.index("from __future__") :].splitlines() if file.suffix == ".py" else text.splitlines()
    return [line for line in lines if file.suffix == ".py" or line[:1] != "#"]


def table(failed: Collection[str] = ()) -> str:
    """Return the table; a cell whose test is in ``failed`` says so."""
    head = ("trainer", "tested with", "how", "lines to change", *COLUMNS, "refused besides")
    rows = [_row(trainer, failed) for trainer in TRAINERS]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ("---",) * len(head), *rows))


def _row(trainer: Trainer, failed: Collection[str]) -> tuple[str, ...]:
    example = example_file(trainer.where)
    how = f"`examples/{example.name}`" if example else trainer.where
    lines = str(len(added_lines(trainer.where))) if example else ""
    tested = f"{trainer.package} {trainer.version or version(trainer.package).partition('+')[0]}"
    cells = (_cell(trainer, column, failed) for column in COLUMNS)
    return (trainer.name, tested, how, lines, *cells, trainer.else_refused)


def _cell(trainer: Trainer, column: str, failed: Collection[str]) -> str:
    test = trainer.works.get(column, trainer.refuses.get(column))
    if test is None:
        return UNTESTED
    return FAILED if test in failed else WORKS if column in trainer.works else REFUSED
