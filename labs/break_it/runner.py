"""Two fresh processes for each version of a bug, and what came of them."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import linecache
import os
import re
import sys
import tempfile
import textwrap
import threading
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from labs.break_it import BUGS
from labs.break_it.bug import Bug, Stop
from labs.break_it.detectors import gathered
from labs.shared.ranks import run_ranks
from llm_ddp_parallel_training import RunError

RANKS = 2
HANG_S = 3  # after which a rank counts as waiting; what comes before takes milliseconds
LIMIT_S = 60  # for every other version, once its processes have started
MODULES = (__package__, "torch._dynamo")  # DDP imports the latter, in seconds

# What a rank that waits in C++ is doing there, by the innermost Python function on its stack.
MEETINGS = {
    "_engine_run_backward": "DDP's all-reduce of the gradients",
    "_distributed_broadcast_coalesced": "DDP's broadcast of the buffers",
    "_pre_forward": "DDP's agreement on the order of its buckets",
}


@dataclasses.dataclass
class Finding:
    """What came of one version, on one rank or on all."""

    number: float = 0  # the symptom; of a run that stops, how many ranks wait or fail
    symptom: str = "both ranks came back"  # the same as a sentence
    detected: str | None = None  # what the detector says, None if it found nothing
    at: float = 0  # when
    stopped: str | None = None  # where this rank waits, or what it raises
    failure: str | None = None  # what should not have happened: a traceback


def reproduce(name: str) -> dict[str, Finding]:
    """Runs both versions of a bug: {"wrong": finding, "right": finding}.

    Raises `RunError` if a rank failed where it should not.
    """
    findings = {}
    for version in ("wrong", "right"):
        found = run_version(name, version, guarded=True)
        said = min((f for f in found if f.detected), key=lambda f: f.at, default=None)
        detected = one_line(said.detected) if said else None  # the first; others follow from it
        if issubclass(BUGS[name], Stop) and version == "wrong":
            found = run_version(name, version, guarded=False)
        who = [f"rank {rank} {f.stopped}" for rank, f in enumerate(found) if f.stopped]
        number, symptom = len(who) or found[0].number, "; ".join(who) or found[0].symptom
        if len(who) == RANKS and found[0].stopped == found[1].stopped:
            symptom = f"each rank {found[0].stopped}"
        findings[version] = Finding(number, symptom, detected)
    return findings


def run_version(name: str, version: str, guarded: bool) -> list[Finding]:
    """What each of two fresh ranks found. The detector is there if the version is `guarded`."""
    with tempfile.TemporaryDirectory() as folder:
        arguments, log = (name, version, guarded, Path(folder)), Path(folder, "log")
        found = run_ranks(a_rank, RANKS, arguments, seconds=2 * LIMIT_S, log=log, modules=MODULES)
    for rank, finding in enumerate(found):
        if finding.failure:
            raise RunError(f"{name}, {version}: rank {rank} {finding.failure}")
    return found


def a_rank(name: str, version: str, guarded: bool, folder: Path) -> Finding:
    """One rank of one version of a bug, in a process of its own. Ranks meet."""
    torch.set_num_threads(1)
    kind = BUGS[name]
    if guarded and kind.debug:
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = kind.debug
        dist.set_debug_level_from_env()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=2 * LIMIT_S))
    bug = kind(folder)
    given, finding = bug.given(), Finding()
    stops = issubclass(kind, Stop) and version == "wrong" and not guarded
    work = functools.partial(examine, bug, getattr(kind, version), given, guarded, finding)
    thread = threading.Thread(target=work, daemon=True)
    dist.barrier()
    thread.start()
    thread.join(HANG_S if stops else LIMIT_S)
    if thread.is_alive():  # its stack says where it waits
        place = f"waits in {waiting_place(sys._current_frames()[thread.ident])}"
        # A new object: when the other process ends, this thread's wait does, too, with an error.
        finding = Finding(stopped=place, failure=None if stops else place)
    if stops:  # the others look where they wait before this process ends
        (folder / f"{bug.rank}.looked").touch()
        while len(list(folder.glob("*.looked"))) < RANKS:
            time.sleep(0.02)
    return finding


def examine(bug: Bug, version: Callable, given: tuple, guarded: bool, finding: Finding) -> None:
    """Runs a version and the detector, and notes what they said. Ranks meet."""
    detect = functools.partial(bug.detector, version, *given)
    try:
        if not isinstance(bug, Stop):
            outcome = version(*given)
            if not isinstance(outcome, tuple):
                outcome = () if outcome is None else (outcome,)
            finding.number, finding.symptom = bug.symptom(*outcome)
            detect = functools.partial(bug.detector, *outcome)
        elif not guarded:
            detect = functools.partial(version, *given)
        try:
            detect()
        except Exception as error:  # a mixed file, for one, raises many kinds
            finding.at, finding.detected = time.time(), str(error) or type(error).__name__
            short = textwrap.shorten(one_line(str(error)), 150, placeholder=" …")
            finding.stopped = None if guarded else f"raises `{short}`"
            return
        with contextlib.suppress(RuntimeError):  # the other rank found something, and has gone
            gathered("the end of the job")  # ranks meet once more
    except Exception:
        finding.failure = f"failed\n{traceback.format_exc()}"


def waiting_place(frame: types.FrameType) -> str:
    """Names the collective that a stack ends in, and the line of this lab it was reached from."""
    innermost = frame.f_code.co_name
    while (path := Path(frame.f_code.co_filename)).parent != Path(__file__).parent or (
        path.stem == "detectors"
    ):
        frame = frame.f_back  # it ends in `examine`
    code = linecache.getline(str(path), frame.f_lineno).partition("#")[0].strip()
    return f"{MEETINGS.get(innermost, innermost)}, at `{code}`"


def one_line(message: str) -> str:
    """A message of PyTorch without its line breaks, addresses of its C++ source and stack."""
    message = re.split("Exception raised from|Collectives differ", message)[0]
    noise = r"""\[\S+?:\d+\] | at "[^"]+":\d+|, TensorDeviceTypes=.*?\(nullopt\)\)"""
    return " ".join(re.sub(noise, "", message).split())
