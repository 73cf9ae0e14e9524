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
HERE = Path(__file__).parent
MODULES = (__package__, "torch._dynamo")  # DDP imports the latter, in seconds

# What a rank that waits in C++ is doing there, by the innermost Python function on its stack.
MEETINGS = {
    "_engine_run_backward": "DDP's all-reduce of the gradients",
    "_distributed_broadcast_coalesced": "DDP's broadcast of the buffers",
    "_pre_forward": "DDP's agreement on the order of its buckets",
}


@dataclasses.dataclass
class Finding:
    """What came of one version."""

    number: float  # the symptom; of a run that stops, how many ranks wait or fail
    symptom: str  # the same as a sentence
    detected: str | None  # what the detector says, None if it found nothing


@dataclasses.dataclass
class RankFinding:
    """What one rank found. A rank that came back to the end of the job has no `stopped`."""

    number: float = 0
    symptom: str = "both ranks came back"
    detected: str | None = None
    at: float = 0  # when it was detected
    stopped: str | None = None  # where it waits, or what it raises
    failure: str | None = None  # what should not have happened: a traceback


def reproduce(name: str) -> dict[str, Finding]:
    """Runs both versions of a bug: {"wrong": finding, "right": finding}.

    Raises `RunError` if a rank failed where it should not.
    """
    findings = {}
    for version in ("wrong", "right"):
        found = run_version(name, version, guarded=True)
        said = sorted((f.at, f.detected) for f in found if f.detected)
        detected = one_line(said[0][1]) if said else None  # the first; others follow from it
        if issubclass(BUGS[name], Stop) and version == "wrong":
            found = run_version(name, version, guarded=False)
        stopped = [f.stopped for f in found if f.stopped]
        who = [f"rank {rank} {f.stopped}" for rank, f in enumerate(found) if f.stopped]
        if len(stopped) == RANKS and len(set(stopped)) == 1:
            who = [f"each rank {stopped[0]}"]
        number, symptom = len(stopped) or found[0].number, "; ".join(who) or found[0].symptom
        findings[version] = Finding(number, symptom, detected)
    return findings


def run_version(name: str, version: str, guarded: bool) -> list[RankFinding]:
    """What each of two fresh ranks found. The detector is there if the version is `guarded`."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        arguments = (name, version, guarded, Path(folder))
        found = run_ranks(
            rank_main, RANKS, arguments, seconds=2 * LIMIT_S, log=log, modules=MODULES
        )
    for rank, finding in enumerate(found):
        if finding.failure:
            raise RunError(f"{name}, {version}: rank {rank} {finding.failure}")
    return found


def rank_main(name: str, version: str, guarded: bool, folder: Path) -> RankFinding:
    """One rank of one version of a bug, in a process of its own. Ranks meet."""
    torch.set_num_threads(1)
    kind = BUGS[name]
    if guarded:
        os.environ.update(kind.environment)
        dist.set_debug_level_from_env()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=2 * LIMIT_S))
    bug = kind(folder)
    given, finding = bug.given(), RankFinding()
    stops = issubclass(kind, Stop) and version == "wrong" and not guarded
    work = functools.partial(examine, bug, getattr(kind, version), given, guarded, finding)
    thread = threading.Thread(target=work, daemon=True)
    dist.barrier()
    thread.start()
    thread.join(HANG_S if stops else LIMIT_S)
    if thread.is_alive():  # its stack says where it waits
        place = f"waits in {waiting_place(sys._current_frames()[thread.ident])}"
        # A new object: when the other process ends, this thread's wait does, too, with an error.
        finding = RankFinding(stopped=place, failure=None if stops else place)
    if stops:  # the others look where they wait before this process ends
        (folder / f"{bug.rank}.looked").touch()
        while len(list(folder.glob("*.looked"))) < RANKS:
            time.sleep(0.02)
    return finding


def examine(bug: Bug, version: Callable, given: tuple, guarded: bool, finding: RankFinding) -> None:
    """Runs a version and the detector, and notes what they said. Ranks meet."""
    detector = type(bug).detector
    try:
        if not isinstance(bug, Stop):
            outcome = version(*given)
            if not isinstance(outcome, tuple):
                outcome = () if outcome is None else (outcome,)
            finding.number, finding.symptom = bug.symptom(*outcome)
            detect = functools.partial(detector, *outcome)
        else:
            detect = functools.partial(detector, version, *given)
            detect = detect if guarded else functools.partial(version, *given)
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
    while frame and not is_of_a_bug(Path(frame.f_code.co_filename)):
        frame = frame.f_back
    if frame is None:
        return "an unknown place"
    code = linecache.getline(frame.f_code.co_filename, frame.f_lineno).partition("#")[0].strip()
    return f"{MEETINGS.get(innermost, innermost)}, at `{code}`"


def is_of_a_bug(path: Path) -> bool:
    return path.parent == HERE and path.stem != "detectors"


def one_line(message: str) -> str:
    """A message of PyTorch without its line breaks, addresses of its C++ source and stack."""
    message = re.split("Exception raised from|Collectives differ", message)[0]
    noise = r"""\[\S+?:\d+\] | at "[^"]+":\d+|, TensorDeviceTypes=.*?\(nullopt\)\)"""
    message = re.sub(noise, "", message)
    return " ".join(message.split())
