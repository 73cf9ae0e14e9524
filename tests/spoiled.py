"""Runs the reference with a fault built in, as a script under a launcher or in a forked process.

The faults come as JSON, a list of objects, in the environment variable FAULTS:

    kind     what happens, see `strike` (before an update) and `spoil` (from the start)
    rank     on which rank (default: on all)
    update   before which update of this process, counted from 1 (default: 1)
    attempt  only in this attempt of `torchrun --max-restarts` (default: in all)
    value    seconds, bytes or a path, where the kind needs it; a signal waits for what is there
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import os
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import llm_ddp_parallel_training as reference

SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGKILL", "SIGSTOP")
AT_START = ("full disk", "clock", "mean of means", "late", "small buckets", "slow save",
            "blocked teardown", "Ctrl-C in set-up")  # fmt: skip


def strike(kind: str, value: object, arguments: tuple) -> None:
    """Does the harm, just before an update."""
    if kind in SIGNALS:
        until = time.monotonic() + 20
        while value and not visible(Path(str(value))) and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(os.getpid(), getattr(signal, kind))
        time.sleep(0.05)  # Python handles it at the latest now
    elif kind == "exception":
        raise RuntimeError("injected failure")
    elif kind == "mistake":
        raise reference.UserError("a mistake that only this rank can see")
    elif kind == "sleep":
        time.sleep(float(value))
    elif kind == "nan":
        model = next(a for a in arguments if isinstance(a, torch.nn.Module))
        with torch.no_grad():
            next(model.parameters()).fill_(float("nan"))
    elif kind == "lost folder":  # and it cannot be made again
        shutil.rmtree(value, ignore_errors=True)
        Path(value).write_text("no folder", encoding="utf-8")
    elif kind == "full disk":  # no file grows beyond so many bytes
        resource.setrlimit(resource.RLIMIT_FSIZE, (value, resource.RLIM_INFINITY))
    else:
        raise ValueError(kind)


def visible(path: Path) -> bool:
    """Whether a file is there, or any in a folder that is none on its way."""
    whole = [name for name in path.glob("*") if name.suffix != ".partial"]
    return bool(whole) or path.is_file()


def spoil(faults: list[dict]) -> None:
    """Wraps the reference's functions so that the faults will happen."""
    rank = int(os.environ.get("RANK", "0"))
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    own = [
        f for f in faults if f.get("rank", rank) == rank and f.get("attempt", attempt) == attempt
    ]
    from_the_start = [f for f in own if f["kind"] in AT_START and "update" not in f]
    for fault in from_the_start:
        spoil_the_start(fault["kind"], fault.get("value"))
    own = [fault for fault in own if fault not in from_the_start]
    step, updates = reference.training_step, 0

    def spoiled_step(*arguments, **options):
        nonlocal updates
        updates += 1
        for fault in own:
            kind = fault["kind"]
            if kind == "pace":
                time.sleep(fault["value"])
            elif kind != "watch" and updates == fault.get("update", 1):
                strike(kind, fault.get("value"), arguments)
        result = step(*arguments, **options)
        for fault in own:
            if fault["kind"] == "watch":
                note(Path(fault["value"]), rank, arguments, result)
        return result

    reference.training_step = spoiled_step


def spoil_the_start(kind: str, value: object) -> None:
    """What holds from the first line of `main` to the last."""
    if kind == "full disk":
        strike(kind, value, ())
    elif kind == "clock":  # stands still
        reference.datetime.datetime = StandingClock
    elif kind == "mean of means":
        reference.training_step = mean_of_means(reference.training_step)
    elif kind == "late":  # this rank comes later than the others to the first line of `main`
        time.sleep(value)
    elif kind == "small buckets":  # of so many MB
        reference.wrap_in_ddp = functools.partial(reference.wrap_in_ddp, bucket_cap_mb=value)
    elif kind == "slow save":
        reference.write_whole = slowly(reference.write_whole, value)
    elif kind == "Ctrl-C in set-up":
        torch.manual_seed = pressed
    elif kind == "blocked teardown":  # as NCCL's is, when a peer will never come
        torch.distributed.destroy_process_group = lambda *_, **__: time.sleep(value)


def pressed(_: int) -> None:
    """Ctrl-C, when all ranks have come so far."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGINT)


def slowly(write: Callable, seconds: float) -> Callable:
    """write_whole that needs so long for a checkpoint, which another thread writes."""

    def slow_write(*arguments):
        if threading.current_thread() is not threading.main_thread():
            time.sleep(seconds)
        return write(*arguments)

    return slow_write


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


class StandingClock(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
        return cls.fromisoformat("2020-02-02T02:02:02")


def note(folder: Path, rank: int, arguments: tuple, result: reference.StepResult) -> None:
    """Appends to folder/rank-R.jsonl what this rank trained on in an update, and what came of it:
    record ids, number of micro-batches, digest of the weights, loss, hash of the random state."""
    (micro_batches,) = (a for a in arguments if isinstance(a, list))
    (model,) = (a for a in arguments if isinstance(a, torch.nn.Module))
    row = {
        "ids": [int(i) for batch in micro_batches for i in batch["record_ids"] if i >= 0],
        "micro_batches": len(micro_batches),
        "digest": reference.parameter_digest(getattr(model, "module", model)),
        "loss": result.loss,
        "random": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
    }
    with open(folder / f"rank-{rank}.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    spoil(json.loads(os.environ.get("FAULTS", "[]")))
    reference.main()
