"""Pictures: a figure, and the file it is saved to."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from llm_ddp_parallel_training import require_matplotlib, write_file

__all__ = ["new_figure", "require_matplotlib", "save_figure"]

DPI = 110


def new_figure(width: float, height: float) -> Any:
    """An empty matplotlib `Figure` of so many inches, whose parts find their places.

    It belongs to no window, so it works where there is no screen. Call `require_matplotlib` before
    the lab computes anything: it raises `UserError` where matplotlib is not installed.
    """
    with warnings.catch_warnings():  # its font cache is opened without an encoding
        warnings.simplefilter("ignore", EncodingWarning)
        from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """Writes a PNG, complete or not at all."""
    write_file(path, lambda file: figure.savefig(file, format="png", dpi=DPI))
