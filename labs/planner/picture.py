"""Memory by layout as a picture."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from labs.planner.models import PlanError
from labs.shared.report import size_of


def draw_memory(plan: dict[str, Any], path: Path) -> None:
    """Stacked bars of memory per layout, with the limit of the GPU; PNG, SVG or PDF by suffix."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PlanError("--picture needs matplotlib: pip install matplotlib") from None
    if path.is_dir() or not path.suffix:  # matplotlib would write to another name
        raise PlanError(f"--picture {str(path)!r}: give a file name that ends in .png")

    machine, rows = plan["machine"], {one["name"]: one["memory"] for one in plan["layouts"]}
    figure = Figure(figsize=(10, 1.6 + 0.34 * len(rows)), layout="constrained")
    axes = figure.subplots()
    left = [0.0] * len(rows)
    for part in plan["memory"]:
        values = [one[part] / 1e9 for one in rows.values()]
        if part not in ("total", "reused") and any(values):
            axes.barh(list(rows), values, left=left, label=part)
            left = [a + b for a, b in zip(left, values)]
    if not math.isinf(machine["memory"]):
        label = f"{machine['name']}: {size_of(machine['memory'])}"
        axes.axvline(machine["memory"] / 1e9, color="black", linestyle="--", label=label)
    axes.set_title(
        f"{plan['model']['name']} parameters on {machine['nodes']} × {machine['gpus_per_node']} "
        f"GPUs, sequences of {plan['batch']['seq_len']} tokens"
    )
    axes.set_xlabel("GB on the fullest rank")
    axes.invert_yaxis()
    axes.legend(loc="lower right")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise PlanError(f"--picture {path}: {error}") from None
