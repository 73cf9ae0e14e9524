"""Mistakes of the user are one clear line; nothing is trained, nothing is overwritten."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from conftest import (
    ROOT,
    clean_environment,
    command,
    digest_line,
    fingerprint,
    main_here,
    metrics,
    root_cause,
    run_command,
    train_here,
    weights,
)
from quick import job

import llm_ddp_parallel_training as ddp

SPOILED = ROOT / "tests" / "spoiled.py"
LONG = "x" * 300
HUGE = str(10**15)  # more bytes than any machine can address


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """The current folder of a user, with what the command lines below name."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "good.txt").write_bytes(b"one\ntwo\nthree\n")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "blank.txt").write_bytes(b"\n \n\r\n")
    (tmp_path / "latin1.txt").write_bytes(b"one\ntw\xf6\n")
    (tmp_path / "bad.jsonl").write_bytes(b'{"text": "a"}\n{"txt": "b"}\n')
    (tmp_path / "deep.jsonl").write_bytes(b"[" * 100_000)
    for name in ("run", "weights"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tiny_transformer.pt").write_bytes(b"the work of a night")
    (tmp_path / "run" / "run.json").write_text("{}", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    # As on a machine without a GPU, wherever the tests run.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    return tmp_path


# (command line, what its error line names)
MISTAKES = [
    ("--bogus", "--bogus"),
    ("surplus", "surplus"),
    ("--max 3", "--max"),  # no abbreviations: they change their meaning with the next flag
    ("--lr", "--lr"),
    ("--lr nan", "--lr nan"),
    ("--lr inf", "--lr inf"),
    ("--lr 1e999", "--lr 1e999"),
    ("--lr 0", "--lr 0"),
    ("--lr=-1e-3", "--lr -1e-3"),
    ("--lr fast", "--lr fast"),
    ("--batch-size 0", "--batch-size 0"),
    ("--batch-size -2", "--batch-size -2"),
    ("--batch-size 2.5", "--batch-size 2.5"),
    ("--batch-size 10000000000000000000", "--batch-size"),
    ("--grad-accum 0", "--grad-accum 0"),
    ("--max-steps 0", "--max-steps 0"),
    ("--epochs 0", "--epochs 0"),
    ("--seq-len 1", "--seq-len 1"),
    (f"--seq-len {HUGE}", "--seq-len"),
    ("--d-model 0", "--d-model 0"),
    (f"--d-model {HUGE}", "--d-model"),
    ("--layers 0", "--layers 0"),
    ("--heads 0", "--heads 0"),
    ("--heads 3", "--heads 3 --d-model 64"),
    ("--dropout 1", "--dropout 1"),
    ("--dropout -0.1", "--dropout -0.1"),
    ("--weight-decay -1", "--weight-decay -1"),
    ("--clip -1", "--clip -1"),
    ("--clip nan", "--clip nan"),
    ("--warmup-steps -1", "--warmup-steps -1"),
    ("--schedule triangle", "--schedule triangle"),
    ("--seed -1", "--seed -1"),
    ("--threads 0", "--threads 0"),
    ("--log-every 0", "--log-every 0"),
    ("--save-every -1", "--save-every -1"),
    ("--keep 0", "--keep 0"),
    ("--checkpoint-dir nonsense://x/y", "--checkpoint-dir nonsense://x/y"),
    ("--checkpoint-dir", "--checkpoint-dir"),
    ("--merge", "--merge --model qwen"),
    ("--gradient-checkpointing", "--gradient-checkpointing --model qwen"),
    ("--val-fraction 1", "--val-fraction 1"),
    ("--val-fraction -0.1", "--val-fraction -0.1"),
    ("--val-fraction nan", "--val-fraction nan"),
    ("--model gpt", "--model gpt"),
    ("--device tpu", "--device tpu"),
    ("--device cuda", "--device cuda"),
    ("--device mps", "--device mps"),
    ("--cpu --device cuda", "--cpu --device"),
    ("--cpu --precision fp16", "--precision fp16"),
    ("--builtin novels", "--builtin novels"),
    ("--builtin lessons --corpus-file good.txt", "--builtin --corpus-file"),
    ("--builtin lessons --corpus-format jsonl", "jsonl --corpus-file"),
    ("--corpus-format xml", "--corpus-format xml"),
    ("--pack --overlong drop", "--overlong drop"),
    ("--corpus-format document --overlong truncate", "--overlong truncate"),
    ("--overlong drop --seq-len 2", "--seq-len 2"),
    ("--corpus-file missing.txt", "missing.txt"),
    ("--corpus-file folder", "folder"),
    ("--corpus-file good.txt/inside", "good.txt/inside"),
    ("--corpus-file empty.txt", "empty.txt"),
    ("--corpus-file empty.txt --corpus-format document", "empty.txt"),
    ("--corpus-file blank.txt", "blank.txt 3 blank"),
    ("--corpus-file latin1.txt", "latin1.txt line 2, byte offset 6: UTF-8"),
    ("--corpus-file latin1.txt --corpus-format document", "latin1.txt line 2, byte offset 6:"),
    ("--corpus-file bad.jsonl", "bad.jsonl line 2:"),
    ("--corpus-file deep.jsonl", "deep.jsonl line 1:"),
    ("--output-dir run", "--output-dir run --overwrite"),
    ("--output-dir run --dry-run", "--output-dir run --overwrite"),
    ("--output-dir weights --max-steps 1", "--output-dir weights --overwrite"),
    ("--output-dir good.txt", "--output-dir good.txt"),
    ("--output-dir good.txt --dry-run", "--output-dir good.txt"),
    ("--output-dir good.txt/inside", "--output-dir good.txt/inside"),
    ("--generate The", "--generate --resume"),
    ("--generate The --resume missing", "missing"),
    ("--generate The --resume folder", "folder"),
    ("--generate The --resume run", "run"),
    ("--resume auto", "--resume auto --output-dir"),
    ("--resume missing", "missing"),
    ("--resume folder", "folder"),
    ("--resume run", "run"),
    ("--resume missing.pt", "missing.pt"),
    ("--resume good.txt", "good.txt"),
    (f"--output-dir {LONG}", "--output-dir File name too long"),
    (f"--corpus-file {LONG}", "--corpus-file File name too long"),
    (f"--resume {LONG}", "--resume File name too long"),
    (f"--checkpoint-dir {LONG}", "--checkpoint-dir File name too long"),
    (f"--model qwen --base-model {LONG}", "--base-model File name too long"),
]


def the_error_line(finished) -> str:
    """The only line on standard error; a second one, or a traceback, fails."""
    assert finished.status == 2, finished.err
    (line,) = finished.err.splitlines()
    assert re.match("(rank 1: )?error: ", line)  # a process whose RANK is 1 says so
    assert "Traceback" not in finished.out + finished.err
    assert "step " not in finished.out
    return line


@pytest.mark.parametrize(
    ("flags", "named"), MISTAKES, ids=[flags[:50] for flags, _ in MISTAKES]
)  # fmt: skip
def test_a_mistake_is_one_line_that_names_it_and_leaves_everything_as_it_was(desk, flags, named):
    before = fingerprint(desk)
    line = the_error_line(main_here("--threads=1", *flags.split()))
    assert not [word for word in named.split() if word not in line], line
    assert fingerprint(desk) == before


def test_an_empty_prompt_is_refused(desk):
    the_error_line(main_here("--generate", "", "--resume", "run"))


def test_a_prompt_that_is_no_text_is_one_line(tmp_path):
    train_here(tmp_path / "run", "--max-steps", 1, "--d-model", 8)
    prompt = b"\xff".decode("utf-8", errors="surrogateescape")  # as Python reads such an argument
    the_error_line(main_here("--generate", prompt, "--resume", tmp_path / "run"))


def test_tensorboard_without_its_package_is_one_line(desk, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    before = fingerprint(desk)
    assert "pip install tensorboard" in the_error_line(main_here("--cpu", "--tensorboard"))
    assert fingerprint(desk) == before


def test_a_missing_matplotlib_is_said_before_the_training_and_not_after_it(desk, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    before = fingerprint(desk)
    line = the_error_line(main_here("--cpu", "--max-steps", 1, "--output-dir", "new"))
    assert "pip install matplotlib" in line
    assert fingerprint(desk) == before


def test_a_folder_that_cannot_be_written_is_one_line(desk, monkeypatch):
    def refused(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refused)
    line = the_error_line(main_here("--cpu", "--output-dir", "locked"))
    assert "--output-dir locked" in line and "Permission denied" in line


@pytest.mark.parametrize("kind", ["a file", "a link to nowhere"])
def test_what_stands_where_the_runs_go_is_one_line(desk, kind):
    (desk / "runs").touch() if kind == "a file" else (desk / "runs").symlink_to("nowhere")
    assert "--output-dir runs: File exists" in the_error_line(main_here("--cpu", "--max-steps", 1))


@pytest.mark.parametrize(
    ("mode", "flags"),
    [(0o000, "--resume auto"), (0o555, "--overwrite")],
    ids=["locked", "read-only"],
)
def test_a_folder_without_permission_is_one_line_also_for_root_without_its_powers(
    tmp_path, mode, flags
):
    powers = "-dac_override,-dac_read_search"
    drop = ["setpriv", f"--bounding-set={powers}", f"--inh-caps={powers}"]
    if os.geteuid() == 0 and not shutil.which("setpriv"):
        pytest.skip("root may write everywhere")
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(mode)
    try:
        start = command(1, "--cpu", "--max-steps", 1, "--output-dir", folder, *flags.split())
        line = the_error_line(run_command([*drop * (os.geteuid() == 0), *start]))
    finally:
        folder.chmod(0o700)
    assert f"--output-dir {folder}: Permission denied" in line and not any(folder.iterdir())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "one"), ("RANK", "-1"), ("RANK", "1"), ("RANK", ""), ("RANK", "0.0"),
        ("WORLD_SIZE", "0"), ("WORLD_SIZE", "two"), ("WORLD_SIZE", "-2"), ("WORLD_SIZE", "²"),
        ("WORLD_SIZE", "9" * 5000), ("LOCAL_RANK", "x"), ("LOCAL_RANK", "1"),
        ("LOCAL_WORLD_SIZE", "0"), ("LOCAL_WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", " "),
    ],
    ids=lambda value: value[:9],
)  # fmt: skip
def test_nonsense_in_the_launchers_variables_is_named(desk, monkeypatch, name, value):
    monkeypatch.setattr(ddp, "PEER_LOSS_GRACE_S", 0)
    monkeypatch.setenv(name, value)
    line = the_error_line(main_here("--cpu", "--max-steps", 1))
    assert name in line and "unset" in line


def test_a_world_size_without_a_launcher_is_named(desk, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    line = the_error_line(main_here("--cpu", "--max-steps", 1))
    assert "WORLD_SIZE=2" in line and "torch.distributed.run" in line


def test_a_world_size_of_one_needs_no_launcher(desk, monkeypatch):
    for name, value in (("WORLD_SIZE", "1"), ("RANK", "0"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    assert main_here("--cpu", "--dry-run").status == 0


# Runs that would replace one another


def test_a_second_run_into_a_folder_is_refused_and_touches_nothing(tmp_path):
    flags = ("--cpu", "--threads", 1, "--output-dir", tmp_path / "run", "--d-model", 8)
    assert main_here(*flags, "--max-steps", 3).status == 0
    before = fingerprint(tmp_path)
    line = the_error_line(main_here(*flags, "--max-steps", 5))
    assert "--overwrite" in line and str(tmp_path / "run") in line
    assert fingerprint(tmp_path) == before


def test_overwrite_replaces_a_run_and_nothing_else(tmp_path):
    folder = tmp_path / "run"
    old = train_here(folder, "--d-model", 8, "--max-steps", 3, "--tensorboard")
    (folder / "notes.txt").write_text("mine", encoding="utf-8")
    new = train_here(folder, "--d-model", 16, "--max-steps", 4, "--overwrite")
    assert (folder / "notes.txt").read_text(encoding="utf-8") == "mine"
    assert not list(folder.rglob("*tfevents*"))
    assert metrics(folder)[-1]["step"] == 4
    assert weights(folder)["token_emb.weight"].shape[1] == 16
    assert digest_line(old) != digest_line(new)


@pytest.mark.parametrize("mistake", [("--corpus-file", "latin1.txt"), ("--heads", 3)], ids=str)
def test_overwrite_with_a_mistake_leaves_the_old_run(desk, mistake):
    before = fingerprint(desk)
    the_error_line(main_here("--cpu", "--output-dir", "run", "--overwrite", *mistake))
    assert main_here("--cpu", "--output-dir", "run", "--overwrite", "--dry-run").status == 0
    assert fingerprint(desk) == before


# Runs that go wrong on the way


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("rate", [1e6, 1e9])
@pytest.mark.parametrize("validated", [True, False], ids=["validated", "not validated"])
def test_a_run_that_spoils_its_weights_ends_with_status_3_and_no_result(
    tmp_path, steps, rate, validated
):
    folder = tmp_path / "run"
    flags = ("--max-steps", steps, "--lr", rate, "--log-every", 1, "--output-dir", folder)
    flags += () if validated else ("--val-fraction", 0)
    finished = main_here("--cpu", "--threads", 1, *flags)
    assert finished.status == 3, finished.err
    (line,) = finished.err.splitlines()
    assert line.startswith("error: ") and "--lr" in line
    assert f"update {min(steps, 2)}:" in line
    assert {path.name for path in folder.iterdir()} == {"run.json", "metrics.jsonl"}

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        json.loads(line, parse_constant=refuse)


def test_weights_that_were_spoiled_never_become_a_checkpoint(tmp_path):
    flags = ("--lr", 1e6, "--max-steps", 3, "--save-every", 1, "--output-dir", tmp_path / "run")
    assert main_here("--cpu", "--threads", 1, *flags).status == 3
    assert not list((tmp_path / "run").rglob("*.pt*"))


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "cp1251"])
def test_a_terminal_that_cannot_show_a_character_does_not_end_the_run(tmp_path, encoding):
    path = tmp_path / "corpus.txt"
    path.write_text("текст\nзвук\n日本語\nmiß\n" * 3, encoding="utf-8")
    flags = ("--corpus-file", path, "--max-steps", 2, "--d-model", 8)
    finished = train_here(tmp_path / "run", *flags, encoding=encoding)
    assert digest_line(finished)
    assert (tmp_path / "run" / "tiny_transformer.pt").exists()
    again = main_here("--generate", "ж", "--resume", tmp_path / "run", encoding=encoding)
    assert again.status == 0, again.err


# Launched as a user would


def test_on_two_ranks_a_mistake_in_the_data_is_said_by_rank_0_and_left_for_the_launcher(desk):
    flags, file = ("--corpus-file", desk / "latin1.txt"), desk / "error.json"
    endings = job(2, *flags, faults=[{"kind": "late", "rank": 1, "value": 0.5}],
                  TORCHELASTIC_ERROR_FILE=str(file))  # fmt: skip
    assert endings[0].status == 2 and endings[1].status > 0  # which may have lost rank 0 by then
    (line,) = endings[0].err.splitlines()
    assert line.startswith("error: ") and "latin1.txt, line 2, byte offset 6:" in line
    assert line.removeprefix("error: ") == json.loads(file.read_text())["message"]["message"]
    assert not (desk / "runs").exists()


def test_a_mistake_is_said_once_by_rank_0_even_if_another_rank_finds_it_first(tmp_path):
    late = [{"kind": "late", "rank": 0, "value": 2}]
    finished = run_command(
        command(2, "--cpu", "--bogus", script=SPOILED),
        env=clean_environment(FAULTS=json.dumps(late)),
    )
    assert finished.status != 0
    (line,) = re.findall(r"^.*error: .*--bogus.*$", finished.err.partition("Root Cause")[0], re.M)
    assert line.startswith("error: ")
    assert line in finished.err.partition("Traceback")[0]  # before the launcher's own
    cause = root_cause(finished)  # so it is found at the end, too
    assert line.removeprefix("error: ") in cause and "exitcode  : 2 " in cause


def test_a_mistake_that_one_rank_alone_can_see_is_said_by_that_rank(tmp_path):
    mistake = [{"kind": "mistake", "rank": 1}]
    flags = ("--max-steps", 9, "--output-dir", tmp_path / "run")
    endings = job(2, *flags, faults=mistake)
    assert [e.status for e in endings] == [1, 2]  # without a launcher, rank 0 loses its peer
    assert endings[1].err == "rank 1: error: a mistake that only this rank can see\n"
    assert "lost contact with another rank" in endings[0].err


def test_memory_that_runs_out_is_one_line_that_says_what_to_lower(capsys):
    with pytest.raises(SystemExit) as end, ddp.one_clear_ending():
        torch.empty(1 << 46)  # more than a process can address
    assert end.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: rank 0, ") and "out of memory; lower --batch-size" in line
