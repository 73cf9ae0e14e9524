"""What a run leaves behind and says at its end, and that watching it does not change it."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from conftest import (
    digest_line,
    fingerprint,
    losses,
    main_here,
    metrics,
    settings_of,
    train_here,
    weights,
)

import llm_ddp_parallel_training as ddp

RUN = ("--max-steps", 12, "--log-every", 5, "--eval-every", 4, "--d-model", 32, "--layers", 2,
       "--seq-len", 48, "--schedule", "cosine")  # fmt: skip


FORTY = "".join(f"line {i} of forty\n" for i in range(40))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run on 40 lines, 36 of them to train on: its folder, and what it printed."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    (folder.parent / "forty.txt").write_text(FORTY, encoding="utf-8")
    return folder, train_here(folder, *RUN, "--corpus-file", folder.parent / "forty.txt")


def test_a_run_leaves_the_promised_files_and_no_leftovers(run):
    names = {path.name for path in run[0].iterdir()}
    assert names == {"run.json", "metrics.jsonl", "loss_curve.png", "tiny_transformer.pt"}


def test_metrics_hold_every_logged_step_with_all_its_figures(run):
    rows = metrics(run[0])
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == [1, 5, 10, 12]
    keys = {"step", "epoch", "loss", "lr", "grad_norm", "tokens", "tokens_per_second",
            "learned_tokens", "learned_tokens_per_second", "seconds", "peak_memory_bytes",
            }  # fmt: skip
    for row in steps:
        assert keys <= row.keys()
        assert all(math.isfinite(row[key]) and row[key] >= 0 for key in keys)
    assert [row["epoch"] for row in steps] == [1, 1, 2, 3]  # five updates each
    assert [row["tokens"] for row in steps] == sorted(row["tokens"] for row in steps)
    assert steps[-1]["learned_tokens"] == steps[-1]["tokens"] <= 12 * 8 * 47  # no questions here
    validations = [row for row in rows if "val_loss" in row]
    assert [row["step"] for row in validations] == [4, 8, 12]


def test_run_json_tells_how_the_run_was_made(run):
    content = json.loads((run[0] / "run.json").read_text(encoding="utf-8"))
    settings = content["settings"]
    assert (settings["d_model"], settings["layers"], settings["batch_size"]) == (32, 2, 8)
    assert settings["lr"] == 3e-4 and settings["device"] == "cpu"  # as resolved
    assert settings["corpus_file"].endswith("forty.txt") and settings["corpus_format"] == "lines"
    assert settings.keys() >= {
        "model", "seed", "threads", "builtin", "val_fraction", "pack", "overlong", "heads",
        "dropout", "seq_len", "grad_accum", "epochs", "max_steps", "weight_decay", "schedule",
        "warmup_steps", "clip", "precision", "compile", "save_every", "keep", "checkpoint_dir",
        "log_every", "eval_every", "sample_every", "tensorboard",
    }  # fmt: skip
    assert content["versions"]["torch"] == torch.__version__
    assert {"python", "numpy"} <= content["versions"].keys()
    assert content["world_size"] == 1
    count = sum(value.numel() for value in weights(run[0]).values())
    assert content["parameters"] == {"total": count, "trained": count}
    assert {"device", "precision", "threads", "backend"} <= {c["what"] for c in content["choices"]}
    assert all(c["chosen"] and c["reason"] for c in content["choices"])


@pytest.mark.skipif(sys.platform != "linux", reason="other systems take no such names")
def test_a_file_name_that_is_not_utf_8_is_trained_on_and_found_again(tmp_path):
    path = tmp_path / os.fsdecode(b"gr\xfc\xdfe.txt")
    path.write_text("one\ntwo\nthree\nfour\n", encoding="utf-8")
    flags = ("--save-every", 1, "--max-steps", 2, "--d-model", 8, "--corpus-file", path)
    train_here(tmp_path / "run", *flags)
    for resumed in (
        ("--resume", tmp_path / "run", "--max-steps", 3),
        ("--resume", tmp_path / "run", "--generate", "o"),
    ):
        finished = main_here("--cpu", "--threads", 1, *resumed)
        assert finished.status == 0, finished.err


def test_the_loss_curve_is_a_picture(run):
    content = (run[0] / "loss_curve.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert content.rstrip()[-8:-4] == b"IEND"
    width, height = (int.from_bytes(content[i : i + 4], "big") for i in (16, 20))
    assert width >= 400 and height >= 200


def test_the_weights_load_into_a_fresh_model_without_pickled_code(run):
    saved = torch.load(run[0] / "tiny_transformer.pt", weights_only=True)
    model = ddp.TinyCausalTransformer(**saved["config"])
    model.load_state_dict(saved["model"], strict=True)
    assert not [name for name in saved["model"] if name.startswith("module.")]
    assert all(value.device.type == "cpu" for value in saved["model"].values())
    assert ddp.parameter_digest(model) == digest_line(run[1])


def test_the_saved_weights_have_the_validation_loss_that_was_shown(run):
    model = ddp.load_tiny(run[0])
    corpus = run[0].parent / "forty.txt"
    data = ddp.build_data(settings_of("--seq-len", 48, "--corpus-file", corpus))
    items = [data.validation[i] for i in range(len(data.validation))]
    batch = ddp.tiny_collator(items, 48)
    loss = model(batch["input_ids"], batch["labels"])
    assert loss.item() == pytest.approx(metrics(run[0])[-1]["val_loss"], abs=1e-6)


def test_the_last_lines_sum_the_run_up(run):
    folder, finished = run
    ending = "\n".join(finished.out.splitlines()[-6:])
    values = [row["val_loss"] for row in metrics(folder) if "val_loss" in row]
    assert "12 updates" in ending and "tokens/s" in ending
    assert f"final {values[-1]:.4f}" in ending and f"best {min(values):.4f}" in ending
    assert re.search(r"peak [\d,]+ MB", ending)
    assert re.search(r"^weights sha256 [0-9a-f]{64}$", ending, re.MULTILINE)
    assert str(folder) in ending
    assert finished.err == ""


def test_the_header_translates_the_batch_and_explains_the_choices(run):
    corpus = run[0].parent / "forty.txt"
    flags = ("--corpus-file", corpus, "--batch-size", 3, "--grad-accum", 2)
    out = main_here("--cpu", "--dry-run", *flags).out
    assert "per rank 3 × accumulation 2 × ranks 1 = 6 sequences = 384 tokens an update" in out
    assert re.search(r"\b36\b.* to train on, 4\b.* to validate", out)
    assert "6 an epoch" in out
    assert re.search(r"^device +cpu \(--device cpu\)$", out, re.MULTILINE)
    assert re.search(r"^backend +none \(one process", out, re.MULTILINE)
    assert "parameters" in out
    assert re.search(r"^memory.* python -m labs.planner", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--eval-every", 5), True),
        (("--val-fraction", 0.1), True),
        (("--val-fraction", 0, "--eval-every", 5), True),
        (("--val-fraction", 0), False),
        (("--val-fraction", 0.5, "--eval-every", 5), False),
        (("--corpus-format", "document", "--val-fraction", 0.01), True),
    ],
    ids=str,
)
def test_a_validation_that_has_no_samples_is_said_before_the_training(tmp_path, flags, said):
    path = tmp_path / "three.txt"
    path.write_text("one\ntwo\nthree\n", encoding="utf-8")
    out = main_here("--cpu", "--dry-run", "--corpus-file", path, *flags).out
    lines = re.findall(r"^validation none: --val-fraction \S+ leaves nothing .*", out, re.MULTILINE)
    assert len(lines) == said


def test_a_single_sample_update_or_token_is_not_called_many(tmp_path):
    path = tmp_path / "one.txt"
    path.write_text("ab\n \n", encoding="utf-8")
    flags = ("--corpus-file", path, "--max-steps", 1, "--batch-size", 1, "--seq-len", 2)
    out = train_here(tmp_path / "run", *flags).out
    assert "1 sample, 0 held out, 1 blank line skipped" in out and "(1 token lost" in out
    assert "done       1 update, 1 token, " in out and "steps      1 update, 1 an epoch" in out
    assert not re.findall(r"(?<![\d.,])1 \w*(?<!s)s\b(?!/s)", out), out
    refused = main_here("--cpu", "--corpus-file", path, "--seq-len", 2, "--overlong", "drop").err
    assert "nothing can be trained on in 1 sample," in refused


def test_the_cut_off_samples_come_with_the_flag_that_keeps_them():
    out = main_here("--cpu", "--dry-run").out
    assert "longer than 64 tokens cut off" in out and "lost; --overlong split keeps them)" in out


def test_memory_is_told_as_what_it_counts(run):
    told = re.findall(r"^memory +(.*)$", run[1].out, re.MULTILINE)
    assert [re.sub(r"\d[\d,]*(?= MB)|\d+", "N", line) for line in told] == [
        "peak N MB on rank N, the whole process, PyTorch's own included"
    ]


def test_a_dry_run_writes_nothing_and_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for flags in ((), ("--output-dir", tmp_path / "run")):
        finished = main_here("--cpu", "--dry-run", *flags)
        assert finished.status == 0 and "dry run" in finished.out
        assert "300 updates" in finished.out
        assert not re.search("^step ", finished.out, re.MULTILINE)
    assert list(tmp_path.iterdir()) == []


def test_the_default_folder_names_model_and_date(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # probably in the same second: two runs never share a folder
        assert main_here("--cpu", "--threads", 1, "--max-steps", 1).status == 0
    first, second = sorted((tmp_path / "runs").iterdir())
    for folder in (first, second):
        assert re.match(r"tiny-\d{8}-\d{6}", folder.name)
        assert (folder / "tiny_transformer.pt").exists()


# Text from a finished run


def test_generate_continues_the_prompt_of_a_finished_run(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = fingerprint(run[0])
    flags = ("--generate", "The gradient über ", "--resume", run[0], "--seed")
    finished = [main_here(*flags, seed) for seed in (0, 1, 2, 2)]
    assert [f.status for f in finished] == [0] * 4
    texts = [f.out for f in finished]
    assert all(text.startswith("The gradient über ") for text in texts)
    assert max(map(len, texts)) > len("The gradient über \n")  # the first byte may be the end
    assert texts[2] == texts[3] and len(set(texts)) > 1
    assert fingerprint(run[0]) == before and list(tmp_path.iterdir()) == []


def test_generated_text_is_printed_by_one_rank_only(run, monkeypatch):
    here = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    for name, value in here.items():
        monkeypatch.setenv(name, value)
    finished = main_here("--generate", "The ", "--resume", run[0])
    assert (finished.status, finished.out) == (0, "")


# Watching does not change the training


SHORT = ("--max-steps", 6, "--log-every", 1, "--batch-size", 4, "--dropout", 0.3, "--d-model", 16)


@pytest.fixture(scope="module")
def unwatched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "unwatched"
    return folder, train_here(folder, *SHORT)


@pytest.mark.parametrize(
    "flags",
    [("--eval-every", 1), ("--sample-every", 2), ("--save-every", 1), ("--tensorboard",), ()],
    ids=["validation", "samples", "checkpoints", "tensorboard", "a second time"],
)
def test_the_training_is_the_same_with(unwatched, tmp_path, flags):
    finished = train_here(tmp_path / "run", *SHORT, *flags)
    assert losses(tmp_path / "run") == losses(unwatched[0])
    assert digest_line(finished) == digest_line(unwatched[1])
    events = list((tmp_path / "run").rglob("*tfevents*"))
    assert bool(events) == ("--tensorboard" in flags)
    assert all(path.stat().st_size > 100 for path in events)


def test_another_seed_gives_another_run(unwatched, tmp_path):
    train_here(tmp_path / "run", *SHORT, "--seed", 1)
    assert losses(tmp_path / "run") != losses(unwatched[0])


def test_samples_and_validations_appear_as_often_as_asked(tmp_path):
    flags = ("--max-steps", 6, "--d-model", 16, "--sample-every", 2, "--eval-every", 3)
    out = train_here(tmp_path / "run", *flags).out.splitlines()
    assert sum("validation loss" in line for line in out) == 2
    assert sum(line.startswith("sample ") for line in out) == 3


def test_bf16_trains_close_to_fp32(tmp_path):
    flags = ("--max-steps", 4, "--log-every", 1, "--d-model", 32)
    for precision in ("fp32", "bf16"):
        train_here(tmp_path / precision, *flags, "--precision", precision)
    assert losses(tmp_path / "bf16") == pytest.approx(losses(tmp_path / "fp32"), abs=0.02)
    assert losses(tmp_path / "bf16") != losses(tmp_path / "fp32")
    assert {v.dtype for v in weights(tmp_path / "bf16").values()} == {torch.float32}


def test_epochs_decide_the_number_of_updates(tmp_path):
    path = tmp_path / "seven.txt"
    path.write_text("one\ntwo\nthree\nfour\nfive\nsix\nseven\n", encoding="utf-8")
    flags = ("--corpus-file", path, "--val-fraction", 0, "--batch-size", 2, "--d-model", 8)
    train_here(tmp_path / "run", *flags, "--epochs", 3, "--log-every", 1)
    assert [row["epoch"] for row in metrics(tmp_path / "run")] == [1] * 4 + [2] * 4 + [3] * 4
    train_here(tmp_path / "both", *flags, "--epochs", 3, "--max-steps", 5, "--log-every", 1)
    assert metrics(tmp_path / "both")[-1]["step"] == 5


@pytest.mark.parametrize("lines", [0, 1, 2, 3])
@pytest.mark.parametrize("form", ["lines", "jsonl", "document"])
def test_tiny_corpora_train_at_least_one_real_step_or_say_why_not(tmp_path, lines, form):
    path = tmp_path / "tiny.txt"
    text = {"jsonl": '{"text": "a"}\n', "lines": "a\n", "document": "a\n"}[form] * lines
    path.write_text(text, encoding="utf-8")
    flags = ("--corpus-file", path, "--corpus-format", form, "--max-steps", 2, "--d-model", 8)
    finished = main_here("--cpu", "--threads", 1, "--output-dir", tmp_path / "run", *flags)
    if lines == 0:
        assert finished.status == 2
        (line,) = finished.err.splitlines()
        assert line.startswith("error: ") and str(path) in line and "0 bytes" in line
        assert not Path(tmp_path / "run").exists()
    else:
        assert finished.status == 0, finished.err
        assert losses(tmp_path / "run")[0] == pytest.approx(math.log(258), abs=0.5)
        assert losses(tmp_path / "run")[-1] > 0
