"""The lowest validation loss per byte within 10, 20 and 60 seconds, start-up included.

    python tests/benchmarks/time_to_quality.py TEXT                       the recipes of the README
    python tests/benchmarks/time_to_quality.py TEXT --seconds 10 --ranks 1 \
        --flags "--layers 2 --d-model 64 --batch-size 8 --lr 1e-2"        flags of your own

TEXT is read as one document, whose last 10 % are held out. A run gets as many updates as this
machine manages in the time less 2 %: a first, short run of the same flags measures how long an
update, and all that stands around the updates, takes. `--updates` gives the number instead. Printed
is what the second one then took, from the launch to the end of the process, with the validation
loss of its last line. Loss in nats per byte.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ALWAYS = "--cpu --corpus-format document --val-fraction 0.1 --schedule linear"
RECIPES = {  # (seconds, ranks): flags
    (10, 1): "--layers 1 --d-model 64 --heads 2 --batch-size 8 --lr 1e-2 --warmup-steps 100",
    (10, 2): "--layers 1 --d-model 64 --heads 2 --batch-size 8 --lr 1.4e-2 --warmup-steps 50",
    (20, 1): "--layers 2 --d-model 64 --heads 2 --batch-size 8 --lr 1e-2 --warmup-steps 200",
    (20, 2): "--layers 2 --d-model 64 --heads 2 --batch-size 8 --lr 1.4e-2 --warmup-steps 100",
    (60, 1): "--layers 2 --d-model 128 --heads 2 --batch-size 8 --lr 5e-3 --warmup-steps 400",
    (60, 2): "--layers 2 --d-model 96 --heads 2 --batch-size 8 --lr 1e-2 --warmup-steps 250",
}


def run(text: str, flags: str, ranks: int, updates: int) -> tuple[float, float, float]:
    """Seconds from launch to end, median seconds of an update, validation loss in nats a byte."""
    launch = [sys.executable]
    if ranks > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    with tempfile.TemporaryDirectory() as folder:
        words = f"{ALWAYS} {flags} --max-steps {updates} --log-every 10".split()
        command = [*launch, str(ROOT / "llm_ddp_parallel_training.py"), *words]
        begin = time.perf_counter()
        done = subprocess.run(
            [*command, "--corpus-file", text, "--output-dir", folder], capture_output=True
        )
        wall = time.perf_counter() - begin
        if done.returncode:
            sys.exit(done.stderr.decode() + done.stdout.decode())
        rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").open("rb")]
    clock = [row["seconds"] for row in rows if "loss" in row]  # at every tenth update
    update = statistics.median(b - a for a, b in itertools.pairwise(clock)) / 10
    return wall, update, rows[-1]["val_loss"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", help="a UTF-8 text of about 1 MB")
    parser.add_argument("--seconds", type=int, help="one budget only (default: 10, 20 and 60)")
    parser.add_argument("--ranks", type=int, help="one number of ranks only (default: 1 and 2)")
    parser.add_argument("--flags", help="flags to try in place of the recipes")
    parser.add_argument("--updates", type=int, help="of a run (default: what fits the budget)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each (default: 3)")
    args = parser.parse_args()
    cases = {
        key: args.flags or flags for key, flags in RECIPES.items()
        if args.seconds in (None, key[0]) and args.ranks in (None, key[1])
    }  # fmt: skip
    print(f"{'budget':>6} {'ranks':>5} {'updates':>7} {'took':>6} {'nats per byte':>13}  flags")
    for (seconds, ranks), flags in cases.items():
        for _ in range(args.rounds):
            updates = args.updates
            if updates is None:
                wall, update, _ = run(args.text, flags, ranks, 150)
                around = wall - 150 * update
                updates = max(1, int((0.98 * seconds - around) / update))
            wall, _, loss = run(args.text, flags, ranks, updates)
            row = f"{seconds:>5}s {ranks:>5} {updates:>7} {wall:>5.1f}s {loss:>13.3f}"
            print(f"{row}  {flags}", flush=True)


if __name__ == "__main__":
    main()
