"""Six symptoms as a picture, wrong and right."""

from __future__ import annotations

from pathlib import Path

from labs.break_it.runner import Finding
from labs.shared.plot import new_figure, save_figure

DRAWN = {  # what a bug's number is, and how it is written
    "no-sync-on-last": ("largest difference between\nthe ranks' weights", "{:.1e}"),
    "mean-of-means": ("gradient: relative distance\nfrom that of one process", "{:.1e}"),
    "no-set-epoch": ("share of samples at the same\nplace in both epochs", "{:.0%}"),
    "validation-padding": ("validation loss: distance\nfrom that of one process", "{:.1e}"),
    "clip-before-unscale": ("norm of the gradient used;\nthe limit is 0.1", "{:.2g}"),
    "rank-0-collective": ("ranks that wait for ever", "{:.0f}"),
}


def draw(findings: dict[str, dict[str, Finding]], path: Path) -> None:
    """A bar for each version of these six, as a PNG."""
    figure = new_figure(12, 5.5)
    for axes, (name, (unit, form)) in zip(figure.subplots(2, 3).flat, DRAWN.items()):
        values = [findings[name][version].number for version in ("wrong", "right")]
        axes.bar(("wrong", "right"), values, color=("tab:red", "tab:green"), width=0.5)
        for x, value in enumerate(values):
            axes.text(x, value, form.format(value) if value else "0", ha="center", va="bottom")
        axes.set_ylim(0, 1.15 * max(values))
        axes.set_yticks([])
        axes.set(title=name, xlabel=unit)
    save_figure(figure, path)
