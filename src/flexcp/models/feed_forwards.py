"""Feed-forwards: read the width of feed-forwards, and their experts, from a ``config.json``.

All layers are priced alike. In a model with experts, every layer is priced as a layer of experts, and shared experts
count as active ones. A plain feed-forward (two matrices) is described as a gated one of the same FLOPs.
"""

from __future__ import annotations

from typing import NamedTuple

from flexcp.models.config_fields import ALIASES, NUMBERS, Fields
from flexcp.models.families import Experts, Family

DENSE_PART = 8
"""Up to one in this many layers may have no experts and be priced as if it had."""


class FeedForwards(NamedTuple):
    """The feed-forwards of a layer: the width of one as a gated one, how many a token uses, and how many there are."""

    width: int
    active: int = 1
    all: int = 1


def feed_forwards(fields: Fields, family: Family, hidden: int, layers: int) -> FeedForwards:
    """Return the feed-forwards of one layer; ``hidden`` is the model's width and ``layers`` its number of layers.

    Raise ValueError if a field is missing or contradicts the family, and NotImplementedError if too many layers have no
    experts.
    """
    experts = family.experts
    if experts is None:
        for name in ALIASES[-1]:
            fields.agree(name, None, "no experts")
        return _dense(fields, family, hidden)
    return _experts(fields, experts, fields.need(experts.count), layers)


def _dense(fields: Fields, family: Family, hidden: int) -> FeedForwards:
    """Return the one feed-forward of a layer without experts."""
    width = fields.read([family.width])
    if width is None:
        width = 4 * hidden if family.fourfold else fields.need([family.width])
    return FeedForwards(width if family.gated else -(-2 * width // 3))


def _experts(fields: Fields, experts: Experts, count: int, layers: int) -> FeedForwards:
    """Return the ``count`` experts of a layer and its shared experts together, as experts of one width."""
    width = next((value for name in experts.width if (value := fields.count(name))), None)
    if width is None:
        width = fields.need(experts.width)
    per_token = experts.always or fields.need(experts.per_token)
    fields.agree(experts.per_token[0], per_token, "that number")
    if per_token > count:
        raise ValueError(
            f"{fields.file} has {experts.per_token[0]} {per_token} of {count} experts; "
            "a token uses no more than there are"
        )
    shared = _shared(fields, experts, width)
    dense = _layers_without(fields, experts, layers)
    if DENSE_PART * dense > layers:
        raise NotImplementedError(
            f"{fields.file} has {dense} of {layers} layers without experts, "
            f"and layers are priced as one kind; {NUMBERS}"
        )
    return FeedForwards(width, per_token + shared, count + shared)


def _shared(fields: Fields, experts: Experts, width: int) -> int:
    """Return the number of shared experts, as experts of the common ``width``."""
    for name in (experts.shared_count, experts.shared_width):
        if name is not None and name not in fields.config:
            raise fields.asked(name, "0 if there is none")
    if experts.shared_count is not None and (count := fields.count(experts.shared_count)):
        return count
    total = 0 if experts.shared_width is None else fields.count(experts.shared_width) or 0
    if total % width:
        raise NotImplementedError(
            f"{fields.file} has {experts.shared_width} {total}, which is no multiple of the {width} of an expert, and "
            f"feed-forwards are priced as one width; {NUMBERS}"
        )
    return total // width


def _layers_without(fields: Fields, experts: Experts, layers: int) -> int:
    """Return how many layers have no experts."""
    kinds = fields.config.get("mlp_layer_types") if experts.kinds else None
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers or not set(map(str, kinds)) <= {"dense", "sparse"}:
            raise ValueError(
                f"{fields.file}: mlp_layer_types must be a list with dense or sparse for each of the {layers} layers"
            )
        return kinds.count("dense")
    dense: set[int] = set()
    if experts.dense_first is not None:
        given = "first_k_dense_replace" in fields.config
        first = fields.count("first_k_dense_replace") or 0 if given else experts.dense_first
        dense |= set(range(min(first, layers)))
    if experts.sparse_step:
        listed = fields.config.get("mlp_only_layers")
        dense |= {i for i in listed if type(i) is int and 0 <= i < layers} if isinstance(listed, list) else set()
        step = fields.count("decoder_sparse_step") or 1
        dense |= {i for i in range(layers) if (i + 1) % step}
    return len(dense)
