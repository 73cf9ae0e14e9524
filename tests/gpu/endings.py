"""How runs end on a GPU that do not end well."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

from gpu.bench import Bench
from gpu.table import Row, must


def out_of_memory(bench: Bench) -> Iterator[Row]:
    """One line that says what to lower, instead of a traceback."""
    import torch

    if bench.cuda:  # a card that is large enough for nothing
        torch.cuda.set_per_process_memory_fraction(0.001)
    run = bench.main("small", f"{bench.tiny} --d-model {4096 if bench.cuda else 1_000_000}")
    lines = [line for line in run.said.splitlines() if "out of memory" in line]
    line = lines[0] if len(lines) == 1 else f"{len(lines)} lines name it"
    good = "lower --batch-size first" in line and "Traceback" not in run.said
    yield must(
        "out of memory",
        f"status {run.status}: {line}"[:66],
        "status 1, one line",
        run.status == 1 and good,
    )


def lost_rank(bench: Bench, where: str) -> Iterator[Row]:
    """Rank 1 of 2 is killed, or raises: how long until all are gone, and who is named for it.

    Under NCCL nothing is raised on the other rank; the launcher's SIGTERM alone ends it, and 30 s
    later its SIGKILL would.
    """
    for kind, cause in (("SIGKILL", "SIGKILL"), ("exception", "injected failure")):
        flags = f"{bench.tiny} --max-steps 2000 --val-fraction 0"
        run = bench.start(kind, 2, flags, [{"kind": kind, "rank": 1, "update": 6}])
        # The last line of the log was written when the rank was lost.
        seconds = time.time() - (run.folder / "metrics.jsonl").stat().st_mtime
        summary = run.said.partition("Root Cause (first observed failure):")[2]
        named = re.search(r"rank +: (\d+)", summary)
        rank = named[1] if named else "nobody"
        yield must(
            f"{where}, rank 1: {kind}",
            f"{run.choice('backend')}: all gone after {seconds:.0f} s, cause: rank {rank}"
            + ("" if cause in summary else " for another reason"),
            "rank 1, within 27 s",
            run.status == 1 and rank == "1" and cause in summary and seconds < 27,
        )


def lost_on_one_device(bench: Bench) -> Iterator[Row]:
    yield from lost_rank(bench, "one device")


def lost_on_two_gpus(bench: Bench) -> Iterator[Row]:
    if bench.cuda and bench.facts["cards"] < 2:
        yield Row("2 GPUs, a lost rank", "not run: there is one GPU")
    else:
        yield from lost_rank(bench, "2 GPUs")
