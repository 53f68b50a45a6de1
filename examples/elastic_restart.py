"""Stop a run on some ranks and go on with more or fewer: one distributed checkpoint, the same samples, the same losses.

    torchrun --nproc-per-node 4 examples/elastic_restart.py --folder run --steps 6
    torchrun --nproc-per-node 3 examples/elastic_restart.py --folder run --steps 9      # goes on after step 6
    torchrun --nproc-per-node 2 examples/elastic_restart.py --folder other --weights run/weights

Model and optimizer are sharded by FSDP2 and saved by torch.distributed.checkpoint, which cuts them anew for the ranks
that load them. The loader's state is a few plain values that fit any number of ranks, because batches are filled by
``budget`` tokens, whoever shares them. The last weights are also written as a Hugging Face checkpoint
(``run/weights``), which any other program loads, and which ``--weights`` begins from.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import flexcp
from flexcp.frameworks import fsdp, huggingface, used
from flexcp.train.documents import phrases, shrunk_lengths
from flexcp.train.update import total_loss

TINY = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class Run(NamedTuple):
    """What a checkpoint has: the state of all three."""

    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    loader: flexcp.data.Loader

    def state(self, done: int) -> dict[str, object]:
        """Shards of this rank, and plain values that are the same on all."""
        weights, moments = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": moments, "loader": self.loader.state_dict(), "done": done}


class Trained(NamedTuple):
    """What a step trained on and found."""

    step: int
    samples: list[int]
    loss: float


def documents(tokens: int) -> list[dict[str, torch.Tensor]]:
    """A dataset: token ids of other lengths, shuffled by the loader."""
    lengths = shrunk_lengths("longtail", tokens, 0, 16)
    return [{"input_ids": ids} for ids in phrases(0, lengths, TINY["vocab_size"]).split(lengths)]


def made(group: dist.ProcessGroup, weights: str | None) -> Run:
    """A sharded model with the same fresh weights every time, or those of a Hugging Face checkpoint;
    its optimizer and its data.
    """
    torch.manual_seed(0)
    if weights is not None:
        model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_config(LlamaConfig(**TINY), dtype=torch.float32)
    huggingface.turn_on(model)
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("cp",))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    fsdp.sum_gradients(model)
    planner = huggingface.planner(model.config, flexcp.cluster("cpu", ranks_per_node=mesh.size()), "float32")
    masks = huggingface.masks(model.config)
    loader = flexcp.data.Loader(
        documents(2048),
        planner,
        budget=512,
        group=group,
        masks=masks,
        shuffle=True,
        batches=flexcp.data.Batches(too_long="cut"),
        planning=flexcp.data.Planning(workers=0),  # batches this small are planned here, when their turn comes
    )
    return Run(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loader)


def train(
    group: dist.ProcessGroup, folder: Path, steps: int, save_every: int = 3, weights: str | None = None
) -> list[Trained]:
    """Steps up to ``steps`` on the ranks of ``group``, from the newest checkpoint in ``folder`` if there is one."""
    run = made(group, weights)
    saved = sorted(
        found.parent for found in folder.glob("step-*/.metadata")
    )  # written last: without it a folder is no checkpoint
    done = resumed(run, saved[-1], group) if saved else 0
    found: list[Trained] = []
    with run.loader:
        while done < steps:
            for batch in run.loader:
                with used(batch.step):
                    rows = {"position_ids": batch.positions[None], "step": batch.step, "use_cache": False}
                    loss = batch.step.loss(run.model(batch.tokens[None], **rows).logits[0], batch.labels)
                loss.backward()
                run.optimizer.step()
                run.optimizer.zero_grad()
                done += 1
                found.append(Trained(done, batch.samples.tolist(), total_loss(loss, group)))
                if done % save_every == 0:
                    dcp.save(run.state(done), checkpoint_id=folder / f"step-{done:06}", process_group=group)
                if done == steps:
                    break
    save_stock(folder / "weights", run.model, group)
    return found


def resumed(run: Run, folder: Path, group: dist.ProcessGroup) -> int:
    """Bring model, optimizer and loader to where the checkpoint is; how many steps that was."""
    state = run.state(0)
    dcp.load(state, checkpoint_id=folder, process_group=group)
    set_state_dict(run.model, run.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    run.loader.load_state_dict(state["loader"])
    return int(state["done"])


def save_stock(folder: Path, model: PreTrainedModel, group: dist.ProcessGroup) -> None:
    """The weights as ``from_pretrained`` reads them: gathered, and written by one rank."""
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank(group) == 0:
        model.save_pretrained(folder, state_dict=whole)
    dist.barrier(group)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where checkpoints are or will be")
    parser.add_argument("--steps", type=int, default=6, help="of the whole run")
    parser.add_argument("--weights", help="a Hugging Face checkpoint to begin from")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    for step in train(dist.group.WORLD, options.folder, options.steps, weights=options.weights):
        if dist.get_rank() == 0:
            print(f"step {step.step} loss {step.loss:.6f}, samples {step.samples}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
