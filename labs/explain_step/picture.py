"""A timeline of the ranks, and the gradients before and after the all-reduce."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from labs.explain_step.observe import COPIES
from labs.explain_step.report import without_module
from labs.explain_step.step import WAIT
from labs.shared.plot import new_figure, save_figure

SENT = "all-reduce of a bucket"
COLORS = {
    "forward": "tab:blue", "backward": "tab:green", WAIT: "lightgreen",
    "sum of losses": "tab:purple", "optimizer": "tab:red", COPIES: "lightgrey",
    SENT: "tab:orange",
}  # fmt: skip


def draw(steps: list[dict], path: Path) -> None:
    """The last update as a PNG."""
    count = len(steps[-1]["ranks"])
    figure = new_figure(12, 5.5 + 0.9 * count)
    above, below = figure.subplots(2, height_ratios=(1 + 0.9 * count, 4))
    draw_timeline(above, steps[-1])
    what = "DDP sends each bucket (orange) while the backward pass goes on" * (count > 1)
    above.set_title(f"Update {len(steps)}, rank by rank, in ms. {what}")
    draw_gradients(below, steps[-1])
    save_figure(figure, path)


def draw_timeline(axes: Any, step: dict) -> None:
    """A lane for each rank: its phases, and below them its buckets while they are under way."""
    from matplotlib.patches import Patch

    ranks, seen = step["ranks"], set()
    origin = min(rank["phases"][0][1] for rank in ranks)

    def bar(y: float, height: float, name: str, begin: float, end: float) -> None:
        begin, end = 1e3 * (begin - origin), 1e3 * (end - origin)
        look = {"color": COLORS[name], "hatch": "//" if name == WAIT else None}
        axes.barh(y, end - begin, height, begin, edgecolor="white", lw=0.3, **look)
        seen.add(name)

    for y, rank in enumerate(ranks):
        for name, begin, end in rank["phases"]:
            bar(y - 0.2, 0.34, name, begin, end)
        buckets = rank["buckets"]
        height = 0.4 / max(len(buckets), 1)
        for i, bucket in enumerate(buckets):
            middle = y + 0.03 + (i + 0.5) * height
            bar(middle, 0.85 * height, SENT, bucket["sent"], bucket["done"])
            if len(buckets) <= 8:
                label = f" {i}: {bucket['bytes'] / 1e3:,.0f} kB"
                axes.text(1e3 * (bucket["done"] - origin), middle, label, fontsize=7, va="center")
    patches = [Patch(color=c, label=name) for name, c in COLORS.items() if name in seen]
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16), "ncols": 7}
    axes.legend(handles=patches, fontsize=8, frameon=False, **place)
    axes.set_yticks(range(len(ranks)), [f"rank {r['rank']}" for r in ranks])
    axes.set_ylim(len(ranks) - 0.4, -0.5)


def draw_gradients(axes: Any, step: dict) -> None:
    """The norms of each layer's gradient: every rank's own, and the averaged one."""
    from matplotlib import colormaps

    ranks, layers = step["ranks"], list(step["gradient_norms"])
    bars = [(f"rank {r['rank']}, before", r["local_gradient_norms"]) for r in ranks]
    bars.append(("averaged, after", step["gradient_norms"]))
    width = 0.8 / len(bars)
    for i, (label, norms) in enumerate(bars):
        color = colormaps["Blues"](0.35 + 0.5 * i / len(ranks)) if i < len(ranks) else "black"
        places = [x + (i - (len(bars) - 1) / 2) * width for x in range(len(layers))]
        axes.bar(places, [norms[layer] for layer in layers], width, label=label, color=color)
    slant = {"rotation": 45, "ha": "right"} if len(layers) > 10 else {}
    axes.set_xticks(range(len(layers)), map(without_module, layers), fontsize=8, **slant)
    axes.set(ylabel="norm", title="Gradients before and after the all-reduce")
    axes.legend(fontsize=8)
    axes.grid(axis="y", alpha=0.3)
