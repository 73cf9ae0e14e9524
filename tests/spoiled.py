"""Runs the reference with a fault built in, as a script under a launcher or in a forked process.

The faults come as JSON, a list of objects, in the environment variable FAULTS:

    kind     what happens, see `strike`
    rank     on which rank (default: on all)
    update   before which update of this process, counted from 1 (default: 1)
    attempt  only in this attempt of `torchrun --max-restarts` (default: in all)
    value    seconds or a path, where the kind needs it; a signal waits for a checkpoint there
"""

from __future__ import annotations

import datetime
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import llm_ddp_parallel_training as reference

SIGNALS = {
    "SIGTERM": signal.SIGTERM,
    "SIGINT": signal.SIGINT,
    "SIGKILL": signal.SIGKILL,
    "SIGSTOP": signal.SIGSTOP,
}


def strike(kind: str, value: object, arguments: tuple) -> None:
    """Does the harm, just before an update."""
    if kind in SIGNALS:
        until = time.monotonic() + 20
        while value and not visible(Path(str(value))) and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(os.getpid(), SIGNALS[kind])
        time.sleep(0.05)  # Python handles it at the latest now
    elif kind == "group":  # SIGTERM to every process of the group, as a batch system sends it
        os.killpg(os.getpgrp(), signal.SIGTERM)
        time.sleep(0.05)
    elif kind == "exception":
        raise RuntimeError("injected failure")
    elif kind == "sleep":
        time.sleep(float(value))
    elif kind == "nan":
        model = next(a for a in arguments if isinstance(a, torch.nn.Module))
        with torch.no_grad():
            next(model.parameters()).fill_(float("nan"))
    else:
        raise ValueError(kind)


def mean_of_means(step: Callable) -> Callable:
    """The step with the classic bug: every micro-batch counts the same, whatever its tokens."""

    def wrong_step(*arguments, **options):
        count = reference.valid_targets
        reference.valid_targets = lambda labels: 1
        try:
            return step(*arguments, **options)
        finally:
            reference.valid_targets = count

    return wrong_step


def visible(path: Path) -> bool:
    """Whether a checkpoint is there, or any in a folder of checkpoints."""
    return any(path.glob("[!.]*"))


def spoil(faults: list[dict]) -> None:
    """Wraps the reference's functions so that the faults will happen."""
    rank = int(os.environ.get("RANK", "0"))
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    faults = [
        fault
        for fault in faults
        if fault.get("rank", rank) == rank and fault.get("attempt", attempt) == attempt
    ]
    for fault in faults:
        if fault["kind"] == "full disk":  # no file grows beyond so many bytes
            resource.setrlimit(resource.RLIMIT_FSIZE, (fault["value"], resource.RLIM_INFINITY))
        elif fault["kind"] == "clock":  # stands still
            reference.datetime.datetime = StandingClock
        elif fault["kind"] == "mean of means":
            reference.training_step = mean_of_means(reference.training_step)
    at_start = ("full disk", "clock", "mean of means")
    faults = [fault for fault in faults if fault["kind"] not in at_start]
    training_step, save, updates = reference.training_step, torch.save, 0

    def spoiled_step(*arguments, **options):
        nonlocal updates
        updates += 1
        for fault in faults:
            kind = fault["kind"]
            if kind == "pace":
                time.sleep(fault["value"])
            elif kind == "record":
                note(fault["value"], rank, arguments)
            elif kind != "slow save" and updates == fault.get("update", 1):
                strike(kind, fault.get("value"), arguments)
        return training_step(*arguments, **options)

    def slow_save(*arguments, **options):
        if threading.current_thread() is threading.main_thread():  # tensors on their way
            return save(*arguments, **options)
        time.sleep(sum(fault["value"] for fault in faults if fault["kind"] == "slow save"))
        return save(*arguments, **options)

    reference.training_step = spoiled_step
    if any(fault["kind"] == "slow save" for fault in faults):
        torch.save = slow_save


class StandingClock(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
        return cls.fromisoformat("2020-02-02T02:02:02")


def note(path: str, rank: int, arguments: tuple) -> None:
    """Appends the record ids of one update of one rank to a file: a JSON list a line."""
    (micro_batches,) = (a for a in arguments if isinstance(a, list))
    ids = [int(i) for batch in micro_batches for i in batch["record_ids"] if i >= 0]
    with open(f"{path}.rank{rank}", "a", encoding="utf-8") as file:
        file.write(json.dumps(ids) + "\n")


if __name__ == "__main__":
    spoil(json.loads(os.environ.get("FAULTS", "[]")))
    reference.main()
