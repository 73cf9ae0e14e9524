"""What holds for every lab that starts ranks of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT, clean_environment

ENDLESS = {  # a command that would go on for minutes, and what it prints when its ranks are busy
    "strategies": ("--strategy ddp --ranks 2 --cpu --max-steps 100000", "backend "),
    "scaling": ("--ranks 1,2 --cpu --rounds 1000 --output-dir out", "1000 rounds"),
    "break_it": ("--all", "detector"),
}


@pytest.mark.skipif(sys.platform == "win32", reason="has no process groups")
def test_no_rank_goes_on_when_the_lab_is_killed(tmp_path: Path):
    labs = {}
    try:
        for name, (flags, _) in ENDLESS.items():
            with open(tmp_path / name, "w", encoding="utf-8") as file:
                labs[name] = subprocess.Popen(
                    [sys.executable, "-m", f"labs.{name}", *flags.split()], stdout=file,
                    stderr=file, cwd=tmp_path, start_new_session=True,
                    env=clean_environment(PYTHONPATH=str(ROOT)),
                )  # fmt: skip
        for name, (_, busy) in ENDLESS.items():
            wait_until(says, tmp_path / name, busy, seconds=60)
        for lab in labs.values():
            lab.kill()
            lab.wait()
        for lab in labs.values():
            wait_until(is_gone, lab.pid, seconds=10)
    finally:
        for lab in labs.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(lab.pid, signal.SIGKILL)


def says(path: Path, text: str) -> bool:
    return text in path.read_text("utf-8")


def is_gone(group: int) -> bool:
    """Whether no process of the group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def wait_until(holds: Callable[..., bool], *about: object, seconds: float) -> None:
    """Fails if it does not hold about these things within so many seconds."""
    until = time.monotonic() + seconds
    while not holds(*about):
        assert time.monotonic() < until, about
        time.sleep(0.1)
