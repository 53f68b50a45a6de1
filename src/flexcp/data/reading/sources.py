"""Sources: the document at each place of an epoch, and its sample.

A *place* is a position in the order of the epoch. A source gives the document at a place any number of times until the
place is released. There are two:

    KnownSource   a map-style dataset whose lengths and masks are known (``known_source.py``): nothing is read to form
                  batches, and a rank reads only the documents it keeps tokens of
    ReadSource    any other dataset (``read_source.py``): each sample is read once, by one rank, which tells the others
                  its length and mask and later sends them the rows they keep
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flexcp.data.documents import BatchLimits
from flexcp.data.reading.document_masks import Masks
from flexcp.data.reading.samples import Fields
from flexcp.data.stats import Stats


@dataclass(frozen=True, eq=False)
class Reading:
    """How samples are read: names of fields, masks of documents, limits of lengths, order, and statistics."""

    fields: Fields
    masks: Masks
    limits: BatchLimits
    shuffle: bool
    seed: int
    stats: Stats


def is_map_style(dataset: Any) -> bool:
    """Return whether samples are read by number: the dataset has a length and indexing, and is no IterableDataset."""
    from torch.utils.data import IterableDataset

    if isinstance(dataset, IterableDataset):
        return False
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
