"""How a run scales with the number of GPUs."""

from __future__ import annotations

import dataclasses

from labs.planner.runs import Layout, Run
from labs.planner.time import step_seconds


def resized(layout: Layout, gpus: int) -> Layout:
    """The same way of dividing on another number of GPUs."""
    data = max(1, gpus // (layout.tensor * layout.pipeline))
    whole = layout.shard == layout.data
    shard = data if whole else min(layout.shard, data)
    return dataclasses.replace(layout, data=data, shard=shard)


def efficiency(run: Run, layout: Layout, gpus: int, strong: bool = False) -> float:
    """Tokens a second and GPU, as a share of what computing alone would give.

    Weak scaling keeps the batch of a GPU; strong scaling keeps the global one, so that each GPU has
    less to do between two exchanges; 0 if there are more ranks than sequences.
    """
    there = resized(layout, gpus)
    if strong:
        sequences = run.batch * run.accum * layout.data // there.data
        if not sequences:
            return 0.0
        batch = min(run.batch, sequences)
        run = dataclasses.replace(run, batch=batch, accum=max(1, round(sequences / batch)))
    parts = step_seconds(dataclasses.replace(run, machine=run.machine.of_size(gpus)), there)
    return parts["compute"] / parts["total"]


def scaling(run: Run, layout: Layout) -> list[dict[str, float]]:
    """Efficiency by number of GPUs."""
    sizes = sorted({1, 8, 16, 32, 128, 1024, 4096, layout.gpus})
    return [
        {"gpus": n, "weak": efficiency(run, layout, n),
         "strong": efficiency(run, layout, n, strong=True)}
        for n in sizes if n >= layout.tensor * layout.pipeline
    ]  # fmt: skip
