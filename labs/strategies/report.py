"""What strategies have to say, one or all: tables, notes, and whether the numbers are right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from labs.shared.report import paragraph, size_of, table
from labs.strategies.train import MEMORY
from llm_ddp_parallel_training import RunError

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
            f"{count:.3g} × {kind} {size(link / count)}".replace(" ", GLUE)
            for kind, (count, _, link) in sorted(busiest.items())
        ]
        total = f"{over_links(busiest) / 1e6:.2f}"
        links.append([name, len(report["ranks"]), *apart, total, ", ".join(messages) or "nothing"])
        notes += [paragraph(f"{name}: {note}", "  ") for note in notes_of(report)]
    return "\n".join([
        "What a rank holds, in MB", table(held, ["", "ranks", *MEMORY]), "",
        "How far from one process; what the busiest rank sends over its link in a step",
        table(links, LINKS, "<>>>><").replace(GLUE, " "),
        *([""] if notes else []), *notes,
    ])  # fmt: skip


def over_links(traffic: dict[str, Sequence[float]]) -> float:
    """Bytes of a step that cross the rank's link."""
    return sum(link for _, _, link in traffic.values())


def size(count: float) -> str:
    """Bytes as '0.37 MB': small models need a figure more than `size_of` gives."""
    return f"{count / 1e6:.2f} MB" if count >= 1e4 else size_of(count)


def notes_of(report: dict) -> list[str]:
    """What only a pipeline and a parameter server have to say."""
    notes, pipeline = [], report.get("pipeline", {})
    if "bubble" in pipeline:
        notes.append(
            f"of a step a stage works {pipeline['work']:.0%}, waits for another's work "
            f"{pipeline['bubble']:.0%} (the bubble, by the formula {pipeline['formula']:.0%}) and "
            f"spends {pipeline['rest']:.0%} on messages and Python"
        )
    if set(report.get("staleness", {})) - {0, "0"}:
        counts = ", ".join(f"{count} × {by}" for by, count in report["staleness"].items())
        workers, updates = len(report["ranks"]) - 1, len(report["losses"])
        notes.append(
            f"{updates} updates, each from the 1/{workers} of a batch that one worker has, at the "
            f"rate of the {report['steps']} that waiting for all would be: its losses cannot be "
            f"compared. Staleness of the gradients, in updates: {counts}"
        )
    return notes
