"""Runs checks, each in a process of its own with a time limit, and prints their rows."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpu.bench import Bench
from gpu.table import Row


@dataclasses.dataclass
class Check:
    """`speed`: nothing else may run meanwhile, and the exit status does not depend on it.

    `limit` is in seconds; `cards` is how many GPUs it must have, 0: all that there are. What is
    not `rehearsed` lasts too long on a CPU, where it needs --only.
    """

    name: str
    function: Callable[[Bench], Iterator[Row]]
    limit: float
    speed: bool = False
    needs_base: bool = True
    rehearsed: bool = True
    cards: int = 1


class Program:
    """Runs checks as processes, prints their rows, and remembers them."""

    def __init__(self, args: argparse.Namespace, work: Path) -> None:
        self.args, self.work, self.until = args, work, time.monotonic() + args.budget
        self.rows: list[Row] = []
        self.errors = ""  # the last output of checks that failed
        self.alive: set[subprocess.Popen] = set()
        self.lock = threading.Lock()
        self.over = False

    def show(self, row: Row) -> None:
        with self.lock:
            self.rows.append(row)
            print(row, flush=True)

    def run(self, check: Check, threads: int) -> bool:
        """Runs one check to its end, or to the end of its time; whether it ended well."""
        verdict = "missed" if check.speed else "FAIL"
        patience = 1 if self.args.device == "cuda" else 4
        limit = min(patience * check.limit, self.until - time.monotonic())
        if limit < 3 or self.over:
            self.show(Row(check.name, "not run: the time is up", "", verdict))
            return False
        folder = self.work / check.name.replace(" ", "-")
        folder.mkdir()
        rows, log = folder / "rows.jsonl", folder / "log.txt"
        rows.touch()
        with open(log, "w", encoding="utf-8") as output:
            process = subprocess.Popen(
                self.command(check, folder, limit), env=environment_for(check, threads),
                stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
        self.alive.add(process)
        seen, ended, until = 0, False, time.monotonic() + limit
        while not ended:
            ended = process.poll() is not None
            lines = rows.read_text("utf-8").split("\n")[:-1]
            for line in lines[seen:]:
                self.show(Row(**json.loads(line)))
            seen = len(lines)
            if not ended and time.monotonic() > until:
                break
            time.sleep(0 if ended else 0.1)
        end(process)
        self.alive.discard(process)
        if process.returncode == 0 and ended and seen:
            return True
        said = log.read_text("utf-8", errors="replace").strip()
        last = said.splitlines()[-1] if said else f"exit status {process.returncode}"
        reason = " ".join(last.split())[:200] if ended else f"not done after {limit:.0f} s"
        if not self.over:
            self.show(Row(check.name, reason, "an end without error", verdict))
        self.errors += f"\n==== {check.name}: {reason}\n{said[-6000:]}\n"
        return False

    def command(self, check: Check, folder: Path, limit: float) -> list[str]:
        script = Path(__file__).with_name("check.py")
        command = [sys.executable, "-W", "ignore", str(script), "--step", check.name]
        command += ["--work", str(folder), "--device", self.args.device]
        command += ["--layers", str(self.args.layers), "--limit", str(limit)]
        return [*command, "--base-model", str(self.args.base_model or self.work / "base")]

    def all(self, checks: list[Check]) -> None:
        """Those on exactness side by side, each with its share of the cores; then the others."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        lanes, cores = self.args.lanes, cores or 1
        pool = ThreadPoolExecutor(lanes)
        try:
            together = [check for check in checks if not check.speed]
            list(pool.map(lambda check: self.run(check, max(1, cores // lanes)), together))
            for check in checks:
                if check.speed:
                    self.run(check, cores)
        finally:
            self.over = True
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(self.alive):
                end(process)


def environment_for(check: Check, threads: int) -> dict[str, str]:
    """As many of the GPUs as the check uses, and its share of the cores."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    if check.cards:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(check.cards))))
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[: check.cards])
    return environment


def end(process: subprocess.Popen) -> None:
    """Ends a check with all that it started; torchrun needs a moment to end its ranks."""
    for number, patience in ((signal.SIGTERM, 5), (signal.SIGKILL, 5)):
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience)


def step(check: Check, args: argparse.Namespace) -> None:
    """One check, in this process: its rows go to a file that the parent reads."""
    killer = threading.Timer(args.limit + 20, os._exit, (1,))  # for when the parent is gone
    killer.daemon = True
    killer.start()
    facts = args.work.parent / "facts.json"
    known = json.loads(facts.read_text("utf-8")) if facts.exists() else {}
    bench = Bench(args.device, args.layers, args.base_model, args.work, known)
    with open(args.work / "rows.jsonl", "a", encoding="utf-8") as rows:
        for row in check.function(bench):
            rows.write(json.dumps(dataclasses.asdict(row)) + "\n")
            rows.flush()
    for old in args.work.iterdir():  # a check leaves a gigabyte at most
        if old.is_dir():
            shutil.rmtree(old, ignore_errors=True)
