"""Tests of Llama 4's layers in one process: some attend in chunks, others scale queries by a temperature that depends
on the position in the document. test_leaks.py runs them on ranks.
"""

from __future__ import annotations

import pytest
import torch
from leak_runs import LENGTHS, documents, logits_alone, made

import flexcp
from flexcp.frameworks import huggingface
from flexcp.frameworks.llama4_temperature import retuned

STREAM = torch.cat(documents())


def test_masks_are_those_of_the_layers() -> None:
    config = made("llama4").config
    assert huggingface.masks(config) == {"full": (flexcp.causal(), 1), "chunks of 8": (flexcp.masks.chunked(8), 1)}
    with pytest.raises(NotImplementedError, match=r"chunks of 8 tokens, which are not defined on trees"):
        huggingface.masks(config, flexcp.tree([-1, 0, 0], [4, 3, 2]))


def test_packed_documents_are_attended_alone() -> None:
    """This holds although Llama 4 does not pass positions, by which documents are told apart, on to its layers."""
    model = made("llama4")
    huggingface.turn_on(model)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    with torch.no_grad():
        packed = model(STREAM[None], position_ids=positions[None], use_cache=False).logits[0]
    torch.testing.assert_close(packed, logits_alone("llama4"), atol=1e-5, rtol=1e-5)


def test_a_plan_without_the_chunks_is_refused() -> None:
    model = made("llama4")
    huggingface.turn_on(model)
    planner = huggingface.planner(model, flexcp.cluster("cpu", 1, 1), strategy="dp")
    for masks in (
        {"full": (flexcp.causal(), 2)},
        {"full": (flexcp.causal(), 1), "chunks of 4": (flexcp.masks.chunked(4), 1)},
    ):
        step = flexcp.bind(planner(LENGTHS, masks=masks))
        with torch.no_grad(), pytest.raises(ValueError, match=r"no mask named 'chunks of 8' .*masks\(model\.config\)"):
            model(**huggingface.inputs(STREAM, step))


def test_the_temperature_is_that_of_the_place_in_the_document() -> None:
    layer = made("llama4").model.layers[1].self_attn
    q = torch.ones(6, 2, 4, dtype=torch.float64)
    assert retuned(layer, q, 6, torch.arange(6)) is q
    found = retuned(layer, q, 6, torch.tensor([0, 1, 2, 8, 0, 1]))
    scale = torch.log1p(torch.tensor([0.0, 0, 0, 2, 0, 0])) + 1
    counted = torch.log1p(torch.tensor([0.0, 0, 0, 1, 1, 1])) + 1
    torch.testing.assert_close(found[:, 0, 0], (scale / counted).double())
