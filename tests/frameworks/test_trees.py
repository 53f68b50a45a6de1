"""Tests of trees end to end: losses, log-probabilities and gradients of tiny models on real ranks are those of
independent sequences.

Results agree to 1e-9 in float64, also with windows along the path, and the bytes sent are those planned. A planted
mistake in positions, edges or weights is detected. ``benchmarks/trees.py`` does the same for larger trees and all
strategies.
"""

from __future__ import annotations

import pytest
import torch

import flexcp
from flexcp.frameworks import huggingface
from flexcp.measure.ranks import RankPool
from lib.model_runs import make_config
from lib.tree_runs import (
    TreeBatch,
    TreeSizes,
    independent_sequences,
    random_batch,
    tree_on_ranks,
    tree_plan,
    worst_error,
)

LIMIT = 1e-9


def error(pool: RankPool, batch: TreeBatch, strategy: str, ranks: int, planted: str = "") -> float:
    right = independent_sequences(batch)
    answers = pool.run(tree_on_ranks, batch, tree_plan(batch, strategy, ranks), planted, ranks=ranks)
    assert planted or all(found.bytes_as_planned for found in answers)
    return max(max(worst_error(found, right).values()) for found in answers)


@pytest.mark.parametrize(
    ("seed", "family", "strategy", "ranks"),
    [
        (0, "llama", "blocks", 1),
        (1, "llama", "blocks", 2),
        (2, "llama", "groups", 3),
        (3, "llama", "zigzag", 2),
        (4, "llama", "auto", 3),
        (5, "gemma2", "blocks", 2),
        (6, "mistral", "zigzag", 3),
    ],
)
def test_trees_on_ranks_are_independent_sequences(
    pool: RankPool, seed: int, family: str, strategy: str, ranks: int
) -> None:
    assert error(pool, random_batch(seed, TreeSizes(), family), strategy, ranks) < LIMIT


@pytest.mark.parametrize("planted", ["positions", "edges", "weights"])
def test_a_planted_mistake_shows(pool: RankPool, planted: str) -> None:
    assert error(pool, random_batch(0, TreeSizes()), "blocks", 2, planted) > 1e-4


def test_a_shared_question_is_trained_as_its_answers(pool: RankPool) -> None:
    tree = random_batch(0, TreeSizes())
    batch = TreeBatch(
        "llama",
        (([-1, 0, 0, 0], [6, 4, 1, 5], [1, 2, 3]),),
        torch.arange(16) * 3 % 64,
        torch.ones(3).double(),
        tree.masks,
    )
    batch = TreeBatch(
        batch.family, batch.documents, batch.tokens, batch.advantages, [torch.ones(len(p)) for p in batch.paths()]
    )
    assert batch.mask()[0].slices(16).tolist() == flexcp.masks.shared_question([4, 1, 5], 6).slices(16).tolist()
    assert error(pool, batch, "blocks", 3) < LIMIT


def test_window_layers_have_the_tree_in_their_window() -> None:
    tree = flexcp.tree([-1, 0, 0], [4, 2, 3])
    found = huggingface.masks(make_config("gemma2"), [tree, flexcp.causal()])
    assert found["full"][0] == [tree, flexcp.causal()]
    assert found["window"][0] == [flexcp.tree([-1, 0, 0], [4, 2, 3], left=6), flexcp.window(6)]
    with pytest.raises(NotImplementedError, match="a shared question is the tree of a question and its answers"):
        huggingface.masks(make_config("mistral"), flexcp.masks.shared_question([2, 3], 4))


def test_labels_beside_a_tree_are_refused_by_the_new_call() -> None:
    planner = huggingface.planner(make_config("llama"), flexcp.cluster("cpu", 1, 1), "float64", strategy="blocks")
    step = flexcp.bind(planner([9], masks=huggingface.masks(make_config("llama"), flexcp.tree([-1, 0, 0], [4, 2, 3]))))
    tokens = torch.arange(9)
    assert set(huggingface.inputs(tokens, step)) == {"input_ids", "position_ids", "step", "use_cache"}
    with pytest.raises(NotImplementedError, match=r"take step.edges\(tokens\)"):
        huggingface.inputs(tokens, step, labels=tokens)


def test_layers_that_read_in_order_are_refused_by_name() -> None:
    """LFM2 has convolutions besides attention, and Granite's hybrid has state space layers."""
    from transformers import AutoModelForCausalLM, GraniteMoeHybridConfig, Lfm2Config

    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    kinds = ["mamba", "attention"]
    configs = {
        "conv": Lfm2Config(**sizes, num_hidden_layers=2, layer_types=["conv", "full_attention"]),
        "mamba|linear_attention": GraniteMoeHybridConfig(
            **sizes,
            num_hidden_layers=2,
            layer_types=kinds,
            mamba_n_heads=4,
            mamba_d_head=16,
            mamba_d_state=8,
            num_local_experts=0,
        ),
    }
    tree = flexcp.tree([-1, 0, 0], [4, 2, 3])
    for words, config in configs.items():
        model = AutoModelForCausalLM.from_config(config)
        huggingface.turn_on(model, other_layers="handled")
        planner = huggingface.planner(config, flexcp.cluster("cpu", 1, 1), "float32", strategy="blocks")
        step = flexcp.bind(planner([9], tree))
        with pytest.raises(
            NotImplementedError,
            match=rf"{type(model).__name__} has layers of kind ({words}), which read tokens in the order",
        ):
            model(**huggingface.inputs(torch.arange(9), step))
    with pytest.raises(
        NotImplementedError, match=r"document 0 branches, and step.relayout is for layers that read tokens in the order"
    ):
        step.relayout(torch.zeros(9, 2))
