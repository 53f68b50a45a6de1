"""A plugin for axolotl: ranks share every packed batch. Written for axolotl 0.19.0 on 17 November 2026.

    python examples/made_text.py build/made
    export ACCELERATE_USE_CPU=true PYTHONPATH=examples
    torchrun --nproc-per-node 2 -m axolotl.cli.train examples/axolotl_sft.yaml

``plugins:`` of the YAML file names this class. axolotl packs, deals batches over ranks and averages gradients,
as before.
"""

from __future__ import annotations

import os
from typing import Any

from accelerate import PartialState
from axolotl.core.trainers import AxolotlTrainer
from axolotl.integrations.base import BasePlugin

import flexcp
from flexcp.frameworks.huggingface_trainer import FlexcpTrainer


class FlexcpAxolotl(FlexcpTrainer, AxolotlTrainer):
    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        cluster = flexcp.cluster("cpu", ranks_per_node=int(os.environ.get("WORLD_SIZE", 1)))
        super().__init__(*arguments, cluster=cluster, **keywords)


class FlexcpPlugin(BasePlugin):
    def get_trainer_cls(self, cfg: Any) -> type[FlexcpAxolotl]:
        return FlexcpAxolotl

    def get_training_args(self, cfg: Any) -> dict[str, Any]:
        return {"average_tokens_across_devices": True}  # axolotl turns it off

    # The rest, like ACCELERATE_USE_CPU, is only for ranks without GPUs: axolotl takes every rank for a GPU.
    def register(self, cfg: Any) -> None:
        PartialState(cpu=True)

    def load_datasets(self, cfg: Any, preprocess: bool = False) -> None:
        cfg.device_map = None
