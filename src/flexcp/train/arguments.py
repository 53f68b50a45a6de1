"""Arguments: what can be said of a training run's settings before torch is loaded, which takes seconds, and before ranks are started."""

from __future__ import annotations

from pathlib import Path

from flexcp.data.lengths import draw_lengths

DTYPES = ("float64", "float32", "bfloat16")


def check_arguments(model: str, data: str, tokens: int, steps: int, dtype: str, ranks: int = 1) -> None:
    """Raise for a model or data that cannot be found, and for numbers that make no run."""
    if model != "gpt" and not Path(model).exists():
        raise ValueError(f"no model {model!r}: write 'gpt', or the path of a Hugging Face config.json or of its folder")
    if tokens < 1:
        raise ValueError(f"a step needs at least 1 token; got {tokens}")
    if not Path(data).is_file():
        draw_lengths(data, 1)
    elif not Path(data).read_bytes().strip():
        raise ValueError(f"{data} holds no text to train on")
    if steps < 1:
        raise ValueError(f"training needs at least 1 step; got {steps}")
    if dtype not in DTYPES:
        raise ValueError(f"train in float64, float32 or bfloat16; got {dtype!r}")
    if ranks < 1:
        raise ValueError(f"training needs at least 1 rank; got --ranks {ranks}")
