"""tests/gpu/check.py, as far as it can be tried without a GPU: on the CPU, at small sizes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

import pytest
import torch
from conftest import ROOT, clean_environment, run_command

from labs import planner

sys.path.insert(0, str(ROOT / "tests" / "gpu"))

import check


@pytest.fixture
def bench(tmp_path, small_qwen):
    """What a check gets on a machine without a GPU, with a Qwen of two small layers."""
    (tmp_path / "work").mkdir()
    threads = torch.get_num_threads()
    facts = {"half": "bf16", "peak": None, "matmul": 1e11}
    yield check.Bench("cpu", 2, small_qwen, tmp_path / "work", facts)
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "function", [check.resumed, check.one_rank_group, check.qwen_checkpointing]
)
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_a_check_on_exactness_passes_where_there_is_no_gpu(bench, function):
    verdicts = [row.verdict for row in function(bench)]
    assert verdicts and set(verdicts) == {"pass"}


def test_other_numbers_fail_the_comparison_with_the_cpu(bench):
    flags = "--model tiny --max-steps 2 --log-every 1 --precision fp32"
    one, other = (bench.train(f"seed{seed}", f"{flags} --seed {seed}") for seed in (0, 1))
    assert check.compared("same", one, one, "fp32").verdict == "pass"
    row = check.compared("another", other, one, "bf16")
    assert row.verdict == "FAIL" and check.status_of([row]) == 1


def test_a_missed_aim_does_not_change_the_status():
    rows = [check.must("a", "", "", True), check.aim("b", "", "", False), check.Row("c", "")]
    assert check.status_of(rows) == 0


def test_one_failing_check_makes_the_exit_status_1_and_costs_no_other(tmp_path):
    """Here the base model is missing; the check of the process group needs none."""
    command = ["bash", str(ROOT / "tests" / "gpu" / "check.sh"), "--device", "cpu", "--lanes", "2"]
    command += ["--only", "nccl", "qwen checkpointing", "--base-model", str(tmp_path / "missing")]
    environment = clean_environment(PYTHON=sys.executable, OUT=str(tmp_path / "out"))
    finished = run_command(command, timeout=150, env=environment)
    assert finished.status == 1, finished.out + finished.err
    rows = json.loads((tmp_path / "out" / "gpu-check.json").read_text("utf-8"))
    verdicts = {row["check"]: row["verdict"] for row in rows}
    assert verdicts["gloo, 1 rank with DDP - bare"] == "pass"
    assert verdicts["qwen checkpointing"] == "FAIL"
    assert "no such folder" in finished.out
    table = (tmp_path / "out" / "gpu-check.txt").read_text("utf-8")
    assert table.count("| qwen checkpointing ") == 2  # at once, and in the table at the end


def test_a_check_that_hangs_is_ended_and_fails(tmp_path):
    args = argparse.Namespace(device="cpu", layers=2, base_model=None, budget=60.0)
    program = check.Program(args, tmp_path)
    slow = next(c for c in check.CHECKS if c.name == "tiny compile")  # needs far more than 3 s
    assert not program.run(dataclasses.replace(slow, limit=3), threads=1)
    (row,) = program.rows
    assert row.verdict == "FAIL" and "not done after 3 s" in row.found and not program.alive


def test_every_card_with_a_data_sheet_is_known_to_the_planner():
    assert set(check.CARDS.values()) <= planner.GPUS.keys()
