"""Invariants 6 and 7: signals and faults end all ranks soon, say why, and leave a good checkpoint.

Jobs without a launcher (`quick.job`) show what each rank does; where torchrun has a part in it,
the job runs under torchrun.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import clean_environment, command, digest_line, losses, weights
from quick import Job, checkpoints, hashes, here, job, steps

import llm_ddp_parallel_training as reference

SPOILED = Path(__file__).parent / "spoiled.py"
FLAGS = ("--dropout", 0.1, "--log-every", 1, "--batch-size", 4)
PACE = {"kind": "pace", "value": 0.05}
BLOCKED = {"kind": "blocked teardown", "value": 600}


def torchrun(ranks: int, *flags: object, faults=(), restarts: int = 0, **environment: str):
    """A started torchrun job in a session of its own."""
    args = command(ranks, "--cpu", "--threads", 1, *flags, script=SPOILED)
    args[3:3] = [f"--max-restarts={restarts}"]
    return subprocess.Popen(
        args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8",
        errors="replace", start_new_session=True,
        env=clean_environment(FAULTS=json.dumps(list(faults)), **environment),
    )  # fmt: skip


def ending(process: subprocess.Popen, timeout: float = 90) -> tuple[int, str, str]:
    """Status, output and errors of a job; fails if it, or one of its ranks, is left after that."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        ranks = children(process.pid)
        for pid in [process.pid, *ranks]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"hung for {timeout} s\n{out}\n{err}")
    return process.returncode, out, err


def children(pid: int) -> list[int]:
    """All descendants of a process (Linux)."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text("utf-8").split()):
                found += [child, *children(child)]
    return found


def alive(pids: list[int]) -> list[int]:
    """Those of the processes that still run; a zombie counts as gone."""
    left = []
    for pid in pids:
        with contextlib.suppress(OSError):
            state = Path(f"/proc/{pid}/stat").read_text("utf-8").rsplit(")", 1)[1].split()[0]
            left += [pid] if state != "Z" else []
    return left


def until_gone(pids: list[int], timeout: float = 60) -> None:
    """Waits until processes have ended."""
    end = time.monotonic() + timeout
    while alive(pids):
        if time.monotonic() > end:
            pytest.fail(f"{alive(pids)} still run after {timeout} s")
        time.sleep(0.05)


def until_update(run: Path, update: int, timeout: float = 60) -> None:
    """Waits until a run has logged an update."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        with contextlib.suppress(OSError, ValueError):
            if steps(run)[-1:] >= [update]:
                return
        time.sleep(0.05)
    pytest.fail(f"update {update} did not come in {timeout} s")


def newest(run: Path) -> int:
    """The update of the newest checkpoint."""
    return max(int(name[5:-3]) for name in checkpoints(run) if name.endswith(".pt"))


# -- Signals -------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "status"), [("SIGTERM", 143), ("SIGINT", 130), ("SIGUSR1", 138)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_signal_to_one_rank_ends_all_after_saving(tmp_path, ranks, kind, status):
    run, faults = tmp_path / "run", [{"kind": kind, "rank": ranks - 1, "update": 5}]
    endings = job(ranks, *FLAGS, "--max-steps", 30, "--output-dir", run, faults=faults)
    assert [e.status for e in endings] == [status] * ranks
    (line,) = endings[0].err.splitlines()
    assert f"stopped: {kind} after update" in line and f"--resume {run}" in line
    assert all(not e.err for e in endings[1:])
    assert newest(run) in (5, 6) and newest(run) == steps(run)[-1]


@pytest.mark.parametrize("when", ["training", "validation"])
def test_a_batch_systems_signal_to_all_processes_at_once_is_one_stop(tmp_path, when):
    run, corpus = tmp_path / "run", tmp_path / "lines.txt"
    corpus.write_text("".join(f"line number {i}\n" for i in range(4000)), encoding="utf-8")
    flags = ("--max-steps", 500, "--corpus-file", corpus, "--output-dir", run)
    flags += ("--val-fraction", 0.8, "--eval-every", 3) if when == "validation" else ()
    running = Job(2, (*FLAGS, *flags), [PACE], {})
    until_update(run, 3)
    for rank in running.processes:
        os.kill(rank.pid, signal.SIGTERM)
    endings = running.wait()
    assert [e.status for e in endings] == [143, 143], endings
    assert len(endings[0].err.splitlines()) == 1 and not endings[1].err
    assert newest(run) == steps(run)[-1]


def test_a_signal_in_the_last_validation_does_not_pass_for_a_finished_run(tmp_path):
    corpus, run = tmp_path / "lines.txt", tmp_path / "run"
    corpus.write_text("".join(f"line number {i}\n" for i in range(9000)), encoding="utf-8")
    flags = ("--max-steps", 3, "--corpus-file", corpus, "--val-fraction", 0.9, "--batch-size", 2)
    running = Job(1, ("--log-every", 1, *flags, "--output-dir", run), [], {})
    until_update(run, 3)
    os.kill(running.processes[0].pid, signal.SIGTERM)
    (end,) = running.wait()
    assert end.status == 143, end
    finished = here("--resume", run)
    assert finished.status == 0 and "validation final" in finished.out


def test_a_second_signal_leaves_at_once(tmp_path):
    run = tmp_path / "run"
    faults = [{"kind": "sleep", "value": 600, "update": 3}]
    running = Job(1, (*FLAGS, "--max-steps", 30, "--output-dir", run), faults, {})
    until_update(run, 2)
    time.sleep(0.5)
    os.kill(running.processes[0].pid, signal.SIGTERM)
    time.sleep(1.5)
    os.kill(running.processes[0].pid, signal.SIGTERM)
    (end,) = running.wait()  # and not after 600 s
    assert end.status == 143


@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_c_while_the_run_sets_up_is_one_line(tmp_path, ranks):
    faults = [{"kind": "Ctrl-C in set-up"}]
    endings = job(ranks, "--max-steps", 2, "--output-dir", tmp_path / "run", faults=faults)
    assert [e.status for e in endings] == [130] * ranks
    assert [e.err for e in endings] == ["interrupted\n", ""][:ranks]
    assert not (tmp_path / "run").exists()


TO_THE_LAUNCHER = {  # (signal, also to each of its ranks, which have sessions of their own)
    "asked": ("SIGTERM", False),
    "Ctrl-C": ("SIGINT", False),
    "warned": ("SIGUSR1", True),  # as a batch system does it
    "killed": ("SIGKILL", False),
}


@pytest.fixture(scope="module")
def signalled(tmp_path_factory):
    """How torchrun jobs of two ranks ended after a signal, by its kind: (folder, status, errors).

    They are started together, since each of them needs seconds to import torch.
    """
    jobs, endings = {}, {}
    for kind in TO_THE_LAUNCHER:
        run = tmp_path_factory.mktemp(kind) / "run"
        flags = (*FLAGS, "--max-steps", 3000, "--output-dir", run)
        jobs[kind] = run, torchrun(2, *flags, faults=[PACE])
    for kind, (run, process) in jobs.items():
        until_update(run, 3, timeout=120)
        ranks = children(process.pid)
        number, to_ranks = TO_THE_LAUNCHER[kind]
        for pid in (*(ranks if to_ranks else ()), process.pid):
            os.kill(pid, getattr(signal, number))
        status, _, err = ending(process)  # when all processes have closed the pipes
        until_gone(ranks)
        assert len(ranks) == 2
        endings[kind] = run, status, err
    return endings


@pytest.mark.parametrize("kind", TO_THE_LAUNCHER)
def test_a_signal_to_torchrun_is_one_short_message_after_saving(signalled, kind):
    run, status, err = signalled[kind]
    name = TO_THE_LAUNCHER[kind][0].replace("KILL", "TERM")  # what its orphans then give themselves
    assert status != 0
    (line,) = re.findall(r"^stopped: .*$", err, re.MULTILINE)
    assert re.search(rf"{name} after update \d+ of 3000; .*--resume {run}", line)
    assert newest(run) == steps(run)[-1]


def test_a_run_stopped_under_torchrun_goes_on_exactly(signalled, tmp_path):
    run, _, _ = signalled["asked"]
    updates = newest(run) + 4
    resumed = job(2, "--resume", run, "--max-steps", updates)
    whole = job(2, *FLAGS, "--max-steps", updates, "--output-dir", tmp_path / "whole")
    assert digest_line(resumed[0]) == digest_line(whole[0])
    assert losses(run) == losses(tmp_path / "whole")


# -- Errors of one rank --------------------------------------------------------------------


def test_an_exception_of_one_rank_ends_all_with_its_traceback_as_the_root_cause(tmp_path):
    run = tmp_path / "run"
    faults = [{"kind": "exception", "rank": 1, "update": 6}, BLOCKED]
    flags = (*FLAGS, "--max-steps", 300, "--save-every", 2, "--output-dir", run)
    status, _, err = ending(torchrun(2, *flags, faults=faults))
    assert status == 1
    root = err[err.index("Root Cause") :]
    assert re.search(r"rank\s*: 1 ", root), root
    assert "injected failure" in root
    assert "rank 1, update 6" in err
    assert err.count("injected failure") <= 4
    assert not (run / "tiny_transformer.pt").exists()
    resumed = job(2, "--resume", run, "--max-steps", 7)
    assert [e.status for e in resumed] == [0, 0], resumed


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_alone_waits_for_nobody_to_leave_the_process_group(tmp_path, failing):
    faults = [{"kind": "exception", "rank": failing, "update": 4}, BLOCKED]
    endings = job(2, *FLAGS, "--max-steps", 300, "--output-dir", tmp_path / "run", faults=faults)
    assert [e.status for e in endings] == [1, 1], endings
    own, other = endings[failing].err, endings[1 - failing].err
    assert f"rank {failing}, update 4" in own and "RuntimeError: injected failure" in own
    assert "lost contact" in other and "Traceback" not in other


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_outright_ends_the_other_one(tmp_path, victim):
    faults = [{"kind": "SIGKILL", "rank": victim, "update": 4}]
    endings = job(2, *FLAGS, "--max-steps", 300, "--output-dir", tmp_path / "run", faults=faults)
    assert endings[victim].status == -9  # the process group itself would wait for hours
    survivor = endings[1 - victim]
    assert survivor.status == 1
    (line,) = survivor.err.splitlines()[-1:]
    assert f"rank {1 - victim}, update 4" in line and "lost contact" in line


def test_a_loss_that_is_not_finite_on_one_rank_ends_all_with_three_and_names_the_update(tmp_path):
    run, faults = tmp_path / "run", [{"kind": "nan", "rank": 1, "update": 6}]
    flags = (*FLAGS, "--max-steps", 30, "--save-every", 2, "--output-dir", run)
    endings = job(2, *flags, faults=faults)
    assert [e.status for e in endings] == [3, 3], endings
    (line,) = endings[0].err.splitlines()
    assert line.startswith("error: update 6:") and "nan" in line
    assert not endings[1].err
    assert newest(run) == 4
    assert [e.status for e in job(2, "--resume", run, "--max-steps", 8)] == [0, 0]


# -- Disk ----------------------------------------------------------------------------------

STATE_TOO_LARGE = 200_000  # bytes of a file: room for the log, not for a checkpoint
NO_LIMIT = -1


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_disk_that_is_full_for_a_while_costs_one_checkpoint_and_not_the_run(tmp_path, ranks):
    run = tmp_path / "run"
    full = [
        {"kind": "full disk", "value": STATE_TOO_LARGE, "rank": 0, "update": 3},
        {"kind": "full disk", "value": NO_LIMIT, "rank": 0, "update": 7},
    ]
    flags = (*FLAGS, "--max-steps", 10, "--save-every", 2, "--keep", 9, "--output-dir", run)
    endings = job(ranks, *flags, faults=[*full, PACE])
    assert [e.status for e in endings] == [0] * ranks, endings
    warnings = endings[0].err.splitlines()
    assert warnings and all("warning: cannot write a checkpoint" in line for line in warnings)
    assert "File too large" in warnings[0], "the system's reason should be in it, not PyTorch's"
    saved = checkpoints(run)
    assert {"step-00000008.pt", "step-00000010.pt"} <= set(saved)
    assert "step-00000004.pt" not in saved and not [n for n in saved if n.endswith(".partial")]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_disk_that_stays_full_leaves_the_last_good_checkpoint(tmp_path, ranks):
    run = tmp_path / "run"
    first = job(ranks, *FLAGS, "--max-steps", 4, "--save-every", 2, "--output-dir", run)
    assert [e.status for e in first] == [0] * ranks, first
    before = hashes(run / "checkpoints")
    full = {"kind": "full disk", "value": STATE_TOO_LARGE, "rank": 0}
    endings = job(ranks, "--resume", run, "--max-steps", 10, faults=[full])
    assert [e.status for e in endings] == [1] * ranks, endings
    (line,) = [line for line in endings[0].err.splitlines() if line.startswith("error: ")]
    assert "cannot write" in line and "tiny_transformer.pt" in line and "File too large" in line
    assert "Traceback" not in endings[0].err
    assert hashes(run / "checkpoints") == before
    resumed = job(ranks, "--resume", run, "--max-steps", 8)
    assert [e.status for e in resumed] == [0] * ranks, resumed


@pytest.fixture
def temporary(tmp_path, monkeypatch) -> Path:
    """Where this process makes its temporary folders."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


@pytest.fixture
def full_folder(monkeypatch):
    """Call it with a folder in which the reference can then write no file of that name."""

    def fill(folder: Path, name: str) -> None:
        def checked(path, content):
            if folder in path.parents and path.name.startswith(name):
                raise OSError(28, "No space left on device")
            return write_bytes(path, content)

        write_bytes = Path.write_bytes
        monkeypatch.setattr(Path, "write_bytes", checked)

    return fill


def test_a_disk_that_is_full_at_the_very_end_does_not_lose_the_weights(
    tmp_path, temporary, full_folder
):
    flags = (*FLAGS, "--max-steps", 4)
    whole = here(*flags, "--output-dir", tmp_path / "whole")
    full_folder(tmp_path / "run", "tiny_transformer.pt")
    finished = here(*flags, "--output-dir", tmp_path / "run")
    assert whole.status == 0 and finished.status == 1
    (line,) = finished.err.splitlines()
    assert line.startswith("error: cannot write") and "No space left on device" in line
    (elsewhere,) = temporary.glob("rescued-*")
    assert line.endswith(f"the trained weights are in {elsewhere}")
    saved, expected = weights(elsewhere), weights(tmp_path / "whole")
    assert saved.keys() == expected.keys()
    assert all((saved[name] == expected[name]).all() for name in saved)
    assert not list((tmp_path / "run").glob("tiny_transformer.pt*"))


def test_a_stop_while_the_disk_is_full_saves_elsewhere_and_says_where(tmp_path):
    elsewhere, place = tmp_path / "temporary", tmp_path / "place"
    elsewhere.mkdir()
    flags = (*FLAGS, "--max-steps", 9, "--checkpoint-dir", place)
    faults = [{"kind": "lost folder", "value": str(place), "update": 5, "rank": 0}]
    faults += [{"kind": "SIGTERM", "update": 5}]
    endings = job(
        2, *flags, "--output-dir", tmp_path / "run", faults=faults, TMPDIR=str(elsewhere)
    )  # fmt: skip
    assert [e.status for e in endings] == [143, 143], endings
    warning, stopped = endings[0].err.splitlines()
    assert warning.startswith("warning: cannot write a checkpoint to")
    (saved,) = elsewhere.rglob("step-*.pt")
    assert stopped.endswith(f"go on with --resume {saved}")
    resumed = job(2, "--resume", saved, "--output-dir", tmp_path / "resumed")
    whole = job(2, *FLAGS, "--max-steps", 9, "--output-dir", tmp_path / "whole")
    assert digest_line(resumed[0]) == digest_line(whole[0])


def test_a_stop_whose_state_can_be_saved_nowhere_is_an_error(tmp_path):
    faults = [{"kind": "SIGTERM", "update": 5}, {"kind": "full disk", "value": STATE_TOO_LARGE}]
    flags = (*FLAGS, "--max-steps", 9, "--output-dir", tmp_path / "run")
    (end,) = job(1, *flags, faults=faults)
    assert end.status == 1
    assert [line.split()[0] for line in end.err.splitlines()] == ["warning:", "error:"]
    assert end.err.count("File too large") == 2


def test_a_log_that_cannot_be_written_on_the_way_is_whole_in_the_end(tmp_path, monkeypatch):
    def to_a_full_disk(path, mode="r", **options):
        full = Path(path).name == "metrics.jsonl" and mode == "a"
        return open("/dev/full" if full else path, mode, **options)

    monkeypatch.setattr(reference, "open", to_a_full_disk, raising=False)
    finished = here(*FLAGS, "--max-steps", 9, "--output-dir", tmp_path / "run")
    assert finished.status == 0, finished
    (line,) = finished.err.splitlines()
    assert line.startswith("warning: cannot write") and "metrics.jsonl: No space left" in line
    assert steps(tmp_path / "run") == list(range(1, 10))


def test_a_full_disk_under_standard_output_does_not_end_the_run(tmp_path, monkeypatch):
    full, err = open("/dev/full", "w", encoding="utf-8"), io.StringIO()
    monkeypatch.setattr(sys, "stdout", full)
    monkeypatch.setattr(sys, "stderr", err)
    flags = ("--cpu", "--threads", 1, "--max-steps", 2, "--output-dir", tmp_path / "run")
    reference.main([str(flag) for flag in flags])
    with contextlib.suppress(OSError):
        full.close()
    assert err.getvalue() == "" and weights(tmp_path / "run")


@pytest.mark.parametrize("where", ["/proc/run", "file/run"])
def test_an_output_folder_that_cannot_be_written_is_one_line(tmp_path, where, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("no folder", encoding="utf-8")
    finished = here("--max-steps", 2, "--output-dir", where)
    assert finished.status == 2
    (line,) = finished.err.splitlines()
    assert line.startswith("error: --output-dir") and where in line


def test_results_are_complete_or_absent(tmp_path, monkeypatch):
    replace, flags = os.replace, (*FLAGS, "--max-steps", 2, "--save-every", 1)

    def killed(source, target):  # between the last byte of the weights and their name
        if Path(target).name == "tiny_transformer.pt":
            raise KeyboardInterrupt
        replace(source, target)

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        assert here(*flags, "--output-dir", run).status == 130
    assert not (run / "tiny_transformer.pt").exists()
    assert here("--resume", run).status == 0
    assert weights(run) and not list(run.rglob("*.partial"))


# -- Hangs and slow saves ------------------------------------------------------------------


def test_a_rank_that_hangs_is_named_by_itself_with_update_phase_and_stack(tmp_path):
    run = tmp_path / "run"
    faults = [{"kind": "sleep", "rank": 1, "update": 6, "value": 600}]
    flags = (*FLAGS, "--max-steps", 300, "--save-every", 2, "--output-dir", run)
    status, _, err = ending(torchrun(2, *flags, faults=faults, DDP_TIMEOUT_S="4"))
    assert status == 1, err
    (line,) = re.findall(r"^error: rank 1, update 6, .*$", err, re.MULTILINE)
    assert re.search(r": no progress for \d+ s, more than DDP_TIMEOUT_S allows", line)
    assert "stack of rank 1:" in err and "time.sleep" in err
    root = err[err.index("Root Cause") :]
    assert re.search(r"rank\s*: 1 ", root) and line.removeprefix("error: ") in root, err
    assert newest(run) == 4


def test_a_rank_that_is_stopped_from_outside_is_noticed_by_the_others(tmp_path):
    run, faults = tmp_path / "run", [{"kind": "SIGSTOP", "rank": 1, "update": 6}]
    flags = (*FLAGS, "--max-steps", 300, "--save-every", 2, "--output-dir", run)
    running = Job(2, flags, faults, {"DDP_TIMEOUT_S": "3"})
    running.processes[0].join(60)
    status, err = running.processes[0].exitcode, running.text(0, "err")
    running.kill()
    running.wait()
    assert status == 1, err
    (line,) = re.findall(r"^error: rank 0, update 6, .*$", err, re.MULTILINE)
    assert ": waiting for another rank for" in line and "stack of rank 0:" in err
    assert newest(run) == 4


def test_a_save_slower_than_the_time_out_is_waited_for(tmp_path):
    run, faults = tmp_path / "run", [{"kind": "slow save", "value": 4, "rank": 0}]
    flags = (*FLAGS, "--max-steps", 4, "--save-every", 2, "--output-dir", run)
    endings = job(2, *flags, faults=faults, DDP_TIMEOUT_S="1")
    assert [e.status for e in endings] == [0, 0], endings
    assert newest(run) == 4


# -- Restarts by the launcher --------------------------------------------------------------


def test_restarts_go_on_from_the_last_checkpoint_with_resume_auto(tmp_path):
    run, flags = tmp_path / "run", (*FLAGS, "--max-steps", 16, "--save-every", 5)
    crashes = [
        {"kind": "exception", "rank": 1, "update": 8, "attempt": 0},
        {"kind": "SIGKILL", "rank": 0, "update": 8, "attempt": 1},
    ]
    where = ("--output-dir", run, "--resume", "auto")
    process = torchrun(2, *flags, *where, faults=[*crashes, PACE], restarts=3)
    status, out, err = ending(process, 180)
    assert status == 0, err
    assert re.findall(r"^resume .*going on from .*/(.*)$", out, re.MULTILINE) == [
        "step-00000005.pt", "step-00000010.pt",
    ]  # fmt: skip
    assert steps(run) == list(range(1, 17))
    (uninterrupted, _) = job(2, *flags, "--output-dir", tmp_path / "whole")
    (digest,) = [x.split()[2] for x in out.splitlines() if x.startswith("weights sha256")]
    assert digest == digest_line(uninterrupted)


def test_a_users_mistake_does_not_loop_through_the_restarts(tmp_path):
    flags = ("--corpus-file", tmp_path / "nowhere.txt", "--output-dir", tmp_path / "run")
    status, _, err = ending(torchrun(2, *flags, restarts=3))
    assert status != 0
    assert err.count("error: --corpus-file") == 1, err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("rank", "error", "again"),
    [
        (0, reference.UserError("wrong"), False),
        (1, reference.UserError("wrong here"), False),
        (0, reference.Diverged("nan"), False),
        (0, reference.Stopped("SIGTERM", 15), False),
        (0, reference.WriteError("full"), True),
        (1, RuntimeError("a bug, or a bit that flipped"), True),
    ],
    ids=repr,
)
def test_only_what_may_pass_is_tried_again_by_the_launcher(monkeypatch, capsys, rank, error, again):
    told = []
    monkeypatch.setattr(os, "kill", lambda *to: told.append(to))
    monkeypatch.setattr(reference, "PEER_LOSS_GRACE_S", 0)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("RANK", str(rank))
    with pytest.raises((SystemExit, RuntimeError)), reference.one_clear_ending():
        raise error
    assert told == ([] if again else [(os.getppid(), signal.SIGTERM)])


# -- Side by side --------------------------------------------------------------------------


def test_two_jobs_that_begin_in_the_same_second_get_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    both = [Job(2, (*FLAGS, "--max-steps", 3), [{"kind": "clock"}], {}) for _ in range(2)]
    endings = [end for running in both for end in running.wait()]
    assert [e.status for e in endings] == [0] * 4, endings
    runs = list(Path("runs").iterdir())
    assert len(runs) == 2
    assert [steps(run) for run in runs] == [[1, 2, 3]] * 2


def test_a_bad_time_out_is_one_line(monkeypatch):
    monkeypatch.setenv("DDP_TIMEOUT_S", "ten")
    finished = here("--dry-run")
    assert finished.status == 2
    assert len(finished.err.splitlines()) == 1 and "DDP_TIMEOUT_S" in finished.err
