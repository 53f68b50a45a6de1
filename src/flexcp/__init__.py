"""flexcp: dynamic context parallelism.

The main call is :func:`attention`; a :class:`Planner` makes the plan it runs and :func:`bind` ties the plan to this
rank.

    cluster = flexcp.cluster("h100", nodes=4, ranks_per_node=8)
    planner = flexcp.Planner(heads=32, kv_heads=8, head_dim=128, cluster=cluster)
    plan    = planner(lengths=[120_000, 3_100, 800], mask=flexcp.causal())
    step    = flexcp.bind(plan, mesh["cp"])
    out     = flexcp.attention(q, k, v, step)

:func:`slice_attention` runs the attention kernel on one device without a plan. More masks are in :mod:`flexcp.masks`,
the loader is in :mod:`flexcp.data`, and docs/api.md says which names may change.

Names load on first use: importing flexcp imports neither torch nor NumPy.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

from flexcp.version import __version__ as __version__

_HOMES = {
    "Planner": "planner",
    "Plan": "plan.plan",
    "load_plan": "plan.file",
    "save_plan": "plan.file",
    "Cluster": "clusters",
    "cluster": "clusters",
    "Shape": "shape",
    "Model": "cost",
    "Preset": "models.preset",
    "Training": "simulator.step_parts",
    "Mask": "masks",
    "full": "masks",
    "causal": "masks",
    "window": "masks",
    "tree": "masks",
    "tree_of": "masks",
    "from_slices": "masks",
    "bind": "executor.bind",
    "Step": "executor.step",
    "attention": "executor.attention",
    "Telemetry": "telemetry.telemetry",
    "slice_attention": "executor.slice_attention",
    "latent_attention": "executor.latent",
    "choose_static": "compare.static_choice",
    "packed_slices": "executor.slice_attention",
}

_MOVED = {
    "LatentForms": "compare.latent_forms",
    "StaticChoice": "compare.static_choice",
    "CostModel": "cost",
    "ExchangeError": "executor.exchange.transports",
    "fastest_kernel": "executor.fastest_kernel",
    "choose_kernel": "executor.kernels.choose",
    "Edges": "executor.losses.edges",
    "TokenTree": "masks",
    "causal_blockwise": "masks",
    "chunked": "masks",
    "from_cu_seqlens": "masks",
    "from_key_ranges": "masks",
    "from_mask_mod": "masks",
    "lambda_": "masks",
    "modality": "masks",
    "prefix": "masks",
    "shared_question": "masks",
    "tree_order": "masks",
    "Topology": "models.topology",
    "topology": "models.topology",
    "PlanFormatError": "plan.file",
    "MismatchError": "telemetry.sample",
}
"""Names that were public here until version 0.2, with the modules they are imported from since then."""

_ROOMS = ("data", "frameworks", "masks", "report")
"""Subpackages with public names of their own; they also load on first use."""

__all__ = [
    "Cluster",
    "Mask",
    "Model",
    "Plan",
    "Planner",
    "Preset",
    "Shape",
    "Step",
    "Telemetry",
    "Training",
    "attention",
    "bind",
    "causal",
    "choose_static",
    "cluster",
    "from_slices",
    "full",
    "latent_attention",
    "load_plan",
    "packed_slices",
    "save_plan",
    "slice_attention",
    "tree",
    "tree_of",
    "window",
]

if TYPE_CHECKING:
    from flexcp.clusters import Cluster, cluster
    from flexcp.compare.static_choice import choose_static
    from flexcp.cost import Model
    from flexcp.executor.attention import attention
    from flexcp.executor.bind import bind
    from flexcp.executor.latent import latent_attention
    from flexcp.executor.slice_attention import packed_slices, slice_attention
    from flexcp.executor.step import Step
    from flexcp.masks import (
        Mask,
        causal,
        from_slices,
        full,
        tree,
        tree_of,
        window,
    )
    from flexcp.models.preset import Preset
    from flexcp.plan.file import load_plan, save_plan
    from flexcp.plan.plan import Plan
    from flexcp.planner import Planner
    from flexcp.shape import Shape
    from flexcp.simulator.step_parts import Training
    from flexcp.telemetry.telemetry import Telemetry


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"flexcp.{name}")
    if name in _MOVED:
        home = f"flexcp.{_MOVED[name]}"
        warnings.warn(
            f"flexcp.{name} is deprecated since flexcp 0.2 and an error from 0.4 on; write `from {home} import {name}`",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(importlib.import_module(home), name)
    if name not in _HOMES:
        raise AttributeError(f"module 'flexcp' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"flexcp.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_ROOMS})
