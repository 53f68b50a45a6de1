"""Arrow lengths: read the document lengths of a Hugging Face dataset from its Arrow columns, without decoding samples.

This needs the package ``datasets`` (``pip install flexcp[datasets]``).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
NAMES = ("tokens", "input_ids")


def dataset_lengths(dataset: Any, column: str | None = None) -> Ints:
    """Return the number of tokens of every row of a ``datasets.Dataset``, as int64.

    ``column`` holds lists of tokens, or lengths as numbers; by default it is ``tokens`` or ``input_ids``, whichever the
    dataset has. Raise ValueError if it has both or neither, or if a row of the column is missing.
    """
    names = list(dataset.column_names)
    if column is None:
        found = [n for n in NAMES if n in names]
        if len(found) != 1:
            raise ValueError(
                f"say which column holds tokens or lengths: dataset_lengths(dataset, column); it has {names}"
            )
        column = found[0]
    if column not in names:
        raise ValueError(f"the dataset has no column {column!r}; it has {names}")
    import pyarrow as pa
    import pyarrow.compute as pc

    picked = dataset.with_format("arrow")
    parts = []
    for table in picked.select_columns([column]).iter(batch_size=65_536):
        values = table.column(column)
        lists = pa.types.is_list(values.type) or pa.types.is_large_list(values.type)
        parts.append(np.asarray(pc.list_value_length(values) if lists else values))
    lengths = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    if not np.issubdtype(lengths.dtype, np.integer):
        raise ValueError(
            f"column {column!r} holds neither lists nor whole numbers, or has missing rows; choose another"
        )
    return lengths.astype(np.int64)
