"""What strategies have to say, one or all: tables, notes, a picture, and whether it is right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from labs.shared.plot import new_figure, save_figure
from labs.shared.report import counted, paragraph, size_of, table
from llm_ddp_parallel_training import RunError

STATES = ("parameters", "gradients", "optimizer")
MEMORY = (*STATES, "gathered", "activations")
OF_A_RANK = (*MEMORY, "traffic")
GRADIENT_LIMIT = 1e-5  # of the first step, relative to the largest value of the same tensor
LOSS_LIMIT = 1e-4  # nats per token, at every step
LINKS = ("", "ranks", "Δ gradient", "Δ loss", "MB", "messages, and the size of one")
GLUE = "\xa0"  # a space at which no line is broken


def combined(found: Sequence[dict | None]) -> dict[str, Any]:
    """One report from those of all ranks, in rank order; `None` for a rank that died.

    What rank 0 says counts for all, but for what each rank holds and sends: that is `ranks`.
    """
    left_out = {*OF_A_RANK, "first_gradients"}
    report = {key: value for key, value in found[0].items() if key not in left_out}
    ranks = [rank and {key: rank[key] for key in OF_A_RANK} for rank in found]
    return {**report, "ranks": ranks}


def require_equal(report: dict) -> None:
    """Raises `RunError` unless gradients and losses are those of one process, within rounding."""
    gradient, loss = report.get("gradient_difference", 0), report.get("loss_difference", 0)
    if not (gradient <= GRADIENT_LIMIT and loss <= LOSS_LIMIT):  # NaN fails too
        raise RunError(
            f"{report['strategy']} differs from one process: gradients of the first step by "
            f"{gradient:.1e} (allowed {GRADIENT_LIMIT}), losses by {loss:.1e} ({LOSS_LIMIT})"
        )


def as_text(reports: dict[str, dict]) -> str:
    """What each rank holds and sends, by the name of the strategy, with what is to be noted."""
    held, links, notes = [], [], []
    for name, report in reports.items():
        shares: dict[tuple, list[str]] = {}  # the ranks that hold the same
        for number, rank in enumerate(report["ranks"]):
            share = tuple(f"{rank[part] / 1e6:.2f}" if rank else "gone" for part in MEMORY)
            shares.setdefault(share, []).append(str(number))
        for share, numbers in shares.items():
            held.append([name, "all" if len(shares) == 1 else ", ".join(numbers), *share])
        apart = [report.get(f"{of}_difference") for of in ("gradient", "loss")]
        apart = ["–" if x is None else f"{x:.0e}" for x in apart]
        busiest = max((rank["traffic"] for rank in report["ranks"] if rank), key=over_links)
        messages = [
            f"{count:.3g} × {kind} {small_size(link / count)}".replace(" ", GLUE)
            for kind, (count, _, link) in sorted(busiest.items())
        ]
        total = f"{over_links(busiest) / 1e6:.2f}"
        links.append([name, len(report["ranks"]), *apart, total, ", ".join(messages) or "nothing"])
        if note := note_of(report):
            notes.append("\n" + paragraph(f"{name}: {note}", "  "))
    held_title = "What a rank holds, in MB"
    links_title = "How far from one process; what the busiest rank sends over its link in a step"
    links_table = table(links, LINKS, "<>>>><").replace(GLUE, " ")
    text = [held_title, table(held, ["", "ranks", *MEMORY]), "", links_title, links_table]
    return "\n".join([*text, *notes])


def over_links(traffic: dict[str, Sequence[float]]) -> float:
    """Bytes of a step that cross the rank's link."""
    return sum(link for _, _, link in traffic.values())


def small_size(count: float) -> str:
    """Bytes as '0.37 MB': small models need a figure more than `size_of` gives."""
    return f"{count / 1e6:.2f} MB" if count >= 1e4 else size_of(count)


def note_of(report: dict) -> str:
    """What only a pipeline or an asynchronous parameter server has to say."""
    if "bubble" in (found := report.get("pipeline", {})):
        return (
            f"of a step a stage works {found['work']:.0%}, waits for another's work "
            f"{found['bubble']:.0%} (the bubble, by the formula {found['formula']:.0%}) and "
            f"spends {found['rest']:.0%} on messages and Python"
        )
    if not set(report.get("staleness", {})) - {0}:
        return ""
    counts = ", ".join(f"{count} × {by}" for by, count in report["staleness"].items())
    workers, updates = len(report["ranks"]) - 1, len(report["losses"])
    return (
        f"{updates} updates, each from the 1/{workers} of a batch that one worker has, at the "
        f"rate of the {report['steps']} that waiting for all would be: its losses cannot be "
        f"compared. Staleness of the gradients, in updates: {counts}"
    )


def conclusion(reports: dict[str, dict]) -> str:
    """What the figures say, in plain words."""
    others = ("FSDP", "tensor", "pipeline, 1F1B")
    if not {"DDP", *others} <= reports.keys():
        return "Too few ways were run to compare them."

    def most(name: str) -> tuple[float, float]:
        """Bytes of state and bytes sent, of the rank with the most."""
        ranks = reports[name]["ranks"]
        states = max(sum(rank[part] for part in STATES) for rank in ranks)
        return states, max(over_links(rank["traffic"]) for rank in ranks)

    ddp = most("DDP")
    state, sent = zip(*([a / b for a, b in zip(most(name), ddp)] for name in others))
    return (
        "All ways give the numbers of one process, but for the asynchronous server; they differ in "
        "what a rank holds and what it sends. On two ranks FSDP and tensor parallelism hold "
        f"{state[0]:.0%} and {state[1]:.0%} of DDP's weights, gradients and optimizer state, the "
        f"pipeline {state[2]:.0%}, and send {sent[0]:.1f}, {sent[1]:.1f} and {sent[2]:.1f} times "
        "as many bytes. So: DDP while the model with its optimizer fits into each device, then "
        "FSDP, and the others where layers are too large or links too slow for it."
    )


def draw(reports: dict[str, dict], path: Path) -> None:
    """Two panels with a bar per rank: what it holds, and what it sends over its link in a step."""
    from matplotlib import colormaps

    figure = new_figure(11, 6)
    memory, links = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    ranks = [rank for report in reports.values() for rank in report["ranks"]]
    counts = [len(report["ranks"]) for report in reports.values()]
    places = [at - 0.45 + 0.9 * (i + 0.5) / n for at, n in enumerate(counts) for i in range(n)]
    heights = [0.8 / n for n in counts for _ in range(n)]

    def stack(axes: Any, title: str, colors: str, where: str, parts: dict) -> None:
        """One panel; each part begins where the last one ended."""
        left = [0.0] * len(ranks)
        for color, (name, values) in zip(colormaps[colors].colors, parts.items()):
            axes.barh(places, values, heights, left=left, label=name, color=color)
            left = [a + b for a, b in zip(left, values)]
        axes.set(title=title, xlabel="MB", xlim=(0, 1.05 * max(left)))
        axes.grid(axis="x", alpha=0.3)
        axes.legend(fontsize=9, loc=where)

    held = {part: [rank[part] / 1e6 for rank in ranks] for part in MEMORY}
    stack(memory, "A rank holds", "tab10", "lower right", held)
    kinds = sorted({kind for rank in ranks for kind in rank["traffic"]})
    sent = {k: [r["traffic"].get(k, (0, 0, 0))[2] / 1e6 for r in ranks] for k in kinds}
    stack(links, "A rank sends over its link in a step", "Set2", "upper right", sent)
    names = [f"{name}\n{counted(n, 'rank')}" for name, n in zip(reports, counts)]
    memory.set_yticks(range(len(reports)), names)
    memory.invert_yaxis()
    save_figure(figure, path)
