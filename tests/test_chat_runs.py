"""Runs on conversations: what the log counts, the sample line, --generate, --dry-run."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil

import pytest
from conftest import (
    digest_line,
    losses,
    metrics,
)
from qwen_tests import (
    CHAT,
    adapter_digest,
    adapter_of,
    first_turns,
    here,
    run_here,
    settings_of,
)

import llm_ddp_parallel_training as ddp

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT


def records(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


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
