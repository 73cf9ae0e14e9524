"""Runs of the reference without the seconds that a fresh interpreter needs to import torch.

`here` calls `main()` in the test's own process; `job` forks the ranks of one job from a server
process that imported the reference once, so that they can be killed like any other process.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Finished, main_here, metrics

import llm_ddp_parallel_training as reference

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["preloaded", "quick"])
HERE = Path(__file__).resolve().parent
REFERENCE = reference.__name__


def here(*flags: object, cpu: bool = True, main: Callable = reference.main) -> Finished:
    """Runs `main()`, of the reference or of a lab, in this process, on one thread."""
    return main_here(*(("--cpu", "--threads", 1) if cpu else ()), *flags, main=main)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _rank(
    arguments: list[str], environment: dict[str, str], faults: list[dict], log: str, module: str
) -> None:
    """What a forked rank does."""
    os.setpgrp() if environment.get("OWN_GROUP") else None
    os.environ.update(environment)
    tempfile.tempdir = None  # by the new TMPDIR
    for number, suffix in ((1, "out"), (2, "err")):
        descriptor = os.open(f"{log}.{suffix}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, number)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from spoiled import spoil

    reference.PEER_LOSS_GRACE_S = 1  # without a launcher, nobody is raced for the word
    spoil(faults)
    importlib.import_module(module).main(arguments)


class Job:
    """The ranks of one job; `wait` gives each one's ending."""

    def __init__(
        self, ranks: int, flags: tuple, faults: list[dict], environment: dict,
        module: str = REFERENCE,
    ) -> None:  # fmt: skip
        self.folder = tempfile.TemporaryDirectory()
        arguments = ["--cpu", "--threads", "1", *map(str, flags)]
        port, self.processes = free_port(), []
        for rank in range(ranks):
            env = {"OWN_GROUP": "1", "TMPDIR": self.folder.name, **environment}
            if ranks > 1:
                env.update(
                    RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank),
                    LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                )  # fmt: skip
            log = f"{self.folder.name}/{rank}"
            self.processes.append(
                CONTEXT.Process(
                    target=_rank, args=(arguments, env, faults, log, module), daemon=False
                )
            )
        with pytest.MonkeyPatch.context() as patch:
            # The server does not take over our sys.path before it preloads (Python 3.10 to 3.13).
            patch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{HERE.parent}")
            for process in self.processes:
                process.start()

    def wait(self, timeout: float = 60) -> list[Finished]:
        """Every rank's status and output; a status is negative for a process killed by a signal."""
        until = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(until - time.monotonic(), 0))
        hung = [rank for rank, p in enumerate(self.processes) if p.exitcode is None]
        self.kill()
        endings = [
            Finished(p.exitcode, self.text(rank, "out"), self.text(rank, "err"))
            for rank, p in enumerate(self.processes)
        ]
        self.folder.cleanup()
        if hung:
            pytest.fail(f"ranks {hung} hung for {timeout} s\n{endings}")
        return endings

    def text(self, rank: int, which: str) -> str:
        path = Path(f"{self.folder.name}/{rank}.{which}")
        return path.read_text("utf-8", errors="replace") if path.exists() else ""

    def kill(self) -> None:
        """SIGKILL for every rank, as when the machine goes away."""
        for process in self.processes:
            if process.exitcode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.join()


def job(
    ranks: int, *flags: object, faults: list[dict] = (), module: str = REFERENCE, **environment: str
) -> list[Finished]:
    """Runs a job of so many ranks to its end; `module`, a lab say, has the `main`."""
    return Job(ranks, flags, list(faults), environment, module).wait()


def hashes(folder: Path) -> dict[str, str]:
    """The sha256 of every file in a folder."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def checkpoints(folder: Path) -> list[str]:
    """The names of all that is in a run's folder of checkpoints, hidden names too."""
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def steps(folder: Path) -> list[int]:
    """The steps of the training rows of metrics.jsonl, in file order."""
    return [row["step"] for row in metrics(folder) if "loss" in row]
