"""Tests that the examples run: each on two real ranks with tiny sizes, with a loss that falls, or equals that of one
process.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

import pytest
import torch
from example_runs import EXAMPLES, loaded, printed
from torch import Tensor

from flexcp.measure.ranks import RankPool


def losses(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"loss ([\d.]+)", text)]


Printed = Callable[[str], list[str]]


@pytest.fixture(scope="module")
def said(two: RankPool) -> Printed:
    """A function that returns what each rank prints in four steps of an example, which it runs once."""
    return cache(lambda name: two.run(printed, name, ["--steps", "4", "--tokens", "256"]))


@pytest.mark.parametrize("name", ["attention_swap", "fsdp2_pretrain", "huggingface_ddp"])
def test_an_example_trains(said: Printed, name: str) -> None:
    first, second = said(name)
    found = losses(first)
    assert len(found) == 4
    assert min(found[1:]) < found[0]
    assert second == "", "only the first rank talks"


def test_the_loader_example_trains(two: RankPool) -> None:
    text, _ = two.run(printed, "finetune_with_loader", ["--tokens", "1024", "--budget", "256"])
    assert len(losses(text)) >= 2


@pytest.mark.parametrize("task", ["grpo", "dpo", "agent"])
def test_trees_give_the_loss_and_gradient_of_separate_sequences(two: RankPool, task: str) -> None:
    text, _ = two.run(printed, "tree_rollouts", ["--task", task])
    tokens, loss, norm = (
        re.findall(pattern, text) for pattern in (r"(\d+) tokens", r"loss (-?[\d.]+)", r"gradient ([\d.]+)")
    )
    assert int(tokens[1]) < 0.6 * int(tokens[0])
    assert float(loss[1]) == pytest.approx(float(loss[0]), abs=1e-7)
    assert float(norm[1]) == pytest.approx(float(norm[0]), abs=1e-7)


def test_the_swap_trains_as_one_process(said: Printed) -> None:
    """The example's model, trained on one process with plain attention, has the same losses and gradient norms as the
    example under DDP.
    """
    example = loaded("attention_swap")
    torch.manual_seed(0)
    model = example.Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    expected = []
    for number in range(3):
        lengths, stream = example.documents(number, 256)
        labels = stream.roll(-1).index_fill(0, torch.tensor(lengths).cumsum(0) - 1, -100)
        seen = torch.block_diag(*[torch.ones(n, n).tril() for n in lengths]).bool()

        def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor = seen) -> Tensor:
            heads = (x.transpose(0, 1)[None] for x in (q, k, v))
            out = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=seen, enable_gqa=True)
            return out[0].transpose(0, 1)

        logits = model(stream, torch.cat([torch.arange(n) for n in lengths]), attend)
        loss = torch.nn.functional.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        expected += [float(loss.detach()), float(norm)]
    found = [float(x) for x in re.findall(r"(?:loss|norm) ([\d.]+)", said("attention_swap")[0])]
    assert found[:6] == pytest.approx(expected, rel=1e-4)


def test_a_hugging_face_model_under_ddp_trains_as_one_process(said: Printed) -> None:
    """The reference is the example's model on one process with Transformers' attention, document by document."""
    example = loaded("huggingface_ddp")
    torch.manual_seed(0)
    model = example.AutoModelForCausalLM.from_config(example.CONFIG, attn_implementation="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    expected = []
    for number in range(2):
        lengths, stream = example.documents(number, 256)
        sums = [model(input_ids=part[None], labels=part[None]).loss * (len(part) - 1) for part in stream.split(lengths)]
        loss = torch.stack(sums).sum() / (256 - len(lengths))
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        expected += [float(loss.detach()), float(norm)]
    found = [float(x) for x in re.findall(r"(?:loss|norm) ([\d.]+)", said("huggingface_ddp")[0])]
    assert found[:4] == pytest.approx(expected, rel=1e-6)


def test_the_swap_is_the_attention_only_swap() -> None:
    """The README shows a fragment of this example, so all its flexcp calls must be in five lines marked "# new", with
    the contiguous layout.
    """
    text = (EXAMPLES / "attention_swap.py").read_text()
    assert 'layout="contiguous"' in text
    lines = text[text.index("def main") :].splitlines()
    assert [line for line in lines if "flexcp." in line or "planner" in line or "step." in line] == [
        line for line in lines if "# new" in line
    ]
    assert text.count("# new") == 5
    assert "flexcp" not in text[text.index("import flexcp") + len("import flexcp") : text.index("def main")]
