"""What background checkpoints cost: the same run with --save-every 10 and without, in turns.

    python tests/benchmarks/checkpoint_cost.py --rounds 3

One process, a tiny model of about 10 million parameters (a state of about 120 MB). The clock of
`metrics.jsonl` stands still while the run saves, so the time is taken from outside: from the first
log line of an update to the last line of the training, all waiting for saves included. Prints one
table with the medians and their ratio; the target is 3 %.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "llm_ddp_parallel_training.py"
# 12 · d² · layers + (2 · 258 + 128) · d = 9.77 million
MODEL = ("--d-model", "448", "--layers", "4", "--heads", "7", "--seq-len", "128")
DATA = ("--builtin", "python-docs", "--val-fraction", "0")


def tokens_per_second(batch: int, updates: int, save_every: int, warmup: int) -> float:
    """Tokens a second from update `warmup` to the end of the training."""
    with tempfile.TemporaryDirectory() as folder:
        args = [
            sys.executable, str(SCRIPT), "--cpu", *MODEL, *DATA, "--max-steps", str(updates),
            "--batch-size", str(batch), "--log-every", "1", "--save-every", str(save_every),
            "--output-dir", f"{folder}/run",
        ]  # fmt: skip
        with subprocess.Popen(args, stdout=subprocess.PIPE, text=True, encoding="utf-8") as run:
            begin = end = 0.0
            for line in run.stdout:
                if line.startswith(f"step {warmup:>6}/"):
                    begin = time.perf_counter()
                if line.startswith(f"step {updates:>6}/"):
                    end = time.perf_counter()
            if run.wait():
                raise SystemExit(f"the run failed with status {run.returncode}")
    # The last save, which begins after the last update, is not counted: every run waits for it
    # once, however long it is. Each of the others is: in the next updates, or in waiting.
    return (updates - warmup) * batch * 127 / (end - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind (default: 3)")
    parser.add_argument("--updates", type=int, default=60, help="per run (default: 60)")
    parser.add_argument(
        "--batch-size", type=int, default=32, help="windows of 128 an update (default: 32)"
    )
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    without, saving = [], []
    for _ in range(arguments.rounds):
        without.append(tokens_per_second(arguments.batch_size, arguments.updates, 0, 5))
        saving.append(tokens_per_second(arguments.batch_size, arguments.updates, 10, 5))
        print(f"{without[-1]:.0f} {saving[-1]:.0f} tokens/s", file=sys.stderr, flush=True)
    a, b = statistics.median(without), statistics.median(saving)
    print(f"load before: {load:.2f}; {arguments.updates} updates, {arguments.rounds} runs each")
    print("| run | tokens/s, each | median |")
    print("|---|---|---|")
    print(f"| no saving | {' '.join(f'{x:.0f}' for x in without)} | {a:.0f} |")
    print(f"| --save-every 10 | {' '.join(f'{x:.0f}' for x in saving)} | {b:.0f} |")
    print(f"cost of saving: {100 * (1 - b / a):.1f} % (target: at most 3 %)")


if __name__ == "__main__":
    main()
