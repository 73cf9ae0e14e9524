"""Invariants 6 and 7: signals and faults end all ranks soon, say why, and leave a good checkpoint.

Jobs without a launcher (`quick.job`) show what each rank does; where torchrun has a part in it,
the job runs under torchrun.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import SCRIPT, clean_environment, command, digest_line, losses, run_command
from quick import Job, checkpoints, hashes, here, job, steps

import llm_ddp_parallel_training as reference

SPOILED = Path(__file__).parent / "spoiled.py"
FLAGS = ("--dropout", 0.1, "--log-every", 1, "--batch-size", 4)
PACE = {"kind": "pace", "value": 0.05}


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
    """The step of the newest visible checkpoint."""
    return max(int(name[5:]) for name in checkpoints(run) if name.startswith("step-"))


# -- Signals -------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "status"), [("SIGTERM", 143), ("SIGINT", 130)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_signal_to_one_rank_ends_all_after_saving(tmp_path, ranks, kind, status):
    run, faults = tmp_path / "run", [{"kind": kind, "rank": ranks - 1, "update": 5}]
    endings = job(ranks, *FLAGS, "--max-steps", 30, "--output-dir", run, faults=faults)
    assert [e.status for e in endings] == [status] * ranks
    (line,) = endings[0].err.splitlines()
    assert kind in line and "--resume" in line
    assert all(not e.err for e in endings[1:])
    assert newest(run) in (5, 6) and newest(run) == steps(run)[-1]


@pytest.mark.parametrize("when", ["training", "validation"])
def test_a_batch_systems_signal_to_all_processes_is_survived_with_loader_workers(tmp_path, when):
    run, corpus = tmp_path / "run", tmp_path / "lines.txt"
    corpus.write_text("".join(f"line number {i}\n" for i in range(4000)), encoding="utf-8")
    flags = ("--max-steps", 500, "--num-workers", 2, "--corpus-file", corpus, "--output-dir", run)
    flags += ("--val-fraction", 0.8, "--eval-every", 3) if when == "validation" else ()
    running = Job(1, (*FLAGS, *flags), [PACE], {})
    until_update(run, 3)
    time.sleep(0.3)
    (rank,) = running.processes
    family = children(rank.pid)
    assert len(family) >= 2
    os.killpg(rank.pid, signal.SIGTERM)
    (end,) = running.wait(30)
    assert end.status == 143, end
    assert len(end.err.splitlines()) == 1
    assert newest(run) == steps(run)[-1]
    gone_by = time.monotonic() + 25
    while alive(family) and time.monotonic() < gone_by:
        time.sleep(0.1)
    assert not alive(family)


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
    faults = [{"kind": "sleep", "value": 60, "update": 3}]
    running = Job(1, (*FLAGS, "--max-steps", 30, "--output-dir", run), faults, {})
    until_update(run, 2)
    time.sleep(0.5)
    begin = time.monotonic()
    os.kill(running.processes[0].pid, signal.SIGTERM)
    time.sleep(1.5)
    os.kill(running.processes[0].pid, signal.SIGTERM)
    (end,) = running.wait(30)
    assert end.status == 143
    assert time.monotonic() - begin < 45  # else it would have slept for 60 s first


def test_sigterm_to_torchrun_saves_and_the_run_goes_on_exactly(tmp_path):
    run, whole = tmp_path / "run", tmp_path / "whole"
    flags = (*FLAGS, "--max-steps", 30)
    process = torchrun(2, *flags, "--output-dir", run, faults=[PACE])
    until_update(run, 6)
    process.send_signal(signal.SIGTERM)
    status, _, err = ending(process)
    assert status != 0
    assert re.search(r"stopped: SIGTERM after update \d+ of 30", err), err
    assert newest(run) == steps(run)[-1]
    resumed = job(2, "--resume", run)
    uninterrupted = job(2, *flags, "--output-dir", whole)
    assert digest_line(resumed[0]) == digest_line(uninterrupted[0])
    assert losses(run) == losses(whole)


def test_ranks_whose_torchrun_is_killed_save_and_end(tmp_path):
    run = tmp_path / "run"
    process = torchrun(2, *FLAGS, "--max-steps", 3000, "--output-dir", run, faults=[PACE])
    until_update(run, 3)
    family = children(process.pid)
    assert len(family) == 2
    process.kill()
    _, _, err = ending(process, 20)  # the ranks hold the pipes: it ends when they close them
    end = time.monotonic() + 20
    while alive(family) and time.monotonic() < end:
        time.sleep(0.05)
    assert not alive(family)
    assert err.count("the launcher was killed") == 1 and "stopped: SIGTERM after update" in err
    assert newest(run) == steps(run)[-1]


def test_ctrl_c_ends_torchrun_and_every_child_with_one_short_message(tmp_path):
    run = tmp_path / "run"
    flags = (*FLAGS, "--max-steps", 300, "--num-workers", 1, "--output-dir", run)
    process = torchrun(2, *flags, faults=[PACE])
    until_update(run, 3)
    family = children(process.pid)
    assert len(family) >= 4
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does
    pressed = time.monotonic()
    status, _, err = ending(process, 30)
    while alive(family) and time.monotonic() < pressed + 25:  # before torchrun kills
        time.sleep(0.1)
    assert not alive(family)
    assert status != 0
    assert len(re.findall(r"^stopped: ", err, re.MULTILINE)) == 1, err
    assert newest(run) == steps(run)[-1]


def test_ctrl_c_while_the_run_sets_up_is_one_line(tmp_path, monkeypatch):
    def pressed(*_):
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("torch.manual_seed", pressed)
    finished = here("--max-steps", 2, "--output-dir", tmp_path / "run")
    assert finished.status == 130
    assert len(finished.err.splitlines()) == 1


# -- Errors of one rank --------------------------------------------------------------------


def test_torchrun_names_the_exception_of_one_rank_as_the_root_cause(tmp_path):
    run = tmp_path / "run"
    faults = [{"kind": "exception", "rank": 1, "update": 6}]
    flags = (*FLAGS, "--max-steps", 300, "--save-every", 2, "--output-dir", run)
    process = torchrun(2, *flags, faults=faults)
    until_update(run, 5)
    begin = time.monotonic()
    status, _, err = ending(process)
    assert time.monotonic() - begin < 28  # torchrun kills what does not leave after 30 s
    assert status == 1
    root = err[err.index("Root Cause") :]
    assert re.search(r"rank\s*: 1 ", root), root
    assert "injected failure" in root
    assert "rank 1, update 6" in err
    assert err.count("injected failure") <= 4
    resumed = job(2, "--resume", run, "--max-steps", 7)
    assert [e.status for e in resumed] == [0, 0], resumed


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_outright_ends_the_other_one(tmp_path, victim):
    faults = [{"kind": "SIGKILL", "rank": victim, "update": 4}]
    begin = time.monotonic()
    endings = job(2, *FLAGS, "--max-steps", 300, "--output-dir", tmp_path / "run", faults=faults)
    assert time.monotonic() - begin < 50  # the process group itself would wait for hours
    assert endings[victim].status == -9
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


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_disk_that_fills_up_while_saving_leaves_the_last_good_checkpoint(tmp_path, ranks):
    run = tmp_path / "run"
    first = job(ranks, *FLAGS, "--max-steps", 4, "--save-every", 2, "--output-dir", run)
    assert [e.status for e in first] == [0] * ranks, first
    before = hashes(run / "checkpoints")
    # No file may grow beyond 500 kB: room for the log, not for the state.
    full = {"kind": "full disk", "value": 500_000, "rank": 0}
    endings = job(ranks, "--resume", run, "--max-steps", 30, faults=[full])
    assert [e.status for e in endings] == [1] * ranks, endings
    errors = [line for line in endings[0].err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "cannot write" in errors[0], endings
    assert "too large" in errors[0], "the system's reason should be in it, not PyTorch's"
    assert "Traceback" not in endings[0].err
    assert hashes(run / "checkpoints") == before
    resumed = job(ranks, "--resume", run, "--max-steps", 8)
    assert [e.status for e in resumed] == [0] * ranks, resumed


def test_a_failed_background_save_ends_the_run_at_the_next_update(tmp_path, monkeypatch):
    def full(content, file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(reference, "save_tensors", full)
    run = tmp_path / "run"
    finished = here(*FLAGS, "--max-steps", 300, "--save-every", 2, "--output-dir", run)
    assert finished.status == 1
    (line,) = finished.err.splitlines()
    assert "cannot write" in line and "checkpoints" in line and "No space left" in line
    assert steps(run)[-1] < 300


@pytest.mark.parametrize("where", ["/proc/run", "file/run"])
def test_an_output_folder_that_cannot_be_written_is_one_line(tmp_path, where, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("no folder", encoding="utf-8")
    finished = here("--max-steps", 2, "--output-dir", where)
    assert finished.status == 2
    (line,) = finished.err.splitlines()
    assert line.startswith("error: --output-dir") and where in line


# -- Hangs and slow saves ------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sleep", "SIGSTOP"])
def test_a_rank_that_hangs_is_named_with_update_phase_and_stacks(tmp_path, kind):
    run = tmp_path / "run"
    faults = [{"kind": kind, "rank": 1, "update": 6, "value": 600 if kind == "sleep" else None}]
    flags = (*FLAGS, "--max-steps", 300, "--save-every", 2, "--output-dir", run)
    faults.append({"kind": "pace", "value": 0.3})  # the watchdogs look once a second
    process = torchrun(2, *flags, faults=faults, DDP_TIMEOUT_S="5")
    until_update(run, 5)
    begin = time.monotonic()
    status, _, err = ending(process, 60)
    seconds = time.monotonic() - begin
    assert status == 1, err
    (line,) = [x for x in err.splitlines() if x.startswith("error: no progress")]
    assert "missing: rank 1 " in line and "rank 0 at update 6" in line
    assert re.search("rank 1 at update [3-6], ", line), line
    assert "stack of rank 0" in err
    if kind == "sleep":
        assert "stack of rank 1" in err and "time.sleep" in err
    # A rank that answers nothing is killed, so torchrun knows its number only.
    assert re.search(r"missing: rank 1|rank\s*: 1 ", err[err.index("Root Cause") :]), err
    # Five seconds of patience and four of looking; for a stopped rank torchrun would wait 30 more.
    assert seconds < 35, f"ended after {seconds:.0f} s"
    assert newest(run) == 4


def test_a_save_slower_than_the_time_out_is_waited_for(tmp_path):
    run, faults = tmp_path / "run", [{"kind": "slow save", "value": 9, "rank": 0}]
    flags = (*FLAGS, "--max-steps", 4, "--save-every", 2, "--output-dir", run)
    begin = time.monotonic()
    status, _, err = ending(torchrun(2, *flags, faults=faults, DDP_TIMEOUT_S="4"))
    assert status == 0, err
    assert time.monotonic() - begin > 18
    assert newest(run) == 4


# -- Restarts by the launcher --------------------------------------------------------------


@pytest.mark.parametrize("named", [True, False], ids=["--output-dir", "default folder"])
def test_a_restart_goes_on_from_the_last_checkpoint(tmp_path, named, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = (*FLAGS, "--max-steps", 16, "--save-every", 5)
    crash = {"kind": "exception", "rank": 1, "update": 13, "attempt": 0}
    where = ("--output-dir", "run") if named else ()
    process = torchrun(2, *flags, *where, faults=[crash, PACE], restarts=3)
    status, out, err = ending(process, 120)
    assert status == 0, err
    assert "continuing from" in out and "step-00000010" in out
    (run,) = [Path("run")] if named else Path("runs").iterdir()
    assert steps(run) == list(range(1, 17))
    (uninterrupted, _) = job(2, *flags, "--output-dir", tmp_path / "whole")
    (digest,) = [x.split()[2] for x in out.splitlines() if x.startswith("weights sha256")]
    assert digest == digest_line(uninterrupted)


def test_a_restart_goes_on_although_loader_workers_of_the_killed_rank_linger(tmp_path):
    run = tmp_path / "run"
    crash = {"kind": "SIGKILL", "rank": 0, "update": 8, "attempt": 0, "value": f"{run}/checkpoints"}
    flags = (*FLAGS, "--max-steps", 10, "--save-every", 2, "--num-workers", 1)
    process = torchrun(2, *flags, "--output-dir", run, faults=[crash, PACE], restarts=1)
    status, _, err = ending(process, 120)
    assert status == 0, err
    assert steps(run) == list(range(1, 11))


def test_a_users_mistake_does_not_loop_through_the_restarts(tmp_path):
    flags = ("--corpus-file", tmp_path / "nowhere.txt", "--output-dir", tmp_path / "run")
    status, _, err = ending(torchrun(2, *flags, restarts=3))
    assert status != 0
    assert err.count("error: --corpus-file") == 1, err
    assert not (tmp_path / "run").exists()


def restarted(monkeypatch, job_id: str) -> None:
    """Makes this process look like one that torchrun started again."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", job_id)


def test_a_restart_takes_the_newest_run_of_a_launchers_name_that_is_used_again(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job1")
    flags = (*FLAGS, "--save-every", 2)
    old, new = Path("runs/tiny-20200101-000000"), Path("runs/tiny-20200102-000000")
    for run, updates in ((old, 4), (new, 6)):
        assert here(*flags, "--max-steps", updates, "--output-dir", run).status == 0
    restarted(monkeypatch, "job1")
    finished = here(*flags, "--max-steps", 8)
    assert finished.status == 0, finished.err
    assert steps(new) == list(range(1, 9)) and steps(old) == list(range(1, 5))


def test_a_restart_goes_on_from_its_newest_checkpoint_not_from_the_named_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job2")
    assert here(*FLAGS, "--save-every", 2, "--max-steps", 4, "--output-dir", "run").status == 0
    restarted(monkeypatch, "job2")
    finished = here("--resume", "run/checkpoints/step-00000002", "--max-steps", 6)
    assert finished.status == 0, finished.err
    assert "step-00000004" in finished.out


def test_foreign_files_among_the_runs_do_not_break_a_restart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, content in (("a", "[]"), ("b", "3"), ("c", "{"), ("d", '{"launch": "job3"}')):
        Path("runs", name).mkdir(parents=True)
        Path("runs", name, "run.json").write_text(content, encoding="utf-8")
    restarted(monkeypatch, "job3 of another name")
    finished = here(*FLAGS, "--max-steps", 2)
    assert finished.status == 0, finished.err


# -- Side by side --------------------------------------------------------------------------


def test_two_jobs_side_by_side_succeed_in_folders_of_their_own(tmp_path):
    args = command(2, "--cpu", "--max-steps", 3, script=SCRIPT)
    both = [
        subprocess.Popen(
            args, cwd=tmp_path, env=clean_environment(), stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, encoding="utf-8", start_new_session=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    endings = [ending(process) for process in both]
    assert [status for status, _, _ in endings] == [0, 0], endings
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_two_runs_that_begin_in_the_same_second_get_different_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    running = Job(1, (*FLAGS, "--max-steps", 300), [PACE, {"kind": "clock"}], {})
    end = time.monotonic() + 30
    while not running.text(0, "out") and time.monotonic() < end:
        time.sleep(0.02)
    (second,) = job(1, *FLAGS, "--max-steps", 2, faults=[{"kind": "clock"}])
    running.kill()
    running.wait()
    assert second.status == 0, second.err
    assert len(list(Path("runs").iterdir())) == 2


def test_a_bad_time_out_is_one_line():
    finished = run_command(
        [sys.executable, str(SCRIPT), "--cpu", "--dry-run"],
        env=clean_environment(DDP_TIMEOUT_S="ten"),
    )
    assert finished.status == 2
    assert len(finished.err.splitlines()) == 1 and "DDP_TIMEOUT_S" in finished.err
