"""Whole runs with LoRA: the documented command, exactness, chats, log, samples, endings."""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import shutil
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
    CHAT,
    TEXTS,
    adapter_digest,
    adapter_of,
    first_turns,
    here,
    quiet,
    run_here,
    settings_of,
)

import llm_ddp_parallel_training as ddp

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT


def two_ranks(folder, *flags, status=0, faults=()):
    """A run on two ranks; the first rank's output."""
    endings = job(2, "--model", "qwen", "--output-dir", folder, *flags, faults=faults)
    assert [ended.status for ended in endings] == [status] * 2, endings
    return endings[0]


def records(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


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


# Chats


@pytest.fixture(scope="module")
def chat_run(small_qwen, tmp_path_factory):
    """A run on conversations, merged at the end, and what it printed."""
    chats = [CHAT, first_turns(CHAT, 2), {"messages": CHAT["messages"][2:]}] * 4
    path = records(tmp_path_factory.mktemp("corpus") / "chat.jsonl", *chats)
    folder = tmp_path_factory.mktemp("runs") / "chat"
    flags = ("--base-model", small_qwen, "--corpus-file", path, "--merge", "--lr", 3e-2)
    return folder, here(folder, *flags, "--max-steps", 40, "--log-every", 20)


def header_of(ended) -> dict[str, str]:
    return {line[:10].strip(): line[11:] for line in ended.out.splitlines()}


def test_a_chat_run_learns_and_tells_what_it_trained_and_sent(chat_run, small_qwen):
    folder, ended = chat_run
    assert losses(folder)[-1] < 0.5 * losses(folder)[0]
    assert digest_line(ended) == adapter_digest(folder)
    assert (folder / "merged/config.json").is_file()
    base, _ = ddp.load_base(settings_of("--base-model", small_qwen))
    full = sum(p.numel() for p in base.parameters())
    trained = sum(t.numel() for t in adapter_of(folder).values())
    header = header_of(ended)
    assert f"{trained:,} of {full + trained:,} parameters trained" in header["model"]
    assert header["gradients"].startswith(f"{4 * trained / 1e6:.2f} MB all-reduced an update")
    crc32 = ddp.frozen_checksum(ddp.CausalLMWithLoss(ddp.add_lora(base, settings_of())))
    assert header["frozen"] == f"weights of crc32 {crc32}"
    assert json.loads((folder / "run.json").read_text("utf-8"))["frozen"] == crc32


def test_the_log_counts_tokens_that_were_read_and_those_that_were_learned(chat_run):
    folder, ended = chat_run
    rows = [row for row in metrics(folder) if "loss" in row]
    assert [row["step"] for row in rows] == [1, 20, 40]
    for row in rows:
        share = row["learned_tokens"] / row["tokens"]
        assert 0.1 < share < 0.5
        assert row["tokens_per_second"] > row["learned_tokens_per_second"] > 0
    steps = [line for line in ended.out.splitlines() if line.startswith("step ") and "lr" in line]
    for line, row in zip(steps, rows, strict=True):
        read, learned = f"{row['tokens_per_second']:,.0f}", row["learned_tokens_per_second"]
        assert f" {read} tokens/s ({learned:,.0f} learned)" in line
    assert f"{rows[-1]['tokens']:,} tokens, " in header_of(ended)["done"]


def test_the_log_of_a_text_names_one_number(one_rank_of_four):
    for row in (row for row in metrics(one_rank_of_four) if "loss" in row):
        assert row["tokens"] == row["learned_tokens"]


def test_generate_shows_base_and_adapted_answers_through_the_chat_template(chat_run):
    folder, _ = chat_run
    ended = run_here("--resume", folder, "--generate", "What is a rank?")
    assert ended.status == 0 and ended.err == ""
    base, adapted = ended.out.splitlines()[0], ended.out.splitlines()[-1]
    assert base.startswith("base     ") and base != adapted
    assert ended.out.rstrip().endswith("adapted  A rank is one process.")


def test_generate_on_a_run_without_adapter_is_one_line(chat_run, tmp_path):
    (tmp_path / "run").mkdir()
    shutil.copy(chat_run[0] / "run.json", tmp_path / "run")
    ended = run_here("--resume", tmp_path / "run", "--generate", "x")
    assert ended.status == 2
    assert (
        ended.err == f"error: {tmp_path / 'run'} has no adapter/: it is not a finished qwen run\n"
    )


# The sample line


def sample_lines(ended) -> list[str]:
    return re.findall(r"^sample +(.*)$", ended.out, re.MULTILINE)


def test_the_sample_line_answers_a_question_that_was_held_out(small_qwen, tmp_path):
    chats = [
        {"prompt": f"What is number {i}?", "completion": f"It is {i}."} for i in range(40)
    ]  # fmt: skip
    path = records(tmp_path / "chat.jsonl", *chats)
    flags = ("--base-model", small_qwen, "--corpus-file", path, "--max-steps", 2)
    ended = here(tmp_path / "run", *flags, "--sample-every", 1)
    first = min(ddp.hold_out(40, 0.1, 0))
    lines = sample_lines(ended)
    assert len(lines) == 2
    for line in lines:
        question, _, answer = line.partition(" → ")
        assert question.endswith(rf"What is number {first}?<|im_end|>\n<|im_start|>assistant\n'")
        assert answer and "The " not in question
    everything = here(tmp_path / "all", *flags, "--val-fraction", 0)
    assert "What is number 0?" in sample_lines(everything)[0]


@pytest.mark.parametrize(
    ("rows", "flags"),
    [
        ([{"text": "A rank of a group."}] * 19 + [{"prompt": "Q", "completion": "A"}], ()),
        ([{"messages": [{"role": "assistant", "content": "rank " * 60}]}] * 4,
         ("--overlong", "split", "--seq-len", 16)),
        ([{"text": "A rank of a group."}] * 10, ()),
    ],
    ids=["texts held out", "pieces of answers", "texts"],
)  # fmt: skip
def test_whatever_is_held_out_there_is_a_sample_and_the_run_ends_well(
    small_qwen, tmp_path, rows, flags
):
    path = records(tmp_path / "c.jsonl", *rows)
    flags = ("--base-model", small_qwen, "--corpus-file", path, "--max-steps", 1, *flags)
    ended = here(tmp_path / "run", *flags)
    assert len(sample_lines(ended)) == 1
    assert (tmp_path / "run/adapter/adapter_model.safetensors").is_file()


# What will be learned, before it is


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_dry_run_shows_a_sample_with_its_learned_part_marked(small_qwen, tmp_path):
    chats = [{"prompt": "What is a rank?", "completion": "A process."}] * 5
    path = records(tmp_path / "chat.jsonl", *chats)
    flags = ("--base-model", small_qwen, "--corpus-file", path, "--dry-run")
    ended = run_here(*flags, "--output-dir", tmp_path / "run")
    assert ended.status == 0 and not (tmp_path / "run").exists()
    shown = "user\nWhat is a rank?<|im_end|>\n<|im_start|>assistant\n[[A process.<|im_end|>]]\n"
    assert shown in ended.out and ended.out.count("[[A process") == 1
    assert "[[]]" in ended.out or "[[ ]]" in ended.out  # says what they mean

    with contextlib.redirect_stdout(Terminal()) as screen:
        ddp.main.__wrapped__(["--model", "qwen", "--cpu", *map(str, flags)])
    green = shown.replace("[[", "\033[32m").replace("]]", "\033[0m")
    assert green in screen.getvalue() and "[[" not in screen.getvalue()

    ended = run_here(*flags, "--pack")
    assert ended.out.count("[[A process.<|im_end|>]]") == 5  # all of the window's


def test_a_dry_run_of_a_text_marks_all_of_it(small_qwen, tmp_path):
    path = records(tmp_path / "c.jsonl", *[{"text": "A rank."}] * 5)
    ended = run_here("--base-model", small_qwen, "--corpus-file", path, "--dry-run")
    assert "[[A rank.<|im_end|>]]" in ended.out


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
