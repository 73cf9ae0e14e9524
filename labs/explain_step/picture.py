"""A timeline of the ranks, the gradients, and a trace for a viewer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from labs.explain_step.observe import COPIES
from labs.explain_step.report import without_prefix
from labs.explain_step.step import WAIT
from labs.shared.plot import new_figure, save_figure

SENT = "all-reduce of a bucket"
COLORS = {
    "forward": "tab:blue", "backward": "tab:green", WAIT: "lightgreen",
    "sum of losses": "tab:purple", "optimizer": "tab:red", COPIES: "lightgrey",
    SENT: "tab:orange",
}  # fmt: skip


def draw(steps: list[dict], path: Path) -> None:
    """The timeline of the last update, and its gradients before and after the all-reduce."""
    count = len(steps[-1]["ranks"])
    figure = new_figure(12, 5.5 + 0.9 * count)
    above, below = figure.subplots(2, height_ratios=(1 + 0.9 * count, 4))
    draw_timeline(above, steps[-1], f"Update {len(steps)}, rank by rank, in ms")
    draw_gradients(below, steps[-1])
    save_figure(figure, path)


def draw_timeline(axes: Any, step: dict, title: str) -> None:
    """A lane for each rank: its phases, and below them its buckets while they are under way."""
    from matplotlib.patches import Patch

    ranks = step["ranks"]
    origin = min(rank["phases"][0][1] for rank in ranks)
    for y, rank in enumerate(ranks):
        for name, begin, end in rank["phases"]:
            axes.barh(
                y - 0.2, 1e3 * (end - begin), 0.34, 1e3 * (begin - origin), color=COLORS[name],
                hatch="//" if name == WAIT else None, edgecolor="white", lw=0.3,
            )  # fmt: skip
        buckets = rank["buckets"]
        height = 0.4 / max(len(buckets), 1)
        for i, bucket in enumerate(buckets):
            middle = y + 0.03 + (i + 0.5) * height
            sent, done = (1e3 * (bucket[x] - origin) for x in ("sent", "done"))
            axes.barh(middle, done - sent, 0.85 * height, sent, color=COLORS[SENT])
            if len(buckets) <= 8:
                label = f" {i}: {bucket['bytes'] / 1e3:,.0f} kB"
                axes.text(done, middle, label, fontsize=7, va="center")
    seen = {name for rank in ranks for name, *_ in rank["phases"]}
    seen |= {SENT} if ranks[0]["buckets"] else set()
    axes.legend(
        handles=[Patch(color=c, label=name) for name, c in COLORS.items() if name in seen],
        ncols=7, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False,
    )  # fmt: skip
    axes.set(
        yticks=range(len(ranks)), yticklabels=[f"rank {r['rank']}" for r in ranks],
        ylim=(len(ranks) - 0.4, -0.5), title=title,
    )  # fmt: skip


def draw_gradients(axes: Any, step: dict) -> None:
    """The norms of each layer's gradient: every rank's own, and the averaged one."""
    from matplotlib import colormaps

    ranks, layers = step["ranks"], list(step["gradient_norms"])
    bars = [
        (f"rank {r['rank']}, before", r["local_gradient_norms"],
         colormaps["Blues"](0.35 + 0.5 * i / len(ranks)))
        for i, r in enumerate(ranks)
    ]  # fmt: skip
    bars.append(("averaged, after", step["gradient_norms"], "black"))
    width = 0.8 / len(bars)
    for i, (label, norms_of, color) in enumerate(bars):
        places = [x + (i - (len(bars) - 1) / 2) * width for x in range(len(layers))]
        axes.bar(places, [norms_of[layer] for layer in layers], width, label=label, color=color)
    slant = {"rotation": 45, "ha": "right"} if len(layers) > 10 else {}
    names = [*without_prefix(layers[:-1]), "total"]
    axes.set_xticks(range(len(layers)), names, fontsize=8, **slant)
    axes.set(ylabel="norm", title="Gradients before and after the all-reduce")
    axes.legend(fontsize=8)
    axes.grid(axis="y", alpha=0.3)


def trace_events(steps: list[dict]) -> dict:
    """The timeline in the Trace Event Format: a process for each rank, times in microseconds.

    Format: "Trace Event Format", the Chromium project; read by Perfetto and chrome://tracing. Each
    bucket has a thread of its own, since all-reduces that are under way at once do not nest.
    Updates are laid one after another, without what the lab does in between.
    """
    events: list[dict] = []

    def name(what: str, rank: int, thread: int, text: str) -> None:
        events.append(
            {"name": what, "ph": "M", "pid": rank, "tid": thread, "args": {"name": text}}
        )  # fmt: skip

    for rank in range(len(steps[0]["ranks"])):
        name("process_name", rank, 0, f"rank {rank}")
        name("thread_name", rank, 0, "step")
        for i in range(max(len(step["ranks"][rank]["buckets"]) for step in steps)):
            name("thread_name", rank, i + 1, f"all-reduce of bucket {i}")
    offset = 0.0
    for number, step in enumerate(steps, 1):
        first = min(rank["phases"][0][1] for rank in step["ranks"])
        for rank in step["ranks"]:
            spans = [(what, 0, begin, end, {}) for what, begin, end in rank["phases"]]
            spans += [
                (f"bucket {i}", i + 1, bucket["sent"], bucket["done"],
                 {"bytes": bucket["bytes"], "parameters": bucket["parameters"]})
                for i, bucket in enumerate(rank["buckets"])
            ]  # fmt: skip
            events += [
                {"name": what, "cat": "step", "ph": "X", "pid": rank["rank"], "tid": thread,
                 "ts": 1e6 * (offset + begin - first), "dur": 1e6 * (end - begin),
                 "args": {"update": number, **arguments}}
                for what, thread, begin, end, arguments in spans
            ]  # fmt: skip
        offset += max(rank["phases"][-1][2] for rank in step["ranks"]) - first + 1e-3
    return {"traceEvents": events, "displayTimeUnit": "ms"}
