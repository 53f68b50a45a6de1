"""Samples that Accelerate repeats in the last batch of an evaluation, so that every rank has as many as the others.

The loss of that batch is a mean over the tokens of all ranks. A repeated sample would count twice in it, so its labels
are left out, and the loss is the one that a single process has.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard
from torch import Tensor
from torch.utils.data import BatchSampler, SequentialSampler

from flexcp.frameworks.shared_batch import IGNORE

LABELS = ("labels", "shift_labels")


def without_repeats(inputs: Mapping[str, Any], loader: Any) -> dict[str, Any]:
    """Return the inputs of this rank's last batch with labels of -100 for samples that are repeated in it.

    ``loader`` is the data loader that Accelerate prepared. Batches of batch samplers other than PyTorch's own and of
    iterable data sets are returned as they are. Warn if the batch is flat and does not show where its samples end.
    """
    found = dict(inputs)
    shard = getattr(loader, "batch_sampler", None)
    if not isinstance(shard, BatchSamplerShard) or type(shard.batch_sampler) is not BatchSampler:
        return found
    sampler: Any = shard.batch_sampler.sampler
    samples, of_all = len(sampler), loader.total_batch_size
    rows, left = of_all // shard.num_processes, samples % of_all
    own = min(max(left - shard.process_index * rows, 0), rows)
    if left == 0 or own == rows or shard.drop_last or not shard.even_batches:
        return found
    labels = {name: found[name] for name in LABELS if isinstance(found.get(name), Tensor)}
    first = samples - left + shard.process_index * rows
    for name, values in labels.items():
        flat = len(values) == 1 < rows
        end = _tokens(found, loader.dataset, range(first, first + own), sampler) if flat else own
        if end is None or (not flat and len(values) != rows):
            warnings.warn(
                f"the evaluation set has {samples} samples, which batches of {of_all} over all ranks do not divide: "
                "Accelerate repeats samples in the last batch, and their labels are not told apart in the collator's "
                "batch, so that the evaluation loss counts them twice; evaluate a multiple of the batch size",
                stacklevel=2,
            )
            return found
        found[name] = values.clone()
        (found[name][0] if flat else found[name])[end:] = IGNORE
    return found


def _tokens(inputs: Mapping[str, Any], data: Any, own: range, sampler: Any) -> int | None:
    """Return how many tokens of a flat batch belong to the samples ``own``, with which it begins.

    Return None if it does not begin with their ``input_ids``, one after the other.
    """
    if not own:
        return 0
    if not isinstance(sampler, SequentialSampler) or not isinstance(inputs.get("input_ids"), Tensor):
        return None
    try:
        ids = torch.cat([torch.as_tensor(data[number]["input_ids"]) for number in own])
    except (KeyError, TypeError):
        return None
    given = inputs["input_ids"].flatten()[: len(ids)].cpu()
    return len(ids) if torch.equal(given, ids.to(given.dtype)) else None
