"""Kills a run at random moments while it saves, again and again, and compares it with one that
was left alone.

    python tests/soak/kill_while_saving.py --kills 50

Each rank count in turn, with the tiny model, saving every 2 updates. After each SIGKILL of the
whole job: every checkpoint that is there is complete, the newest is never older than it was before,
the next start goes on from it, and in the end weights and losses are those of the run that nobody
killed. One line for each rank count.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from conftest import digest_line, losses
from quick import Job

import llm_ddp_parallel_training as reference

UPDATES_PER_KILL = 20
LONGEST_WAIT_S = 0.6  # from the first update of a life to its end


def newest(folder: Path) -> int:
    """The update of the newest checkpoint, 0 without any. Raises `UserError` for one of them that
    is not complete."""
    checkpoints = reference.Checkpoints(folder / "checkpoints")
    names = checkpoints.names()
    for name in names:
        checkpoints.newest(name)
    return int(names[0][5:-3]) if names else 0


def soak(ranks: int, kills: int, folder: Path, seed: int = 0) -> int:
    """Kills a job so many times; returns how many updates it made. Raises on the first loss."""
    moments, updates = random.Random(seed), UPDATES_PER_KILL * kills
    flags = (
        "--dropout", 0.1, "--batch-size", 4, "--save-every", 2, "--log-every", 1, "--keep", 2,
        "--max-steps", updates, "--output-dir", folder / "run", "--resume", "auto",
    )  # fmt: skip
    before = 0
    for kill in range(kills):
        run = Job(ranks, flags, [], {})
        until = time.monotonic() + 120
        while not re.search(r"^(step|done) ", run.text(0, "out"), re.MULTILINE):
            if not run.processes[0].is_alive() or time.monotonic() > until:
                raise AssertionError(f"kill {kill}: no update\n{run.wait(0)}")
            time.sleep(0.01)
        time.sleep(moments.uniform(0, LONGEST_WAIT_S))
        run.kill()
        begun = re.search(r"going on from .*step-(\d+)", run.text(0, "out"))
        run.folder.cleanup()
        if int(begun.group(1) if begun else 0) != before:
            raise AssertionError(f"kill {kill}: went on from {begun}, not from {before}")
        after = newest(folder / "run")
        if after < before:
            raise AssertionError(f"kill {kill}: the newest was {before}, now it is {after}")
        before = after
    endings = Job(ranks, flags, [], {}).wait(600)
    whole = Job(ranks, (*flags[:-4], "--output-dir", folder / "whole"), [], {}).wait(600)
    for ending in (*endings, *whole):
        if ending.status:
            raise AssertionError(f"after {kills} kills: {ending}")
    if digest_line(endings[0]) != digest_line(whole[0]):
        raise AssertionError("other weights than the run that nobody killed")
    if losses(folder / "run") != losses(folder / "whole"):
        raise AssertionError("other losses than the run that nobody killed")
    return updates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--kills", type=int, default=50, help="SIGKILLs (default: 50)")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments (default: 0)")
    arguments = parser.parse_args()
    for ranks in (1, 2):
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            updates = soak(ranks, arguments.kills, Path(folder), arguments.seed)
        print(
            f"{reference.counted(ranks, 'rank')}: {arguments.kills} SIGKILLs while saving, each "
            f"resumed from the newest checkpoint; after {updates} updates weights and losses of "
            f"the uninterrupted run; {time.monotonic() - begin:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
