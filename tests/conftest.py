"""Shared fixtures: one pool of real ranks for the whole test session, because starting processes takes most of the
time.

Random examples are the same in every run, so that a passing checkout keeps passing; ``make properties`` looks for new
ones.

``make test`` gives whole files to three workers in the order of collection. The longest files come first, so that no
worker is left with one of them when the others are done. All workers and the processes they start compute with one
thread, because threads of many processes on two cores mostly wait for each other.

``make test`` leaves out the tests that long_tests.py names, so that it ends within a quarter of an hour on two cores;
``make test-all`` (``--long``) runs everything.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import pytest
import torch.distributed as dist
from hypothesis import settings

from flexcp.measure.ranks import RankPool
from long_tests import long_among

settings.register_profile("same", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("same")


LONGEST = [
    "test_browser.py",
    "test_campaign.py",
    "test_interrupt.py",
    "test_trainer_examples.py",
    "test_parallelisms.py",
    "test_averaging.py",
    "test_kernels_triton.py",
    "test_arena.py",
    "test_huggingface_trainer.py",
    "test_accept_command.py",
    "test_trust_gpu.py",
    "test_jit.py",
    "test_planning_pool.py",
    "test_check.py",
    "test_mutants.py",
    "test_matrix.py",
    "test_properties.py",
    "test_auto.py",
    "test_cli.py",
    "test_loader.py",
    "test_imports.py",
    "test_huggingface_training.py",
    "test_triton_attention.py",
    "test_accept_box.py",
    "test_megatron.py",
    "test_examples.py",
    "test_advise.py",
    "test_families.py",
    "test_failures.py",
    "test_transports.py",
    "test_huggingface.py",
    "test_code_blocks.py",
    "test_step.py",
    "test_commands.py",
    "test_communication.py",
    "test_hypergraph.py",
    "test_multimodal.py",
    "test_moe.py",
    "test_elastic_restart.py",
    "test_speeds.py",
    "test_accept.py",
    "test_plan_file.py",
]
"""Files that take more than about 15 seconds, in the order in which they run; no two test files have the same name."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="Run the tests that tests/long_tests.py leaves out, too.")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the longest files first, and leave out long tests unless ``--long`` is given."""
    if not config.getoption("--long"):
        long = long_among([item.nodeid for item in items])
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in long])
        items[:] = [item for item in items if item.nodeid not in long]
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Eight ranks on gloo; ``pool.run(function, ..., ranks=n)`` runs on the first n."""
    with RankPool(8) as ranks:
        # Groups of all sizes are made now, because one made later can hang: torch names groups by how many a rank has
        # made, and some tests make groups on some ranks only. Which tests ran before must not matter.
        for count in range(1, ranks.size):
            ranks.run(dist.get_world_size, ranks=count)
        yield ranks
        # Ranks end by themselves when their pipes are closed, so that make coverage can record what they ran.
        for pipe in ranks.pipes:
            pipe.close()
        for process in ranks.processes:
            process.join(5)
