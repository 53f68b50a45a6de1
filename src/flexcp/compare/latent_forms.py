"""The three forms in which multi-latent attention can run, and which one is the fastest for a batch.

A token has one latent of ``rank`` numbers and one rotated key of ``rope`` numbers for all heads. A head's key is
``nope`` numbers expanded from the latent beside the rotated key, its value ``value`` numbers expanded from the latent.

| form     | what travels of a key       | head sizes (key, value)      | FLOPs besides pairs                          |
| -------- | --------------------------- | ---------------------------- | -------------------------------------------- |
| expanded | every head's key and value  | nope + rope, value           | own tokens are expanded once                 |
| latent   | latent and rotated key      | nope + rope, value           | every key is expanded where it is read       |
| absorbed | latent, rotated key, latent | rank + rope, rank (one head) | queries and outputs are expanded instead     |

``latent`` moves the least. ``expanded`` is what any attention layer does with tokens that stay on their rank, and best
when little moves. ``absorbed`` needs no expansion of keys, but a pair costs (2 rank + rope) / (nope + rope + value)
times as much, about 3.4 times for DeepSeek's sizes: good for decoding, hardly ever for training. The absorbed value is
the latent again, so the latent travels twice.

All three run today: ``expanded`` and ``absorbed`` through :func:`flexcp.attention`, ``latent`` through
:func:`flexcp.latent_attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.totals import sums
from flexcp.batch import MaskLike
from flexcp.clusters import Cluster
from flexcp.plan.plan import Plan
from flexcp.planner import Planner
from flexcp.schedule.predict import predict
from flexcp.shape import Kind, Shape

Ints = NDArray[np.int64]
FORMS = ("expanded", "latent", "absorbed")


@dataclass(frozen=True)
class LatentForms:
    """The sizes of a multi-latent attention layer: number of heads, and widths of latent, rotated key, key and value.

    ``rank`` is the width of the latent and ``rope`` of the rotated key, both shared by all heads; ``nope`` and
    ``value`` are the widths of each head's own key and value.

    >>> LatentForms(heads=128, rank=512, rope=64, nope=128, value=128).key_bytes()
    {'expanded': 81920, 'latent': 1152, 'absorbed': 2176}
    """

    heads: int
    rank: int
    rope: int
    nope: int
    value: int
    dtype: str = "bfloat16"

    def shape(self, form: str) -> Shape:
        """Return the attention shape that plans of this form (one of :data:`FORMS`) are made for.

        Raise ValueError for another form.
        """
        wide = self.nope + self.rope
        if form == "expanded":
            return Shape(self.heads, self.heads, wide, self.value, self.dtype)
        if form == "latent":
            return Shape(self.heads, 1, wide, self.value, self.dtype, latent=self.rank + self.rope)
        if form == "absorbed":
            return Shape(self.heads, 1, self.rank + self.rope, self.rank, self.dtype)
        raise ValueError(f"a form is one of {', '.join(FORMS)}; got {form!r}")

    def key_bytes(self) -> dict[str, int]:
        """Return for each form the bytes of one token's keys and values of all heads, as they travel."""
        shapes = {form: self.shape(form) for form in FORMS}
        return {form: int(s.bytes_per_token_head()[Kind.KV, 0]) * s.kv_heads for form, s in shapes.items()}

    def planner(self, form: str, cluster: Cluster, **options: Any) -> Planner:
        """Return a planner for this form; ``options`` go to :class:`flexcp.Planner`."""
        s = self.shape(form)
        return Planner(s.heads, s.kv_heads, s.head_dim, s.v_head_dim, s.dtype, cluster, latent=s.latent, **options)

    def step_ns(self, form: str, plan: Plan) -> int:
        """Return the predicted nanoseconds of the slowest rank for one step of a plan made for ``form``.

        ``form`` is one of :data:`FORMS`. A step is all layers, forward and backward, attention and the rest. Expanding
        received latents is included, and in the backward a rank's own ones; keys that ``keep_kv`` keeps are timed as if
        they were not kept.
        """
        cluster, cost = plan.cluster, plan.cost
        found = predict(plan.placement, plan.shape, cluster, cost)
        layers = sum(mask.layers for mask in plan.batch.masks)
        # The rest of each layer takes the same time in all forms, and so does expanding a rank's own tokens once, a
        # projection.
        linear = layers * cost.linear_ns(plan.placement.tokens, self.shape("expanded"), cluster)
        peak = cluster.gflops * cost.linear_efficiency * np.array(cluster.rank_speeds, np.int64)
        more = layers * self.expansion_flops(form, plan) * 1_000_000 // peak  # efficiency and speeds are per mille
        return int((found.attention_ns + found.exposed_ns + linear + more).max())

    def expansion_flops(self, form: str, plan: Plan) -> Ints:
        """Return the FLOPs of each rank in one layer, forward and backward, beyond expanding its own tokens once.

        Only ``latent`` has any: a rank expands the latents it receives, and its own latents again in the backward.
        Received latents are those of the plan's first mask.
        """
        if form != "latent":
            return np.zeros(plan.ranks, np.int64)
        transfers = plan.programs[0][0].transfers
        arrives = (transfers.kind == Kind.KV) & (transfers.source != transfers.target)
        received = sums(transfers.target[arrives], (transfers.stop - transfers.start)[arrives], plan.ranks)
        # The backward expands once more, and the gradient of the expansion costs twice the expansion.
        return 2 * self.rank * self.heads * (self.nope + self.value) * (4 * received + plan.placement.tokens)

    def fastest(
        self, lengths: Sequence[int], cluster: Cluster, mask: MaskLike | None = None, **options: Any
    ) -> tuple[str, dict[str, int]]:
        """Return the form with the least predicted step time for a batch, and the nanoseconds of all forms by name.

        ``options`` go to :class:`flexcp.Planner`.
        """
        times = {f: self.step_ns(f, self.planner(f, cluster, **options)(lengths, mask)) for f in FORMS}
        return min(FORMS, key=lambda f: times[f]), times
