"""A 1B-class model on one GPU: flexcp, cuDNN, FlashAttention-4 and FlexAttention compared, and four NCCL ranks and one.

    python benchmarks/model_gpu.py --write model_gpu.json    # all parts; --only steps,packed,losses,ranks for some

- ``steps``: one rank, one long document, step time compared with the same model on cuDNN's attention and, if it is
  installed, on FlashAttention-4. Models take turns, so that all run at the same clocks.
- ``packed``: one rank, packed documents, step time compared with compiled FlexAttention; its block mask is made before
  the step, as plans are. (Transformers' own FlexAttention tunes for more than four minutes before the first step.)
- ``losses``: 200 steps of one long document each from the same weights, flexcp and cuDNN. The allowed difference is
  measured: the baseline is run twice.
- ``ranks``: a small model under FSDP2 on four NCCL ranks that share the GPU (each with its own ``NCCL_HOSTID``, over
  sockets: correct, not fast), 50 steps, compared with one process. That process is run twice, the second time with the
  documents of every step in the opposite order, so that only roundings differ.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from functools import partial
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flexcp
from flexcp.frameworks import fsdp, huggingface
from flexcp.train.documents import Documents
from flexcp.train.update import total_loss
from lib.nccl_ranks import on_nccl_ranks

SIZES: dict[str, dict[str, Any]] = {
    "1.4B, heads of 128": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "1.2B, heads of 64": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
    "small": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
}
VOCABULARY = 32_768
WORDS = 512
"""The number of different tokens: few, so that a loss falls within some hundred steps."""
SHORT, LONG = 16, 1
"""Divisors of the lengths of ``longtail`` for packed documents."""
FLEX = "benchmark_flex"
FA4 = "benchmark_fa4"
STATIC = "sdpa", FLEX, FA4


class Flex:
    """FlexAttention for Transformers, causal inside documents.
    Document numbers are in one tensor that is overwritten, so that it is compiled once.
    """

    def __init__(self) -> None:
        from torch.nn.attention.flex_attention import flex_attention
        from transformers import AttentionInterface, AttentionMaskInterface

        self.documents = torch.empty(0)
        self.seen: Any = None
        self._attend: Any = torch.compile(flex_attention, dynamic=False)
        AttentionInterface.register(FLEX, self._attention)
        AttentionMaskInterface.register(FLEX, lambda *_, **__: None)

    def block_mask(self, lengths: list[int], device: str) -> Any:
        """Return the mask of which blocks of the stream see which."""
        from torch.nn.attention.flex_attention import create_block_mask

        tokens = sum(lengths)
        if len(self.documents) != tokens:
            self.documents = torch.empty(tokens, dtype=torch.int64, device=device)
            self.seen = _seen_inside(self.documents)
        self.documents.copy_(torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)))
        return create_block_mask(self.seen, None, None, tokens, tokens, device=device)

    def _attention(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        scaling: float,
        block_mask: Any,
        **_: Any,
    ) -> tuple[Tensor, None]:
        out = self._attend(query, key, value, block_mask=block_mask, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None


def _seen_inside(documents: Tensor) -> Any:
    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents[query] == documents[key])

    return seen


def register_fa4() -> None:
    """Register FlashAttention-4 with Transformers, for one causal document."""
    from flash_attn.cute.interface import flash_attn_func
    from transformers import AttentionInterface, AttentionMaskInterface

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        found = flash_attn_func(q, k, v, softmax_scale=scaling, causal=True)
        return found[0] if isinstance(found, tuple) else found, None

    AttentionInterface.register(FA4, attend)
    AttentionMaskInterface.register(FA4, lambda *_, **__: None)


class Trainer:
    """A model with its optimizer and step. ``attention`` is a name that Transformers knows, flexcp's included."""

    def __init__(self, size: str, attention: str, recompute: bool = True) -> None:
        from transformers import AutoModelForCausalLM, LlamaConfig

        huggingface.register()
        self.flex = Flex() if attention == FLEX else None
        if attention == FA4:
            register_fa4()
        torch.manual_seed(0)
        config = LlamaConfig(
            **SIZES[size], vocab_size=VOCABULARY, max_position_embeddings=131_072, tie_word_embeddings=True
        )
        with torch.device("cuda"):  # a billion random numbers take no time there
            self.model: Any = AutoModelForCausalLM.from_config(
                config, attn_implementation=attention, dtype=torch.bfloat16
            )
        if recompute:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.model.train()
        self.attention = attention
        self.planner = huggingface.planner(config, flexcp.cluster("h200", ranks_per_node=1), "bfloat16")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def plan(self, parts: list[Tensor]) -> Any:
        """Do what the loader does before a step: plan, bind and put work lists on the device;
        or make the block mask of FlexAttention.
        """
        lengths = [len(part) for part in parts]
        if self.attention in STATIC:
            return None if self.flex is None else self.flex.block_mask(lengths, "cuda")
        plan = self.planner(lengths, masks=huggingface.masks(self.model.config))
        step = flexcp.bind(plan)
        step.prepare("cuda")
        return step

    def step(self, parts: list[Tensor], planned: Any) -> Tensor:
        """Run one step on these documents and return its loss, which the device may still be computing."""
        tokens = torch.cat(parts).cuda()
        # cuDNN only, so that no other kernel is compared silently; FlexAttention does not go through SDPA.
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            if isinstance(planned, flexcp.Step):
                loss = planned_loss(self.model, tokens, planned)
            else:
                more = {} if planned is None else {"block_mask": planned}
                loss = self._static_loss(tokens, [len(part) for part in parts], more)
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def _static_loss(self, tokens: Tensor, lengths: list[int], more: dict[str, Any]) -> Tensor:
        """Return the loss; positions that restart tell Transformers where documents begin."""
        positions = torch.cat([torch.arange(n) for n in lengths]).cuda()
        labels = tokens.roll(-1).index_fill(0, torch.tensor(lengths).cumsum(0).cuda() - 1, -100)[None]
        given = {"position_ids": positions[None], "labels": labels, "shift_labels": labels}
        found: Tensor = self.model(tokens[None], **given, **more, use_cache=False).loss
        return found


def planned_loss(model: Any, tokens: Tensor, step: flexcp.Step) -> Tensor:
    """Return this rank's share of a batch's loss."""
    found: Tensor = model(**huggingface.inputs(tokens, step)).loss
    return found


def one_document(tokens: int, number: int) -> list[Tensor]:
    return [torch.cat(Documents("longtail", tokens, WORDS, shrink=1).step(number))]


def packed_documents(tokens: int, shrink: int, number: int) -> list[Tensor]:
    return Documents("longtail", tokens, WORDS, shrink=shrink).step(number)


def step_times(size: str, baselines: tuple[str, ...], documents: Any, repeats: int = 12) -> dict[str, Any]:
    """Return the median milliseconds of a step for each, planned before, in turns, after three steps to warm up."""
    trainers = {name: Trainer(size, name) for name in (*baselines, huggingface.NAME)}
    times: dict[str, list[float]] = {name: [] for name in trainers}
    for number in range(repeats + 3):
        parts = documents(number)
        for name, trainer in trainers.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            planned = trainer.plan(parts)
            torch.cuda.synchronize()
            begin.record()
            trainer.step(parts, planned)
            end.record()
            torch.cuda.synchronize()
            if number >= 3:
                times[name].append(begin.elapsed_time(end))
        print(f"{size}, {baselines}: step {number + 1} of {repeats + 3}", file=sys.stderr, flush=True)
    ms = {name: statistics.median(each) for name, each in times.items()}
    ours = times[huggingface.NAME]
    ratios = {name: statistics.median(a / b for a, b in zip(ours, times[name], strict=True)) for name in baselines}
    found = {"size": size, "ms": ms, "flexcp / baseline": ratios}
    print(json.dumps(found), file=sys.stderr, flush=True)  # so that an interrupted run leaves results
    return found


def losses(size: str, attention: str, documents: Any, steps: int, recompute: bool = True) -> list[float]:
    """Return the losses of a run on ``documents(step)``."""
    trainer = Trainer(size, attention, recompute)
    found = []
    for number in range(steps):
        parts = documents(number)
        found.append(float(trainer.step(parts, trainer.plan(parts))))
    print(f"{attention}: {json.dumps(found)}", file=sys.stderr, flush=True)  # so that an interrupted run leaves results
    return found


def ranks_losses(groups: dict[int, Any], tokens: int, steps: int) -> list[float]:
    """Train the small model under FSDP2 on four NCCL ranks and return the losses of the batches."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("cp",))
    trainer = Trainer("small", huggingface.NAME, recompute=False)
    # Gradients are summed over ranks in float32, so that a sum of four is rounded no more often than that of one
    # process.
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for layer in trainer.model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    model: Any = fully_shard(trainer.model, mesh=mesh, mp_policy=policy)
    fsdp.sum_gradients(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    planner = huggingface.planner(model.config, flexcp.cluster("h200", ranks_per_node=mesh.size()), "bfloat16")
    found = []
    for number in range(steps):
        parts = packed_documents(tokens, SHORT, number)
        step = flexcp.bind(planner([len(part) for part in parts], masks=huggingface.masks(model.config)), mesh["cp"])
        loss = planned_loss(model, torch.cat(parts).cuda(), step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(total_loss(loss, dist.group.WORLD))
    return found


def parting(run: list[float], baseline: list[float], again: list[float]) -> dict[str, float]:
    """Return the largest relative difference from the baseline and between the baseline's two runs,
    and the largest ratio of both over the steps.
    """
    mine = [abs(a - b) / b for a, b in zip(run, baseline, strict=True)]
    noise = list(accumulate((abs(a - b) / b for a, b in zip(again, baseline, strict=True)), max))
    return {
        "largest difference": max(mine),
        "noise": noise[-1],
        "mean difference": statistics.mean(a - b for a, b in zip(run, baseline, strict=True)),
        "first loss": baseline[0],
        "last loss": baseline[-1],
        "last loss, flexcp": run[-1],
    }


def all_losses(tokens: int, steps: int) -> dict[str, Any]:
    """Train the 1B model's runs one after the other; three copies at once would slow each other."""
    names = {huggingface.NAME: huggingface.NAME, "sdpa": "sdpa", "sdpa, again": "sdpa"}
    runs = {
        n: losses(next(iter(SIZES)), name, partial(one_document, tokens), steps, recompute=False)
        for n, name in names.items()
    }
    mine, baseline, again = runs.values()
    return {**parting(mine, baseline, again), "tokens": tokens, "steps": steps, "losses": runs}


def all_ranks(tokens: int, steps: int) -> dict[str, Any]:
    """Train on four ranks and on one process at the same time."""
    with ThreadPoolExecutor(1) as pool:
        four = pool.submit(on_nccl_ranks, 4, ranks_losses, tokens, steps, patience=600.0)
        documents = partial(packed_documents, tokens, SHORT)
        one = losses("small", huggingface.NAME, documents, steps, recompute=False)
        again = losses("small", huggingface.NAME, lambda number: documents(number)[::-1], steps, recompute=False)
        ranks = four.result()
    return {
        **parting(ranks[0], one, again),
        "tokens": tokens,
        "steps": steps,
        "losses": {"one process": one, "opposite order": again, "four ranks": ranks[0]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--only", default="steps,packed,losses,ranks")
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--loss-tokens", type=int, default=4_096)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--sizes", type=int, default=2, help="how many of the large models")
    asked = parser.parse_args()
    sizes = [size for size in SIZES if size != "small"][: asked.sizes]
    static = ("sdpa", FA4) if find_spec("flash_attn") else ("sdpa",)
    long = partial(one_document, asked.tokens)
    parts: dict[str, Any] = {
        "steps": lambda: [step_times(size, static, long) for size in sizes],
        "packed": lambda: [
            {"shrink": shrink} | step_times(size, (FLEX,), partial(packed_documents, asked.tokens, shrink))
            for size in sizes
            for shrink in (SHORT, LONG)
        ],
        "losses": lambda: all_losses(asked.loss_tokens, asked.steps),
        "ranks": lambda: all_ranks(4096, 50),
    }
    found: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": date.today().isoformat(),
        "tokens": asked.tokens,
    }
    for name in asked.only.split(","):
        found[name] = parts[name]()
        shown = (
            found[name] if isinstance(found[name], list) else {k: v for k, v in found[name].items() if k != "losses"}
        )
        print(f"{name}: {json.dumps(shown)}", flush=True)
        if asked.write:
            asked.write.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
