"""flexcp: dynamic context parallelism.

The main call is :func:`attention`; a :class:`Planner` makes the plan it runs and :func:`bind` ties the plan to this
rank.

    cluster = flexcp.cluster("h100", nodes=4, ranks_per_node=8)
    planner = flexcp.Planner(heads=32, kv_heads=8, head_dim=128, cluster=cluster)
    plan    = planner(lengths=[120_000, 3_100, 800], mask=flexcp.causal())
    step    = flexcp.bind(plan, mesh["cp"])
    out     = flexcp.attention(q, k, v, step)

:func:`slice_attention` runs the attention kernel on one device without a plan.

Names load on first use: importing flexcp imports neither torch nor NumPy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from flexcp.version import __version__ as __version__

_HOMES = {
    "Planner": "planner",
    "Plan": "plan.plan",
    "PlanFormatError": "plan.file",
    "load_plan": "plan.file",
    "save_plan": "plan.file",
    "Cluster": "clusters",
    "cluster": "clusters",
    "Shape": "shape",
    "Topology": "models.topology",
    "topology": "models.topology",
    "CostModel": "cost",
    "Model": "cost",
    "Preset": "models.preset",
    "Training": "simulator.step_parts",
    "Mask": "masks",
    "full": "masks",
    "causal": "masks",
    "window": "masks",
    "lambda_": "masks",
    "shared_question": "masks",
    "causal_blockwise": "masks",
    "chunked": "masks",
    "prefix": "masks",
    "modality": "masks",
    "tree": "masks",
    "tree_order": "masks",
    "tree_of": "masks",
    "TokenTree": "masks",
    "from_slices": "masks",
    "from_key_ranges": "masks",
    "from_cu_seqlens": "masks",
    "from_mask_mod": "masks",
    "bind": "executor.bind",
    "Step": "executor.step",
    "Edges": "executor.losses.edges",
    "ExchangeError": "executor.exchange.transports",
    "attention": "executor.attention",
    "Telemetry": "telemetry.telemetry",
    "MismatchError": "telemetry.sample",
    "slice_attention": "executor.slice_attention",
    "latent_attention": "executor.latent",
    "LatentForms": "compare.latent_forms",
    "StaticChoice": "compare.static_choice",
    "choose_static": "compare.static_choice",
    "packed_slices": "executor.slice_attention",
    "choose_kernel": "executor.kernels.choose",
    "fastest_kernel": "executor.fastest_kernel",
}

_ROOMS = ("data", "frameworks", "report")
"""Subpackages with public names of their own; they also load on first use."""

__all__ = [
    "Cluster",
    "CostModel",
    "Edges",
    "ExchangeError",
    "LatentForms",
    "Mask",
    "MismatchError",
    "Model",
    "Plan",
    "PlanFormatError",
    "Planner",
    "Preset",
    "Shape",
    "StaticChoice",
    "Step",
    "Telemetry",
    "TokenTree",
    "Topology",
    "Training",
    "attention",
    "bind",
    "causal",
    "causal_blockwise",
    "choose_kernel",
    "choose_static",
    "chunked",
    "cluster",
    "fastest_kernel",
    "from_cu_seqlens",
    "from_key_ranges",
    "from_mask_mod",
    "from_slices",
    "full",
    "lambda_",
    "latent_attention",
    "load_plan",
    "modality",
    "packed_slices",
    "prefix",
    "save_plan",
    "shared_question",
    "slice_attention",
    "topology",
    "tree",
    "tree_of",
    "tree_order",
    "window",
]

if TYPE_CHECKING:
    from flexcp.clusters import Cluster, cluster
    from flexcp.compare.latent_forms import LatentForms
    from flexcp.compare.static_choice import StaticChoice, choose_static
    from flexcp.cost import CostModel, Model
    from flexcp.executor.attention import attention
    from flexcp.executor.bind import bind
    from flexcp.executor.exchange.transports import ExchangeError
    from flexcp.executor.fastest_kernel import fastest_kernel
    from flexcp.executor.kernels.choose import choose_kernel
    from flexcp.executor.latent import latent_attention
    from flexcp.executor.losses.edges import Edges
    from flexcp.executor.slice_attention import packed_slices, slice_attention
    from flexcp.executor.step import Step
    from flexcp.masks import (
        Mask,
        TokenTree,
        causal,
        causal_blockwise,
        chunked,
        from_cu_seqlens,
        from_key_ranges,
        from_mask_mod,
        from_slices,
        full,
        lambda_,
        modality,
        prefix,
        shared_question,
        tree,
        tree_of,
        tree_order,
        window,
    )
    from flexcp.models.preset import Preset
    from flexcp.models.topology import Topology, topology
    from flexcp.plan.file import PlanFormatError, load_plan, save_plan
    from flexcp.plan.plan import Plan
    from flexcp.planner import Planner
    from flexcp.shape import Shape
    from flexcp.simulator.step_parts import Training
    from flexcp.telemetry.sample import MismatchError
    from flexcp.telemetry.telemetry import Telemetry


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"flexcp.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'flexcp' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"flexcp.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_ROOMS})
