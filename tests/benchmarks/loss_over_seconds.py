"""Draws the validation loss of several runs over seconds of training.

    python tests/benchmarks/loss_over_seconds.py picture.png "before=runs/old" "after=runs/new"

A run is a folder with the metrics.jsonl of `--log-every N --eval-every N`, both the same N. The
seconds are those of the log: neither start-up nor validation counts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure


def points(folder: Path) -> list[tuple[float, float]]:
    """(seconds, validation loss in nats per token) of one run."""
    lines = (folder / "metrics.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    seconds = {row["step"]: row["seconds"] for row in rows if "seconds" in row}
    return [(seconds[row["step"]], row["val_loss"]) for row in rows if "val_loss" in row]


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for run in sys.argv[2:]:
        label, folder = run.split("=", 1)
        drawn = points(Path(folder))
        axes.plot(*zip(*drawn), "o-", label=f"{label}, last {drawn[-1][1]:.3f}", lw=1.5, ms=3)
    axes.set(xlabel="seconds of training", ylabel="validation loss (nats per byte)")
    axes.set(title="The same model, before and after", ylim=(None, 3.0))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(sys.argv[1], dpi=110)


if __name__ == "__main__":
    main()
