"""Fine-tune a Hugging Face model with flexcp's loader: documents of any length in, planned steps out, exact resume.

    torchrun --nproc-per-node 4 examples/finetune_with_loader.py

The model here is a tiny Llama with fresh weights; replace ``make_model`` by
``AutoModelForCausalLM.from_pretrained(...)`` and ``documents`` by a tokenized dataset.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import flexcp
from flexcp.frameworks import huggingface, used
from flexcp.train.documents import phrases, shrunk_lengths
from flexcp.train.update import total_loss, update


def make_model() -> PreTrainedModel:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=256, **sizes), dtype=torch.float32)


def documents(tokens: int) -> list[dict[str, torch.Tensor]]:
    lengths = shrunk_lengths("longtail", tokens, 0, 16)
    return [{"input_ids": ids} for ids in phrases(0, lengths, 256).split(lengths)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16_384, help="of the whole dataset")
    parser.add_argument("--budget", type=int, default=2048, help="tokens a step")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    model = make_model()
    huggingface.turn_on(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    planner = huggingface.planner(model.config, flexcp.cluster("cpu", ranks_per_node=ranks), "float32")
    loader = flexcp.data.Loader(
        documents(options.tokens),
        planner,
        budget=options.budget,
        group=dist.group.WORLD,
        masks=huggingface.masks(model.config),
        shuffle=True,
        batches=flexcp.data.Batches(too_long="cut"),
        planning=flexcp.data.Planning(plan_options={"tokens": "equal"}),
    )
    with loader:
        for number, batch in enumerate(loader):
            with used(batch.step):
                logits = model(
                    batch.tokens[None], position_ids=batch.positions[None], step=batch.step, use_cache=False
                ).logits[0]
            loss = torch.nn.functional.cross_entropy(logits, batch.labels, reduction="sum") / batch.valid
            update(optimizer, loss, dist.group.WORLD)
            total = total_loss(loss, dist.group.WORLD)
            if dist.get_rank() == 0:
                print(f"step {number} loss {total:.6f}, {len(batch.tokens)} tokens here")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
