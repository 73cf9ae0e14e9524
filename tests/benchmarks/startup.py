"""From the launch to the end of the first update, and of the first one after --resume.

    python tests/benchmarks/startup.py [--rounds 7]

One rank of the tiny model. `import torch` is a process that does nothing else; the script's time
ends when it prints the line of its first update. Resuming is measured at the default size and with
9.8 million parameters, whose checkpoint has 117 MB. All take turns; seconds are medians over the
rounds, ratios medians of the ratios to `import torch` within a round.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = [sys.executable, str(ROOT / "llm_ddp_parallel_training.py")]
SMALL = "--cpu --builtin lessons --val-fraction 0 --log-every 1".split()
LARGE = [*SMALL, *"--d-model 288 --layers 10 --batch-size 2".split()]


def whole(command: list[str]) -> float:
    """Seconds of a process, from its launch to its end."""
    begin = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - begin


def first_update(flags: list[str]) -> float:
    """Seconds from the launch of the script to the line of its first update."""
    begin = time.perf_counter()
    with subprocess.Popen([*SCRIPT, *flags], stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith("step "):
                took = time.perf_counter() - begin
                process.stdout.read()
                return took
    sys.exit(f"no update: {flags}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds (default: 7)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name, flags in (("small", SMALL), ("large", LARGE)):
            whole([*SCRIPT, *flags, "--max-steps", "5", "--save-every", "5",
                   "--output-dir", f"{folder}/{name}"])  # fmt: skip

        def resume(name: str, last: int) -> float:
            return first_update(["--resume", f"{folder}/{name}", "--max-steps", str(last)])

        def fresh(flags: list[str]) -> float:
            output = ["--output-dir", f"{folder}/new", "--overwrite"]
            return first_update([*flags, "--max-steps", "1", *output])

        rows = {
            "import torch": lambda last: whole([sys.executable, "-c", "import torch"]),
            "first update": lambda last: fresh(SMALL),
            "first update after --resume": lambda last: resume("small", last),
            "first update, 9.8 M": lambda last: fresh(LARGE),
            "the same after --resume": lambda last: resume("large", last),
        }
        seen: dict[str, list[float]] = {name: [] for name in rows}
        for turn in range(1 + args.rounds):  # the first round fills the file cache
            for name in list(rows)[:: -1 if turn % 2 else 1]:
                took = rows[name](6 + turn)
                if turn:
                    seen[name].append(took)
    print(f"{'':30}{'seconds':>9}{'of import torch':>17}")
    for name, times in seen.items():
        ratio = statistics.median(a / b for a, b in zip(times, seen["import torch"]))
        print(f"{name:30}{statistics.median(times):>9.2f}{ratio:>17.2f}")


if __name__ == "__main__":
    main()
