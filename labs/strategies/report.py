"""What one strategy's ranks have to say, as one report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from labs.shared.report import paragraph, size_of, table
from labs.strategies.train import MEMORY

OF_A_RANK = (*MEMORY, "traffic")


def combined(found: Sequence[dict | None]) -> dict[str, Any]:
    """One report from those of all ranks, in rank order; `None` for a rank that died.

    What rank 0 says counts for all, but for what each rank holds and sends: that is `ranks`.
    """
    report = {key: value for key, value in found[0].items() if key not in OF_A_RANK}
    ranks = [rank and {key: rank[key] for key in OF_A_RANK} for rank in found]
    return {**report, "ranks": ranks}


def as_text(report: dict) -> str:
    """What each rank held and sent, how near it came to one process, what follows."""
    rows = []
    for number, rank in enumerate(report["ranks"]):
        held = [f"{rank[part] / 1e6:.2f}" if rank else "gone" for part in MEMORY]
        rows.append([number, *held, traffic_text(rank["traffic"]) if rank else "–"])
    align = "<" + ">" * len(MEMORY) + "<"
    lines = ["\nMB that a rank holds, and what it sends over its link in a step"]
    lines.append(table(rows, ["rank", *MEMORY, "sends"], align))
    lines += ["", *(paragraph(note) for note in notes_of(report))]
    if "loss_difference" in report:
        lines.append(paragraph(
            "These are the numbers of one process: gradients of the first step differ by "
            f"{report['gradient_difference']:.1e} of a tensor's largest value, losses by "
            f"{report['loss_difference']:.1e}."
        ))  # fmt: skip
    else:
        lines.append("These are not the numbers of one process, so there is nothing to compare.")
    return "\n".join(lines)


def traffic_text(traffic: dict[str, Sequence[float]]) -> str:
    """'3 all-reduces of 3.4 MB together, …', or 'nothing'."""
    parts = [
        f"{count:.3g} {kind}{'s' * (count > 1)}, {size(link)}{' together' * (count > 1)}"
        for kind, (count, _, link) in sorted(traffic.items())
    ]
    return "; ".join(parts) or "nothing"


def size(count: float) -> str:
    """Bytes as '3.30 MB'; with one figure more than `size_of`, for small models."""
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
            f"learning rate of the {updates // workers} that waiting for all would be: so its losses "
            f"cannot be compared. Staleness of the gradients, in updates: {counts}"
        )
    return notes
