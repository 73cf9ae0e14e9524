"""Starting ranks on this machine, and what became of them.

    run_ranks(work, 2, arguments)    starts two processes that each call work(*arguments); gives
                                     back what each returned, or raises the one cause of failure
    watch_ranks(work, 2, arguments)  the same, where failing is part of the experiment: gives back
                                     how each rank ended

A rank finds in its environment what torchrun would have put there, so `read_launcher` and
`init_process_group()` work in it. Ctrl-C is for the lab: it ends its ranks, and so does its death.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing

from llm_ddp_parallel_training import RunError, UserError, reason_of

GRACE_S = 10  # how long the others may go on after a rank failed: they have something to say, too


@dataclasses.dataclass
class Ending:
    """How a rank ended."""

    value: Any = None  # what the function returned
    failure: str | None = None  # why it returned nothing, in one line
    mistake: str | None = None  # the user's, if that was the reason
    at: float = math.inf  # when, in time.time()
    status: int = 0  # its exit status; minus the signal for a rank that was killed

    @property
    def killed(self) -> bool:
        """Whether the rank was killed by somebody else than us, or died without a word."""
        return self.status != 0 and self.at == math.inf


def run_ranks(
    work: Callable, ranks: int | Sequence[int], arguments: tuple = (), **options: Any
) -> list[Any]:
    """What each rank's `work(*arguments)` returned. The options are those of `watch_ranks`.

    Raises `RunError` with the one cause: a rank that was killed, or else the one that failed first;
    that the others then lost contact follows from it.
    """
    endings = watch_ranks(work, ranks, arguments, **options)
    failed = [(not e.killed, e.at, rank) for rank, e in enumerate(endings) if e.failure]
    if failed:
        rank = min(failed)[2]
        if endings[rank].mistake:
            raise UserError(endings[rank].mistake)
        raise RunError(f"rank {rank} of {len(endings)} {endings[rank].failure}")
    return [ending.value for ending in endings]


def watch_ranks(
    work: Callable,
    ranks: int | Sequence[int],
    arguments: tuple = (),
    *,
    seconds: float = 300,
    log: Path | None = None,
    go_on: bool = False,
    modules: Sequence[str] = (),
) -> list[Ending]:
    """Starts `ranks` processes, lets each call `work(*arguments)`, and waits until all have ended.

    Several numbers of `ranks` are as many groups side by side that know nothing of each other;
    their endings follow each other. After `seconds` all are killed; when one has failed, the others
    after `GRACE_S`, unless they are to `go_on`. `log`: the file that takes all they print.
    `modules`: what takes long to import, to be imported once for all. `work` must be found by its
    name in a module (not in a package's `__main__`); what it takes and returns must be picklable.
    """
    groups = [ranks] if isinstance(ranks, int) else ranks
    stores = [new_store() for _ in groups]  # kept until all have ended
    environments = [
        environment(rank, size, store.port)
        for size, store in zip(groups, stores)
        for rank in range(size)
    ]
    how = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    if how == "forkserver":  # a server that has imported all once; each rank is a fork of it
        preload = [__name__, "llm_ddp_parallel_training", *modules]
        multiprocessing.get_context(how).set_forkserver_preload(preload)
    with tempfile.TemporaryDirectory() as folder:
        given = (work, arguments, environments, folder, log)
        start = functools.partial(torch.multiprocessing.start_processes, start_method=how)
        context = start(a_rank, given, len(environments), join=False)
        try:
            hung = wait_for(context.processes, seconds, go_on)
        finally:  # after Ctrl-C, too
            for process in context.processes:
                process.kill()
                process.join()
        endings = []
        for number, process in enumerate(context.processes):
            left, status = Path(folder, str(number)), process.exitcode
            if left.exists():
                endings.append(pickle.loads(left.read_bytes()))  # of our own process and folder
            elif process in hung:
                why = f"had not ended after {seconds:.0f} s"
                endings.append(Ending(failure=why, at=time.time(), status=status))
            else:
                name = signal.Signals(-status).name if status < 0 else f"status {status}"
                endings.append(Ending(failure=f"was ended by {name}", status=status))
    return endings


def new_store() -> dist.TCPStore:
    """A store through which ranks meet. It lives in the lab, so that ranks may come and go."""
    libuv = sys.platform != "win32"  # PyTorch for Windows is built without it
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=libuv)


def environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """torchrun's variables for a rank; the last one: the store is there already."""
    own = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return own | sizes | place | {"TORCHELASTIC_USE_AGENT_STORE": "True"}


def a_rank(
    number: int, work: Callable, arguments: tuple, environments: list, folder: str, log: Path | None
) -> None:
    """What a rank's process does: calls `work` and leaves an `Ending` in `folder`."""
    threading.Thread(target=end_with_lab, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(environments[number])
    if log:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream.fileno())
    ending = Ending()
    try:
        ending.value = work(*arguments)
    except SystemExit as end:  # it has said why
        ending.status = end.code if isinstance(end.code, int) else int(bool(end.code))
        ending.failure = f"ended with status {ending.status}" if ending.status else None
    except Exception as error:  # whatever it is, the lab reports it
        ending.status, ending.failure = 1, f"failed: {reason_of(error)}"
        if isinstance(error, UserError):
            ending.mistake = str(error)
        if not isinstance(error, RunError):
            sys.excepthook(type(error), error, error.__traceback__)
    ending.at = time.time()
    part = Path(folder, f"{number}.part")
    part.write_bytes(pickle.dumps(ending))
    part.rename(part.with_suffix(""))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(ending.status)  # a group whose peers may be gone cannot be destroyed in order


def end_with_lab() -> None:
    """Ends this rank as soon as the lab is gone, however that was ended."""
    multiprocessing.parent_process().join()
    os._exit(1)


def wait_for(processes: list, seconds: float, go_on: bool) -> list:
    """Waits until all processes have ended, or it is time; returns those that have not."""
    until = time.monotonic() + seconds
    failed = False
    while (busy := [p for p in processes if p.exitcode is None]) and time.monotonic() < until:
        if not failed and not go_on and any(p.exitcode for p in processes):
            failed, until = True, min(until, time.monotonic() + GRACE_S)
        connection.wait([p.sentinel for p in busy], timeout=1)
    return busy
