"""What the measurements say: tables, a conclusion, a picture, a CSV file."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path
from typing import Any

from labs.shared.plot import new_figure, save_figure
from labs.shared.report import counted, paragraph, table
from llm_ddp_parallel_training import write_whole

COLUMNS = {  # of the table: names in scaling.csv, and how they are written
    "ranks": ("ranks", ""), "batch": ("batch_per_rank", ""),
    "tokens/s": ("tokens_per_second", ",.0f"), "step ms": ("step_ms", ".1f"),
    "speedup": ("speedup", ".2f"),
    "of indep.": ("of_independent", ".0%"), "waiting": ("waiting_share", ".0%"),
    "all-reduce": ("all_reduce_share", ".0%"),
}  # fmt: skip
CALM = 0.6  # slowest to fastest round; below that, the machine was not ours
NAMES = {
    "weak": "weak scaling", "independent": "independent", "strong": "strong scaling",
    "all cores": "one process, {} threads",
}  # fmt: skip
LEGEND = (
    "weak: DDP, the batch per rank stays; strong: the global batch stays; independent: processes "
    "that share nothing but the machine, and DDP's speed as a share of theirs; waiting for each "
    "other and all-reduce: shares of a step"
)


def as_table(rows: list[dict]) -> str:
    """The measurements, with a legend, in at most 100 columns."""
    lines = []
    for what, name in NAMES.items():
        for row in (row for row in rows if row["scaling"] == what):
            cells = (format(row.get(key, ""), how * (key in row)) for key, how in COLUMNS.values())
            lines.append([name.format(row["threads_per_rank"]), *cells])
            name = ""
    return f"{table(lines, ['', *COLUMNS])}\n{paragraph(LEGEND)}"


def verdict(weak: dict) -> tuple[str, float]:
    """Whether DDP on so many ranks pays here, and how many times as fast it is as the alternative.

    The alternative is one process, with the cores of all ranks where there are more than its own.
    """
    gain = min(weak["speedup"], weak.get("of_all_cores", math.inf))
    if gain > 1.05:
        return "is worth it here", gain
    return ("makes no difference here" if gain > 0.95 else "does not pay here"), gain


def conclusion(rows: list[dict], ranks: int, cores: int) -> str:
    """What DDP brings and costs here, in plain words."""
    by = {(row["scaling"], row["ranks"]): row for row in rows}
    weak, machine = by["weak", ranks], by["independent", ranks]["efficiency"]
    text = f"DDP on {ranks} ranks {verdict(weak)[0]}: {weak['speedup']:.2f} times as fast as one "
    text += "rank alone"
    if "of_all_cores" in weak:
        text += f", and {weak['of_all_cores']:.2f} times as fast as one process with all threads"
    text += (
        f". All ranks share this machine's {counted(cores, 'core')}, caches and memory bus: "
        f"{ranks} processes that know nothing of each other reach {machine:.0%} of {ranks} times "
        f"one, and of that DDP keeps {weak['of_independent']:.0%}."
    )
    if busy := noise(rows):
        text += (
            f" The machine was busy with other things: rounds differ by up to {busy:.1f} times, so "
            "do not read much into these figures."
        )
    elif ranks * weak["threads_per_rank"] > cores:
        text += " With more ranks than cores, ranks also take turns."
    return text


def noise(rows: list[dict]) -> float:
    """By how many times rounds differ, if it is so much that the machine was not ours; else 0."""
    calm = min(row["slowest_round"] / row["fastest_round"] for row in rows)
    return 1 / calm if calm < CALM else 0.0


def draw(rows: list[dict], path: Path) -> None:
    """Is DDP worth it here? Speeds as bars, and what a step consists of."""
    by = {(row["scaling"], row["ranks"]): row for row in rows}
    ranks = sorted({n for what, n in by if what == "weak"})
    figure = new_figure(12, 2.6 + 0.8 * len(ranks))
    speed, parts = figure.subplots(1, 2, width_ratios=(3, 2))
    if ranks[-1] > 1:
        better, gain = verdict(by["weak", ranks[-1]])
        doubt = " (but the machine was busy)" if noise(rows) else ""
        title = f"DDP on {ranks[-1]} ranks {better}: {gain:.2f} times the best single process"
        figure.suptitle(title + doubt, fontsize=15)
    draw_speed(speed, by, ranks)
    draw_parts(parts, [by["weak", n] for n in ranks])
    save_figure(figure, path)


def draw_speed(axes: Any, by: dict[tuple, dict], ranks: list[int]) -> None:
    """Tokens per second of each way to use the machine, slowest and fastest round as a line."""
    bars = []
    for row in (by[key] for key in (("weak", 1), ("all cores", 1)) if key in by):
        bars.append(
            (f"one process, {counted(row['threads_per_rank'], 'thread')}", row, "lightgray")
        )
    for n in ranks[1:]:
        bars.append((f"DDP, {n} ranks", by["weak", n], "cornflowerblue"))
        bars.append((f"{n} independent processes", by["independent", n], "aliceblue"))
    for place, (_, row, color) in enumerate(bars):
        middle = row["tokens_per_second"]
        error = [[middle - row["slowest_round"]], [row["fastest_round"] - middle]]
        look = {"color": color, "edgecolor": "dimgray", "ecolor": "dimgray"}
        axes.barh(place, middle, 0.7, xerr=error, **look)
    names = [f"{name}\n{row['tokens_per_second']:,.0f}" for name, row, _ in bars]
    axes.set_yticks(range(len(bars)), names)
    axes.invert_yaxis()
    axes.set(xlabel="tokens/s", title="Speed; independent processes are the most this machine has")
    axes.grid(axis="x", alpha=0.3)


def draw_parts(axes: Any, weak: list[dict]) -> None:
    """Stacked milliseconds of a step, a bar for each number of ranks."""
    names, bottom = [counted(row["ranks"], "rank") for row in weak], [0.0] * len(weak)
    parts = {
        "waiting, sum of losses": "waiting_share",
        "all-reduce of gradients": "all_reduce_share",
    }
    # A share that noise made negative is not seen.
    shares = {name: [max(row.get(key, 0.0), 0.0) for row in weak] for name, key in parts.items()}
    own = [1 - sum(added) for added in zip(*shares.values())]
    colors = ("lightsteelblue", "tab:orange", "tab:red")
    for color, (name, part) in zip(colors, {"own work": own, **shares}.items()):
        heights = [row["step_ms"] * share for row, share in zip(weak, part)]
        axes.bar(names, heights, bottom=bottom, label=name, width=0.5, color=color)
        bottom = [a + b for a, b in zip(bottom, heights)]
    axes.set(ylabel="ms", title="A step: what DDP adds", ylim=(0, 1.4 * max(bottom)))
    axes.legend(fontsize=9, loc="upper left")


def write_csv(rows: list[dict], path: Path) -> None:
    """One row a measurement; a column that says nothing about it is empty."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, lambda to: to.write_text(text.getvalue(), "utf-8"))
