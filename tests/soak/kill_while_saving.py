"""Kills a run again and again while it saves after every update, and resumes it each time.

    python tests/soak/kill_while_saving.py --kills 100

Single process, tiny model. After each SIGKILL: every visible checkpoint is complete, the newest of
them is the one that the next start continues from, it is never older than what was complete when
the kill came, and metrics.jsonl has neither gaps nor repeats. One summary line at the end.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
import time
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from quick import Job, steps

FLAGS = ("--dropout", 0.1, "--save-every", 1, "--keep", 2, "--log-every", 1, "--max-steps", 10**6)


def visible(folder: Path) -> dict[int, bool]:
    """The visible checkpoints of a run: step → whether it is complete."""
    found = {}
    for path in (folder / "checkpoints").glob("step-*"):
        try:
            manifest = json.loads((path / "manifest.json").read_text("utf-8"))
            sizes = {}
            for name in manifest["files"]:
                content = (path / name).read_bytes()
                sizes[name] = [len(content), zlib.crc32(content)]
            found[int(path.name[5:])] = sizes == manifest["files"]
        except (OSError, ValueError):
            found[int(path.name[5:])] = False
    return found


def soak(kills: int, folder: Path, seed: int = 0) -> int:
    """Kills so many times; returns how many of them lost nothing. Raises on the first loss."""
    moments = random.Random(seed)
    flags = (*FLAGS, "--output-dir", folder)
    for kill in range(kills):
        complete = visible(folder)
        run = Job(1, flags, [], {})
        until = time.monotonic() + 60
        while "step " not in run.text(0, "out"):  # the first update of this life
            alive = run.processes[0].is_alive() and time.monotonic() < until
            if not alive:
                raise AssertionError(f"kill {kill}: no update\n{run.wait(0)}")
            time.sleep(0.01)
        if kill:
            (begun,) = re.findall(r"continuing from \S*step-(\d+)", run.text(0, "out"))
            if int(begun) != max(complete):
                raise AssertionError(f"kill {kill}: went on from {begun}, not {max(complete)}")
        time.sleep(moments.uniform(0, 0.6) if kill else 1)
        run.kill()
        run.folder.cleanup()
        now = visible(folder)
        if not now or not all(now.values()):
            raise AssertionError(f"kill {kill}: {now}")
        if max(now) < max(complete, default=0):
            raise AssertionError(f"kill {kill}: the newest was {max(complete)}, now {max(now)}")
        reached = steps(folder) if kill_left_whole_lines(folder) else None
        if reached is not None and reached != list(range(1, len(reached) + 1)):
            raise AssertionError(f"kill {kill}: metrics.jsonl has steps {reached}")
        flags = ("--resume", folder)
    return kills


def kill_left_whole_lines(folder: Path) -> bool:
    """Whether the last line of metrics.jsonl is whole; the next start drops it if not."""
    return (folder / "metrics.jsonl").read_bytes().endswith(b"\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100, help="SIGKILLs (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments (default: 0)")
    arguments = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        lost_nothing = soak(arguments.kills, run, arguments.seed)
        newest = max(visible(run))
    print(
        f"{arguments.kills} SIGKILLs while saving, {lost_nothing} resumed from the newest complete "
        f"checkpoint, reached update {newest}, {time.monotonic() - begin:.0f} s"
    )


if __name__ == "__main__":
    main()
