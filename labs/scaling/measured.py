"""What was measured, as figures: speeds, and what several ranks lose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from labs.scaling.team import Block


class Measured:
    """One block's rounds, each with what every rank measured."""

    def __init__(self, block: Block, rounds: Sequence[Sequence[dict]]) -> None:
        self.block, self.rounds = block, rounds

    def speeds(self) -> np.ndarray:
        """Tokens per second of all ranks together, of each round."""
        return np.array([sum(r["tokens"] / sum(r["seconds"]) for r in one) for one in self.rounds])

    def durations(self) -> np.ndarray:
        """Every step: [rounds, ranks, steps]."""
        return np.array([[r["seconds"] for r in ranks] for ranks in self.rounds])

    def step_seconds(self) -> np.ndarray:
        """Mean duration of a step over the ranks, of each round."""
        return self.durations().mean(axis=(1, 2))


def by_block(blocks: Sequence[Block], results: Sequence[dict]) -> dict[tuple, Measured]:
    """Measurements by (what, ranks), from what the ranks of all teams returned, in any order."""
    measured = {}
    for block in blocks:
        ranks = [found[block] for found in results if block in found]
        measured[block.what, block.ranks] = Measured(block, list(zip(*ranks)))
    return measured


def row_of(what: str, ranks: int, measured: dict[tuple, Measured]) -> dict[str, Any]:
    """A row of scaling.csv.

    Ratios are formed within a round, in which everything had its turn within seconds; the figures
    are medians over the rounds.
    """
    own = measured[what, ranks]
    speeds, one = own.speeds(), measured["strong" if what == "strong" else "weak", 1].speeds()
    speedup = np.median(speeds / one)
    row = {
        "scaling": what, "ranks": ranks, "threads_per_rank": own.block.threads,
        "batch_per_rank": own.block.batch, "tokens_per_second": np.median(speeds),
        "slowest_round": speeds.min(), "fastest_round": speeds.max(),
        "step_ms": 1e3 * np.median(own.step_seconds()), "speedup": speedup,
        "efficiency": speedup / ranks,
    }  # fmt: skip
    if ("all cores", 1) in measured:
        row["of_all_cores"] = np.median(speeds / measured["all cores", 1].speeds())
    if what == "weak" and ranks > 1:
        full, alone = own.step_seconds(), measured["independent", ranks]
        unsynchronized = measured["no_sync", ranks].step_seconds()
        row["of_independent"] = np.median(speeds / alone.speeds())
        row["waiting_share"] = np.median((unsynchronized - alone.step_seconds()) / full)
        row["all_reduce_share"] = np.median(1 - unsynchronized / full)
    return {key: float(v) if isinstance(v, np.floating) else v for key, v in row.items()}
