"""How ranks end under NCCL, shown on the CPU by Gloo that hangs where NCCL would (`pretend.py`)."""

from __future__ import annotations

import json
import signal
import sys

import quick
from conftest import ROOT, TORCHRUN, clean_environment, root_cause, run_command

FLAGS = ("--max-steps", 5, "--val-fraction", 0, "--output-dir")


def test_a_run_that_ends_well_destroys_the_group_on_all_ranks(tmp_path):
    first, other = quick.job(2, *FLAGS, tmp_path / "run", module="pretend", PRETEND="nccl")
    assert first.status == other.status == 0, first.err + other.err
    assert "destroyed together" in first.out and "destroyed together" in other.out


# torchrun that kills what has not ended two seconds after SIGTERM, not thirty.
IMPATIENT = """
from torch.distributed.elastic.multiprocessing.api import PContext
from torch.distributed.run import main
PContext.close.__defaults__ = (None, 2)
main()
"""


def test_a_rank_that_fails_alone_does_not_wait_for_others_and_is_the_root_cause(tmp_path):
    """Its traceback is printed, and the rank that sits in an all-reduce is not called the cause."""
    fault = {"kind": "exception", "rank": 1, "update": 3}
    environment = clean_environment(PRETEND="nccl", FAULTS=json.dumps([fault]))
    launcher = [sys.executable, "-c", IMPATIENT, *TORCHRUN[3:], "--nproc_per_node=2"]
    script = [*launcher, str(ROOT / "tests" / "pretend.py"), "--cpu"]
    finished = run_command([*script, *map(str, FLAGS), str(tmp_path / "run")], env=environment)
    assert finished.status == 1
    assert "rank 1, update 3" in finished.err and "Traceback" in finished.err
    cause = root_cause(finished)
    assert "rank      : 1" in cause and "injected failure" in cause
    assert "rank 0, update 3" not in finished.err
    assert "destroyed together" not in finished.out


def test_a_rank_whose_peer_was_killed_is_ended_by_its_own_watch(tmp_path):
    """Without a launcher nobody else would end it; NCCL itself raises nothing."""
    fault = {"kind": "SIGKILL", "rank": 1, "update": 3}
    flags = (*FLAGS, tmp_path / "run")
    options = {"PRETEND": "nccl", "DDP_TIMEOUT_S": "1"}
    first, other = quick.job(2, *flags, faults=[fault], module="pretend", **options)
    assert other.status == -signal.SIGKILL and first.status == 1
    assert "rank 0, update 3, " in first.err and "waiting for another rank" in first.err


def test_ranks_that_a_signal_stops_together_save_and_leave_without_destroying(tmp_path):
    fault = {"kind": "SIGTERM", "update": 2}
    flags = (*FLAGS, tmp_path / "run")
    first, other = quick.job(2, *flags, faults=[fault], module="pretend", PRETEND="nccl")
    assert first.status == other.status == 128 + signal.SIGTERM, first.err + other.err
    assert "the state is saved" in first.err
    assert quick.checkpoints(tmp_path / "run") == ["step-00000002.pt"]


def test_a_mistake_that_all_ranks_find_once_the_group_is_there_ends_them_all(tmp_path):
    flags = ("--corpus-file", tmp_path / "missing.txt", "--output-dir", tmp_path / "run")
    first, other = quick.job(2, *flags, module="pretend", PRETEND="nccl")
    assert first.status == other.status == 2
    assert first.err.count("error: ") == 1 and "missing.txt" in first.err


def test_the_watch_begins_before_the_group_is_formed(tmp_path):
    """Of two ranks, one never comes."""
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(quick.free_port())}
    environment |= {"RANK": "0", "WORLD_SIZE": "2", "DDP_TIMEOUT_S": "1", "PRETEND": "nccl"}
    flags = (*FLAGS, tmp_path / "run")
    (alone,) = quick.job(1, *flags, module="pretend", **environment)
    assert alone.status == 1
    assert "rank 0, update 0, forming the process group: waiting for another rank" in alone.err
