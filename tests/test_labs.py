"""What holds for every lab that starts ranks of its own."""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT, SCRIPT, clean_environment
from quick import here

from labs.break_it import __main__ as break_it
from labs.strategies import __main__ as strategies

ENDLESS = {  # a command that would go on for minutes, and what it prints when its ranks are busy
    "strategies": ("--strategy ddp --ranks 2 --cpu --max-steps 100000", "backend "),
    "scaling": ("--ranks 1,2 --cpu --rounds 1000 --output-dir out", "of gradients"),
    "break_it": ("--all", "detector"),
}


LABS = sorted((ROOT / "labs").glob("*/__main__.py"))


@pytest.mark.parametrize("lab", LABS, ids=lambda path: path.parent.name)
def test_a_lab_can_be_started_by_its_path_from_another_folder(lab, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    elsewhere = [p for p in sys.path if Path(p or ".").resolve() not in (ROOT, tmp_path)]
    monkeypatch.setattr(sys, "path", [str(lab.parent), *elsewhere])
    monkeypatch.setattr(sys, "argv", [str(lab), "--help"])
    for name in [n for n in sys.modules if n == SCRIPT.stem or n.partition(".")[0] == "labs"]:
        monkeypatch.delitem(sys.modules, name)
    with contextlib.suppress(SystemExit):
        runpy.run_path(str(lab), run_name="__main__")
    assert re.match(rf"usage: (python -m )?labs\.{lab.parent.name} ", capsys.readouterr().out)


def plan_into(descriptor: int) -> subprocess.CompletedProcess:
    """The planner, which needs no torch and starts at once, with this standard output."""
    command = [sys.executable, "-u", "-m", "labs.planner", "--params", "13e9"]
    options = {"stdout": descriptor, "stderr": subprocess.PIPE, "cwd": ROOT, "timeout": 60}
    return subprocess.run(command, **options, env=clean_environment(), text=True)


def test_a_reader_who_leaves_gets_no_traceback_from_the_planner():
    reading, writing = os.pipe()
    os.close(reading)
    try:
        finished = plan_into(writing)
    finally:
        os.close(writing)
    assert (finished.returncode, finished.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no device that is always full")
def test_a_plan_that_does_not_fit_on_the_disk_is_one_line():
    with open("/dev/full", "wb") as full:
        finished = plan_into(full.fileno())
    assert finished.returncode == 1
    assert finished.stderr == "error: cannot write the result: No space left on device\n"


@pytest.mark.parametrize("file", [".", "no/where.json", os.devnull])
@pytest.mark.parametrize(
    ("lab", "flags"),
    [(break_it, "--bug no-sampler --json"), (strategies, "--strategy one --cpu --report")],
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_computed(
    lab, flags, file, monkeypatch
):
    monkeypatch.setattr(break_it, "reproduce", None)
    monkeypatch.setattr(strategies, "run_strategy", None)
    finished = here(*flags.split(), file, cpu=False, main=lab.main)
    (line,) = finished.err.splitlines()
    assert finished.status == 2 and line.startswith(f"error: {flags.split()[-1]} {file}")
    assert not Path(os.devnull).is_file()


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
            wait_until(is_gone, lab.pid, seconds=30)
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
