"""All of this project that needs a CUDA GPU: checked and measured, in under eight minutes.

    bash tests/gpu/check.sh                            everything, on the first GPU
    bash tests/gpu/check.sh --only resume              the checks with this in their names
    bash tests/gpu/check.sh --base-model FOLDER        Qwen2.5-0.5B itself, not random weights
    bash tests/gpu/check.sh --device cpu --layers 2    the rehearsal, where there is no GPU

Each check is a function that yields rows. It runs in a process of its own with a time limit, so
that a failure or a hang costs nothing but itself, and its rows are printed as soon as they are
known. First those on exactness, several at a time; then those on speed, one by one. What a row
means stands in README.md beside this file.

The exit status is 0 when every check on exactness has passed, 1 when one has not, 2 without a
GPU. Speed and memory have aims, which are reported as met or missed and change no status.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "tests"))

from gpu import endings, kernels, machine, numerics, ranks, resuming, speed  # noqa: E402
from gpu.program import Check, Program, step  # noqa: E402
from gpu.table import HEADER, status_of, summary  # noqa: E402

MACHINE = Check("machine", machine.machine, 90, cards=0)
BASE = Check("base model", machine.random_base, 90)
CHECKS = [  # those that last longest first: several run at a time
    Check("qwen compile", numerics.qwen_compiled, 240, rehearsed=False),
    Check("qwen precision", numerics.qwen_precisions, 210),
    Check("two ranks", ranks.two_ranks, 180, needs_base=False),
    Check("command lines", ranks.command_lines, 180),
    Check("two gpus", ranks.two_gpus, 180, needs_base=False, rehearsed=False, cards=2),
    Check("memory", speed.memory, 150),
    Check("lost rank", endings.lost_on_one_device, 120, needs_base=False),
    Check("lost rank on two gpus", endings.lost_on_two_gpus, 120, False, False, False, 2),
    Check("tiny compile", numerics.tiny_compiled, 120, needs_base=False),
    Check("qwen checkpointing", numerics.qwen_checkpointing, 100),
    Check("qwen resume", resuming.qwen_resumed, 100),
    Check("attention kernels", kernels.attention, 100),
    Check("synchronizations", kernels.synchronizations, 100),
    Check("repeated", resuming.repeated, 100),
    Check("tiny precision", numerics.tiny_precisions, 100, needs_base=False),
    Check("tiny resume", resuming.tiny_resumed, 100, needs_base=False),
    Check("signal", resuming.stopped, 60, needs_base=False),
    Check("nccl", ranks.one_rank_group, 60, needs_base=False),
    Check("out of memory", endings.out_of_memory, 60, needs_base=False),
    Check("speed", speed.speed, 120, True),
    Check("trainer lines", functools.partial(speed.trainer, case="lines"), 100, True, False),
    Check("speed compiled", functools.partial(speed.speed, compiled=True), 150, True, True, False),
    Check(
        "trainer packed", functools.partial(speed.trainer, case="packed"), 100, True, False, False
    ),
    Check("tiny speed", speed.tiny_speed, 60, True, False),
]


def read_flags(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the rehearsal")
    add("--layers", type=int, default=24, help="of the random Qwen2.5 (default: 24, as the real)")
    add("--base-model", type=Path, help="a folder with Qwen2.5-0.5B (default: random weights)")
    add("--only", nargs="+", default=[""], metavar="PART", help="checks with this in their names")
    add("--budget", type=float, help="seconds for all of it (default: 460; rehearsal: 1800)")
    add("--lanes", type=int, help="checks on exactness at a time (default: 4; rehearsal: 2)")
    add("--step", help=argparse.SUPPRESS)
    add("--work", type=Path, help=argparse.SUPPRESS)
    add("--limit", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.budget = args.budget or (460 if args.device == "cuda" else 1800)
    args.lanes = args.lanes or (4 if args.device == "cuda" else 2)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = read_flags(argv)
    if args.step:
        step(next(check for check in (MACHINE, BASE, *CHECKS) if check.name == args.step), args)
        return 0
    chosen = [check for check in CHECKS if any(part in check.name for part in args.only)]
    if args.device == "cpu" and args.only == [""]:
        chosen = [check for check in chosen if check.rehearsed]
    if not chosen:
        names = ", ".join(check.name for check in CHECKS)
        print(f"error: --only {' '.join(args.only)}: the checks are {names}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as work:
        program = Program(args, Path(work))
        print(HEADER, flush=True)
        if not program.run(MACHINE, os.cpu_count() or 1):
            print(f"error: {program.rows[-1].found}", file=sys.stderr)
            return 2
        if not args.base_model and any(check.needs_base for check in chosen):
            program.run(BASE, os.cpu_count() or 1)
        program.all(chosen)
    status = status_of(program.rows)
    if program.errors:
        print(program.errors)
    print(f"\n{HEADER}", *program.rows, sep="\n")
    took = time.monotonic() - begin
    print(f"\n{summary(program.rows)}; {took:.0f} s; exit status {status}", flush=True)
    if os.environ.get("OUT"):
        content = [dataclasses.asdict(row) for row in program.rows]
        path = Path(os.environ["OUT"]) / "gpu-check.json"
        path.write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
