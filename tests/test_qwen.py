"""Whole runs with LoRA: the documented command, exactness, stop and resume, spoiled weights."""

from __future__ import annotations

import json
import random
import sys

import pytest
import torch
from conftest import (
    ROOT,
    clean_environment,
    digest_line,
    largest_difference,
    losses,
    metrics,
    run_command,
)
from quick import job
from qwen_tests import (
    TEXTS,
    adapter_digest,
    adapter_of,
    here,
    quiet,
    run_here,
)

import llm_ddp_parallel_training as ddp

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT


def two_ranks(folder, *flags, status=0, faults=()):
    """A run on two ranks; the first rank's output."""
    endings = job(2, "--model", "qwen", "--output-dir", folder, *flags, faults=faults)
    assert [ended.status for ended in endings] == [status] * 2, endings
    return endings[0]


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    """28 lines of very different lengths: 25 to train on, so the last update has one sample."""
    rng = random.Random(0)
    words = " ".join(TEXTS).split()
    lengths = [rng.choice([1, 2, 3, 8, 20, 40]) for _ in range(28)]
    lines = [" ".join(rng.choice(words) for _ in range(n)) + "\n" for n in lengths]
    path = tmp_path_factory.mktemp("corpus") / "uneven.txt"
    path.write_text("".join(lines), encoding="utf-8")
    return path


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_documented_command_trains_and_saves_an_adapter(small_qwen, tmp_path, ranks):
    flags = "--model qwen --batch-size 1 --seq-len 64 --max-steps 2".split()
    args = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    args += [f"--nproc_per_node={ranks}", str(ROOT / "llm_ddp_parallel_training.py"), *flags]
    environment = clean_environment(CUDA_VISIBLE_DEVICES="")
    ended = run_command([*args, "--base-model", str(small_qwen)], cwd=tmp_path, env=environment)
    assert ended.status == 0 and quiet(ended.err), ended.err
    (folder,) = (tmp_path / "runs").iterdir()
    digest = digest_line(ended)
    assert digest == adapter_digest(folder)
    assert ("equal on all 2 ranks" in ended.out) == (ranks == 2)
    config = json.loads((folder / "adapter/adapter_config.json").read_text("utf-8"))
    assert config["base_model_name_or_path"] == str(small_qwen.resolve())
    assert (folder / "adapter/tokenizer.json").is_file()
    assert (folder / "adapter/chat_template.jinja").is_file()


# Exactness

EXACT = ("--lora-dropout", 0, "--lr", 1e-3, "--max-steps", 14, "--log-every", 1,
         "--eval-every", 7, "--seq-len", 48)  # fmt: skip


@pytest.fixture(scope="module")
def one_rank_of_four(small_qwen, uneven, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "one"
    here(folder, "--base-model", small_qwen, "--corpus-file", uneven, "--batch-size", 4, *EXACT)
    return folder


@pytest.mark.parametrize(("ranks", "accumulation"), [(2, 1), (1, 2)], ids=["ranks", "accumulation"])
def test_the_same_global_batch_gives_the_same_losses_and_adapter(
    small_qwen, uneven, one_rank_of_four, tmp_path, ranks, accumulation
):
    flags = ("--base-model", small_qwen, "--corpus-file", uneven, "--batch-size", 2, *EXACT)
    flags += ("--grad-accum", accumulation)
    folder = tmp_path / "run"
    two_ranks(folder, *flags) if ranks == 2 else here(folder, *flags)
    expected = losses(one_rank_of_four)
    assert len(expected) == 14
    assert losses(folder) == pytest.approx(expected, abs=1e-6)
    for a, b in zip(metrics(folder), metrics(one_rank_of_four), strict=True):
        assert a.get("val_loss") == pytest.approx(b.get("val_loss"), abs=1e-6)
        assert a.get("tokens") == b.get("tokens")
        assert a.get("learned_tokens") == b.get("learned_tokens")
    before, after = (row["val_loss"] for row in metrics(folder) if "val_loss" in row)
    assert after < before
    assert largest_difference(adapter_of(folder), adapter_of(one_rank_of_four)) <= 1e-6


@pytest.mark.parametrize("how", ["full", "selective"])
def test_packed_and_checkpointed_on_two_ranks_equals_one_rank(small_qwen, uneven, tmp_path, how):
    flags = ("--base-model", small_qwen, "--corpus-file", uneven, "--pack", *EXACT)
    two = ("--batch-size", 1, "--gradient-checkpointing", how)
    assert quiet(two_ranks(tmp_path / "two", *flags, *two).err)
    here(tmp_path / "one", *flags, "--batch-size", 2)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-6)
    difference = largest_difference(adapter_of(tmp_path / "two"), adapter_of(tmp_path / "one"))
    assert difference <= 1e-6


def test_stopped_on_two_ranks_and_resumed_equals_the_uninterrupted_run(
    small_qwen, uneven, tmp_path
):
    flags = ("--base-model", small_qwen, "--corpus-file", uneven, "--max-steps", 20, "--log-every",
             1, "--lr", 1e-3, "--batch-size", 2, "--seq-len", 48)  # fmt: skip
    whole = two_ranks(tmp_path / "whole", *flags)  # dropout is on
    assert quiet(whole.err), whole.err

    folder = tmp_path / "run"
    signal = {"kind": "SIGTERM", "rank": 1, "update": 9}  # in the second epoch
    stopped = two_ranks(folder, *flags, status=143, faults=[signal])
    assert "the state is saved" in stopped.err, stopped.err
    (checkpoint,) = (folder / "checkpoints").iterdir()
    state = torch.load(checkpoint, weights_only=True)
    assert state["progress"]["step"] == 9
    assert not (folder / "adapter").exists()

    resumed = two_ranks(folder, "--resume", folder)
    assert digest_line(resumed) == digest_line(whole)
    assert losses(folder) == losses(tmp_path / "whole")
    final = {
        "model." + name.replace(".weight", ".default.weight"): tensor
        for name, tensor in adapter_of(folder).items()
    }
    assert final.keys() == state["model"].keys()
    for name, tensor in final.items():  # a reloaded adapter is still trained
        assert not torch.equal(tensor, state["model"][name]), name


def test_the_log_of_a_text_names_one_number(one_rank_of_four):
    for row in (row for row in metrics(one_rank_of_four) if "loss" in row):
        assert row["tokens"] == row["learned_tokens"]


# Spoiled weights

MANY, ONE = ("--max-steps", 5, "--lr", 1e6, "--precision", "bf16"), ("--max-steps", 1)


@pytest.mark.parametrize("more", [(), ("--merge",), ("--save-every", 2)], ids=str)
@pytest.mark.parametrize("spoiled_by", ["its learning rate", "its last step"])
def test_a_spoiled_model_is_never_saved_as_a_success(
    small_qwen, tmp_path, monkeypatch, spoiled_by, more
):
    """The last step leaves finite weights, with a forward pass that is not; nothing else tells."""
    step = ddp.training_step

    def spoiling(model, *rest):
        result = step(model, *rest)
        with torch.no_grad():
            for _, parameter in ddp.trained_parameters(model):
                parameter.fill_(1e38)
        return result

    if spoiled_by == "its last step":
        monkeypatch.setattr(ddp, "training_step", spoiling)
    flags = MANY if spoiled_by == "its learning rate" else ONE
    folder = tmp_path / "run"
    flags = ("--base-model", small_qwen, "--val-fraction", 0, *flags, *more)
    ended = run_here("--output-dir", folder, *flags)
    assert ended.status == 3
    assert ended.err.count("\n") == 1 and ended.err.startswith("error: update ")
    assert "lower --lr" in ended.err
    assert ("spoiled" in ended.err) == (spoiled_by == "its last step")
    assert not {"adapter", "merged"} & {path.name for path in folder.iterdir()}
    assert not list(folder.rglob("*.pt"))
    assert "weights sha256" not in ended.out


def test_a_diverging_run_on_two_ranks_ends_both_with_3(small_qwen, tmp_path):
    flags = ("--base-model", small_qwen, "--val-fraction", 0, *MANY)
    ended = two_ranks(tmp_path / "run", *flags, status=3)
    assert len(ended.error_lines()) == 1
    assert not (tmp_path / "run/adapter").exists()
