"""Launched as a user would: one process, torchrun with two and three, and what they print."""

from __future__ import annotations

import collections
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from conftest import (
    SCRIPT,
    clean_environment,
    command,
    digest_line,
    losses,
    main_here,
    metrics,
    run_command,
    train_here,
    weights,
)
from quick import job

import llm_ddp_parallel_training as ddp


def launch_in(folder, line: str):
    """Runs a command line word for word in a folder that holds nothing but the script."""
    shutil.copy(SCRIPT, folder)
    python, *rest = shlex.split(line)
    assert python == "python"
    finished = run_command([sys.executable, *rest], cwd=folder)
    assert finished.status == 0, finished.out + finished.err
    return finished


def each_line_once(out: str) -> bool:
    return max(collections.Counter(out.splitlines()).values()) == 1


def saved_in(folder):
    (run,) = (folder / "runs").iterdir()
    assert len(metrics(run)) >= 2
    assert weights(run)
    return run


def test_the_command_for_two_ranks_works_word_for_word(tmp_path):
    finished = launch_in(
        tmp_path,
        "python -m torch.distributed.run --standalone --nproc_per_node=2 "
        "llm_ddp_parallel_training.py --model tiny --cpu --batch-size 2 --max-steps 2",
    )
    saved_in(tmp_path)
    assert each_line_once(finished.out)
    assert "Warning" not in finished.err
    assert re.search(r"^backend +gloo \(cpu run\)", finished.out, re.MULTILINE)
    # torchrun set OMP_NUM_THREADS=1: not a choice of the user
    assert re.search(r"^threads +\d+ per rank \(\d+ cores? / 2 ranks", finished.out, re.MULTILINE)
    assert "per rank 2 × accumulation 1 × ranks 2 = 4 sequences" in finished.out
    assert "MB all-reduced" in finished.out
    assert "(equal on all 2 ranks)" in finished.out


def test_the_command_for_one_process_works_word_for_word(tmp_path):
    line = "python llm_ddp_parallel_training.py --model tiny --cpu --max-steps 2"
    finished = launch_in(tmp_path, line)
    saved_in(tmp_path)
    assert each_line_once(finished.out)
    assert finished.err == ""
    assert re.search(r"^backend +none ", finished.out, re.MULTILINE)


def test_every_file_is_opened_with_its_encoding_and_no_gpu_driver_is_asked(tmp_path):
    path = tmp_path / "grüße.txt"
    path.write_text("Grüße\nan\nalle\n", encoding="utf-8")
    flags = ("--output-dir", tmp_path / "run", "--corpus-file", path, "--max-steps", 2)
    strict = ("-X", "warn_default_encoding", "-W", "error::EncodingWarning")
    finished = run_command(
        [sys.executable, *strict, str(SCRIPT), *map(str, flags)],
        env=clean_environment(CUDA_VISIBLE_DEVICES="", PYTHONUTF8="0", LC_ALL="C.UTF-8"),
    )
    assert finished.status == 0, finished.err
    assert finished.err == ""
    assert weights(tmp_path / "run")


def test_a_reader_who_goes_away_does_not_end_the_run(tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        run = subprocess.run(
            command(1, "--cpu", "--max-steps", 2, "--output-dir", tmp_path / "run"),
            stdout=writing, stderr=subprocess.PIPE, env=clean_environment(), timeout=60,
        )  # fmt: skip
    finally:
        os.close(writing)
    assert (run.returncode, run.stderr) == (0, b"")
    assert weights(tmp_path / "run")


def test_a_closed_standard_error_does_not_end_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)  # what Python makes of 2>&-
    flags = ("--cpu", "--threads", 1, "--max-steps", 1, "--output-dir", tmp_path / "run")
    ddp.main([str(flag) for flag in flags])
    assert weights(tmp_path / "run")


def threads_line(out: str) -> str:
    (line,) = re.findall(r"^threads +(.*)$", out, re.MULTILINE)
    return line


def test_threads_are_the_users_choice_where_there_is_one(monkeypatch):
    dry = ("--cpu", "--dry-run")
    assert re.fullmatch(
        r"\d+ per rank \(\d+ cores? / 1 rank on this machine\)", threads_line(main_here(*dry).out)
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # one process: nobody but the user sets it
    assert threads_line(main_here(*dry).out) == "1 per rank (OMP_NUM_THREADS)"
    assert threads_line(main_here(*dry, "--threads", 3).out) == "3 per rank (--threads)"
    # torchrun itself sets 1 for several ranks; another number is the user's
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)  # for the tests that follow
    launch = ddp.Launch(world_size=2, local_world_size=2)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    for value, reason in (("1", "on this machine"), ("2", "OMP_NUM_THREADS")):
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        ddp.use_cores(launch, None)
        what, chosen, why = launch.choices[-2]
        assert what == "threads" and why.endswith(reason)
    assert chosen == "2 per rank"


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_stay_equal_and_see_all_of_an_odd_corpus(tmp_path, ranks):
    path = tmp_path / "seven.txt"
    lines = ["a", "b" * 60, "cc", "d" * 30, "eee", "f", "g" * 10]
    path.write_text("\n".join(lines), encoding="utf-8")
    endings = job(
        ranks, "--output-dir", tmp_path / "run", "--corpus-file", path, "--val-fraction", 0,
        "--epochs", 2, "--log-every", 1, "--batch-size", 1, "--grad-accum", 2, "--dropout", 0.2,
        faults=[{"kind": "watch", "value": str(tmp_path)}],
    )  # fmt: skip
    assert [e.status for e in endings] == [0] * ranks, endings
    assert not [e.out for e in endings[1:] if e.out]
    notes = []
    for rank in range(ranks):
        with open(tmp_path / f"rank-{rank}.jsonl", encoding="utf-8") as file:
            notes.append([json.loads(line) for line in file])
    ranks_agree(endings[0], notes, tmp_path / "run", updates_an_epoch=2)


def ranks_agree(finished, notes: list[list[dict]], run, updates_an_epoch: int) -> None:
    """Weights, losses and step counts are equal on all ranks; each epoch is the whole corpus."""
    assert each_line_once(finished.out)
    assert finished.err == ""
    updates = list(zip(*notes, strict=True))
    assert len(updates) == 2 * updates_an_epoch
    for shares in updates:
        assert len({share["digest"] for share in shares}) == 1
        assert len({share["loss"] for share in shares}) == 1
        assert len({share["micro_batches"] for share in shares}) == 1
        assert len({share["random"] for share in shares}) == len(shares)  # own dropout masks
    assert len({shares[0]["digest"] for shares in updates}) == len(updates)
    assert [shares[0]["loss"] for shares in updates] == losses(run)
    assert digest_line(finished) == updates[-1][0]["digest"]
    orders = []
    for epoch in range(2):
        part = updates[epoch * updates_an_epoch : (epoch + 1) * updates_an_epoch]
        seen = [i for shares in part for share in shares for i in share["ids"] if i >= 0]
        assert sorted(seen) == list(range(7))
        orders.append(seen)
    assert orders[0] != orders[1]


def test_one_line_trains_on_two_ranks(tmp_path):
    path = tmp_path / "one.txt"
    path.write_text("only one", encoding="utf-8")
    flags = ("--corpus-file", path, "--max-steps", 3, "--log-every", 1)
    endings = job(2, *flags, "--output-dir", tmp_path / "run")
    assert [e.status for e in endings] == [0, 0], endings
    train_here(tmp_path / "alone", *flags)
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), abs=1e-6)
    assert 0 < losses(tmp_path / "run")[2] < losses(tmp_path / "run")[0]
