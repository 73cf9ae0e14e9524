"""What background checkpoints cost: updates with --save-every 10 beside updates without.

    python tests/benchmarks/checkpoint_cost.py [--batch-size 32] [--pairs 10]

One process, a tiny model of about 10 million parameters (a state of about 120 MB). In one run of
the script, every second stretch of ten updates saves and its neighbour does not, so that a drift of
the machine meets both alike. A stretch begins with the copy of the state, and the writer works
beside its updates. The table gives the medians, and the cost as the median over neighbours; the
target is 3 %.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import llm_ddp_parallel_training as ddp  # noqa: E402

EVERY = 10  # updates
# 12 · d² · layers + (2 · 258 + 128) · d = 9.77 million
MODEL = ("--d-model", "448", "--layers", "4", "--heads", "7", "--seq-len", "128")
DATA = ("--builtin", "python-docs", "--val-fraction", "0", "--cpu")


def seconds_of_stretches(batch: int, pairs: int) -> list[float]:
    """Seconds of 2 · `pairs` stretches of ten updates: with a save, without, with, …"""
    ends: list[float] = []  # of update 1, 2, …
    update, save = ddp.RunLog.update, ddp.Trainer.save

    def update_and_note(log: ddp.RunLog, *arguments: object) -> None:
        update(log, *arguments)
        ends.append(time.perf_counter())

    def save_every_second_time(trainer: ddp.Trainer) -> None:
        if trainer.progress.step // EVERY % 2:
            save(trainer)

    ddp.RunLog.update, ddp.Trainer.save = update_and_note, save_every_second_time
    updates = EVERY * (2 * pairs + 1)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        sys.argv = [
            "llm_ddp_parallel_training.py", *MODEL, *DATA, "--batch-size", str(batch),
            "--max-steps", str(updates), "--log-every", str(updates), "--save-every", str(EVERY),
            "--output-dir", f"{folder}/run",
        ]  # fmt: skip
        ddp.main()
    # The first ten updates warm up; what comes after the last one is no longer timed.
    marks = ends[EVERY - 1 :: EVERY]
    return [end - begin for begin, end in itertools.pairwise(marks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=10, help="of stretches (default: 10)")
    parser.add_argument(
        "--batch-size", type=int, default=32, help="windows of 128 an update (default: 32)"
    )
    arguments = parser.parse_args()
    seconds = seconds_of_stretches(arguments.batch_size, arguments.pairs)
    saving, without = seconds[0::2], seconds[1::2]
    ratios = [a / b for a, b in zip(saving, without)]
    print(f"ten updates of {arguments.batch_size * 127:,} tokens, {len(ratios)} pairs")
    print(f"with a save     {statistics.median(saving):.3f} s")
    print(f"without         {statistics.median(without):.3f} s")
    print(f"cost of saving  {100 * (statistics.median(ratios) - 1):.1f} %  (target: at most 3 %)")
    print("each pair       " + " ".join(f"{100 * (ratio - 1):+.1f}" for ratio in ratios))


if __name__ == "__main__":
    main()
