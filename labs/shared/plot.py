"""Pictures: a figure, and the file it is saved to."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

from llm_ddp_parallel_training import UserError, write_whole

DPI = 110


def require_matplotlib() -> None:
    """Raises `UserError` before anything is computed that could not be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("the lab draws its result with matplotlib: pip install matplotlib")


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
    write_whole(path, lambda to: figure.savefig(to, format="png", dpi=DPI))
