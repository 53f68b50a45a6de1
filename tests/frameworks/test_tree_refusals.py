"""Tests that adapters which take one label for each row refuse a tree, whose rows may have several next tokens, and
name the calls that work: pipelines, shared batches (torchtitan, the Trainer) and Megatron.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import flexcp
from flexcp.frameworks.pipeline import PlannedMicroBatches
from flexcp.frameworks.shared_batch import share
from flexcp.measure.ranks import RankPool

TREE = flexcp.tree([-1, 0, 0], [4, 2, 3])
WAY_OUT = r"take step\.edges\(tokens\), .*step\.loss\(logits, edges\) or step\.log_probs\(logits, edges\)"


def planner(ranks: int = 1) -> flexcp.Planner:
    return flexcp.Planner(
        4, 2, 8, dtype="float64", cluster=flexcp.cluster("cpu", 1, ranks), strategy="blocks", max_tokens_per_rank=9
    )


@pytest.mark.parametrize("call", ["loss", "labels"])
def test_a_pipeline_refuses_labels_of_a_tree(call: str) -> None:
    batches = PlannedMicroBatches(planner().micro_batches([9], TREE, tokens="equal"))
    documents = [torch.arange(9)]
    assert batches.shard(documents).shape == (1, 9)
    with pytest.raises(NotImplementedError, match=f"document 0 branches .*{WAY_OUT}"):
        getattr(batches, call)(documents)


def shared_tree(group: dist.ProcessGroup) -> str:
    tokens = torch.arange(9)
    try:
        share(tokens, tokens, [9], planner(2), group, mask=TREE)
    except NotImplementedError as error:
        return str(error)
    return ""


def test_a_shared_batch_refuses_a_tree_on_every_rank(pool: RankPool) -> None:
    for said in pool.run(shared_tree, ranks=2):
        assert "document 0 branches" in said and "step.edges(tokens)" in said


def megatron_tree(group: dist.ProcessGroup) -> str:
    from megatron.core.transformer import TransformerConfig

    from flexcp.frameworks import megatron as flex

    usual: dict[str, Any] = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2}
    config = TransformerConfig(**usual, calculate_per_token_loss=True, attention_dropout=0.0)
    made = flex.planner(config, flexcp.cluster("cpu", 1, 2), strategy="blocks")
    try:
        flex.micro_batch([torch.arange(9)], made, config, group, mask=TREE)
    except NotImplementedError as error:
        return str(error)
    return ""


def test_a_megatron_micro_batch_refuses_a_tree(pool: RankPool) -> None:
    pytest.importorskip("megatron.core")
    for said in pool.run(megatron_tree, ranks=2):
        assert "document 0 branches" in said and "step.edges(tokens)" in said
