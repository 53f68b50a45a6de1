"""Config fields: read numbers and switches of a ``config.json`` or of a configuration in memory.

A quantity has several names in Transformers, and each family of models reads only some of them. :meth:`Fields.read`
takes these names, and refuses a file that gives another value under a name that the family ignores. Errors name the
file, the field and what to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ALIASES = (
    ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    ("hidden_size", "n_embd", "d_model"),
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    ("num_key_value_heads", "num_kv_heads"),
    ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
)
"""Names of the same quantity in files of different families."""
NUMBERS = "describe the model with --heads, --kv-heads, --head-dim, --hidden and --layers"
"""The way out of errors, for models that cannot be read from a file."""


class Fields:
    """The fields of a configuration for models of one family; ``file`` names it in errors, ``family`` is its type.

    Methods raise ValueError for a field that has a wrong type or contradicts the family.
    """

    def __init__(self, file: Path | str, config: Mapping[str, Any], family: str) -> None:
        self.file, self.config, self.family = file, config, family

    def count(self, name: str) -> int | None:
        """Return the field as an integer of at least 1, or None if it is missing, null or 0."""
        value = self.config.get(name)
        if value is None or value == 0:
            return None
        if type(value) is not int or value < 0 or value >= 1 << 31:
            raise ValueError(f"{self.file}: {name} must be a whole number from 1 to 2**31 - 1; got {value!r:.60}")
        return value

    def switch(self, name: str, default: bool) -> bool:
        """Return the field as True or False, or ``default`` if it is missing."""
        value = self.config.get(name, default)
        if not isinstance(value, bool):
            raise ValueError(f"{self.file}: {name} must be true or false; got {value!r:.60}")
        return value

    def read(self, names: Sequence[str]) -> int | None:
        """Return a quantity under the names that the family reads, or None if the file has none of them.

        The first of ``names`` that is given counts. Raise ValueError if another name of the quantity (:data:`ALIASES`)
        contradicts it.
        """
        found = next((value for name in names if (value := self.count(name)) is not None), None)
        for name in sorted({alias for group in ALIASES if names[0] in group for alias in group} | set(names)):
            if name in self.config:
                self.agree(name, found, names[0])
        return found

    def agree(self, name: str, value: int | None, instead: str) -> None:
        """Raise ValueError if the field ``name``, which the family does not read, has another value than ``value``.

        A missing field, null and 0 are accepted. ``instead`` says in the error what to write instead.
        """
        given = self.count(name)
        if given is not None and given != value:
            has = f"take {'none' if value is None else value}"
            raise ValueError(
                f"{self.file} has {name} {given}, which models of the type {self.family[:40]!r} do not read: they "
                f"{has}; take it out of the file, write {instead}, or name the model_type that reads it"
            )

    def need(self, names: Sequence[str]) -> int:
        """Return a quantity under the names that the family reads, or raise ValueError if the file does not have it."""
        found = self.read(names)
        if found is None:
            for name in names:
                if self.config.get(name) == 0:
                    raise ValueError(f"{self.file}: {name} must be a whole number of at least 1; got 0")
            raise ValueError(
                f"{self.file} has no {' or '.join(names)}; write the whole file with config.save_pretrained(folder), "
                f"or {NUMBERS}"
            )
        return found

    def asked(self, name: str, value: str) -> ValueError:
        """Return the error for a missing field for which the family has a default; ``value`` is what to write."""
        return ValueError(
            f"{self.file} has no {name}, and models of the type {self.family[:40]!r} have a default of their own: "
            "write it into the file, "
            f'"{name}": {value}, or save the file with config.save_pretrained(folder)'
        )
