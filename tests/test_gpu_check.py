"""tests/gpu, as far as it can be tried without a GPU: on the CPU, at small sizes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys

import pytest
from conftest import ROOT, clean_environment, run_command
from gpu import bench as benches
from gpu import check, endings, kernels, machine, numerics, ranks, resuming
from gpu.program import Program, environment_for
from gpu.table import Row, aim, must, status_of

from labs import planner


@pytest.fixture
def bench(tmp_path, small_qwen, monkeypatch):
    """What a check gets on a machine without a GPU, with a Qwen of two small layers."""
    work = tmp_path / "work of a check"
    work.mkdir()
    facts = {"half": "bf16", "card": None, "peak": None, "cards": 0, "matmul": 1e11}
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):  # a check sets them for good
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return benches.Bench("cpu", 2, small_qwen, work, facts)


IN_THIS_PROCESS = [
    numerics.tiny_precisions, numerics.qwen_checkpointing, resuming.tiny_resumed,
    resuming.qwen_resumed, kernels.attention, kernels.synchronizations, ranks.one_rank_group,
    endings.out_of_memory,
]  # fmt: skip


@pytest.mark.parametrize("function", IN_THIS_PROCESS, ids=lambda function: function.__name__)
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_a_check_on_exactness_passes_where_there_is_no_gpu(bench, function):
    rows = list(function(bench))
    assert rows and {row.verdict for row in rows} == {"pass"}, rows


def test_other_numbers_fail_the_comparison_with_the_cpu(bench):
    flags = "--model tiny --max-steps 2 --log-every 1 --precision fp32"
    one, other = (bench.train(f"seed{seed}", f"{flags} --seed {seed}") for seed in (0, 1))
    assert benches.compared("same", one, one, "fp32").verdict == "pass"
    row = benches.compared("another", other, one, "bf16")
    assert row.verdict == "FAIL" and status_of([row]) == 1
    assert resuming.same("resumed", one, one, other).verdict == "FAIL"
    assert resuming.same("resumed", one, one, one).verdict == "pass"


def test_the_kernel_that_keeps_all_scores_is_found(bench):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        row = next(kernels.attention(bench))
    assert row.verdict == "FAIL" and row.found == "math"


def test_a_second_wait_for_the_gpu_is_found(bench, monkeypatch):
    import llm_ddp_parallel_training as ddp

    inputs_of = ddp.inputs_of

    def looking(batch, device):
        inputs = inputs_of(batch, device)
        return inputs if inputs["input_ids"].sum() else {}

    monkeypatch.setattr(ddp, "inputs_of", looking)
    row = next(kernels.synchronizations(bench))
    assert row.verdict == "FAIL" and row.found.startswith("[4, 4, 4]")


def test_a_missed_aim_does_not_change_the_status():
    assert status_of([must("a", "", "", True), aim("b", "", "", False), Row("c", "")]) == 0


def test_a_check_gets_as_many_gpus_as_it_needs(monkeypatch):
    def visible(cards):
        one = dataclasses.replace(check.CHECKS[0], cards=cards)
        return environment_for(one, 1).get("CUDA_VISIBLE_DEVICES")

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [visible(cards) for cards in (0, 1, 2)] == [None, "0", "0,1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c")
    assert [visible(cards) for cards in (1, 2)] == ["GPU-a", "GPU-a,GPU-b"]


def test_what_needs_two_gpus_says_so_where_there_is_one(bench):
    bench = dataclasses.replace(bench, device="cuda", facts={**bench.facts, "cards": 1})
    for function in (ranks.two_gpus, endings.lost_on_two_gpus):
        (row,) = function(bench)
        assert row.found == "not run: there is one GPU" and status_of([row]) == 0


def test_every_card_with_a_data_sheet_is_known_to_the_planner():
    assert set(machine.CARDS.values()) <= planner.GPUS.keys()


def test_a_check_that_hangs_is_ended_and_fails(tmp_path):
    args = argparse.Namespace(device="cpu", layers=2, base_model=None, budget=60.0)
    program = Program(args, tmp_path)
    slow = next(c for c in check.CHECKS if c.name == "tiny compile")  # needs far more than 3 s
    assert not program.run(dataclasses.replace(slow, limit=0.75), threads=1)  # x 4 on the CPU
    (row,) = program.rows
    assert row.verdict == "FAIL" and "not done after 3 s" in row.found and not program.alive


@pytest.mark.slow
@pytest.mark.parametrize(
    "function", [endings.lost_on_one_device, ranks.two_ranks, resuming.stopped]
)
def test_a_check_that_launches_ranks_passes_where_there_is_no_gpu(bench, function, monkeypatch):
    for name, value in clean_environment().items():
        monkeypatch.setitem(os.environ, name, value)
    rows = list(function(bench))
    assert rows and {row.verdict for row in rows} == {"pass"}, rows


@pytest.mark.slow
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
