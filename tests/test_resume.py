"""Invariants 5 and 6: a stopped and resumed run is the uninterrupted one, and nothing is lost."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from conftest import digest_line, largest_difference, losses, metrics, weights
from quick import checkpoints, hashes, here, job, steps

import llm_ddp_parallel_training as reference

# 29 samples to train on, 8 an update: an epoch is 4 updates, and its last one is smaller.
LONG = (
    "--dropout", 0.1, "--max-steps", 40, "--save-every", 4, "--log-every", 1, "--eval-every", 10,
)  # fmt: skip
SHORT = ("--dropout", 0.1, "--save-every", 2, "--log-every", 1)


def long(ranks: int) -> tuple:
    return (*LONG, "--batch-size", 8 // ranks)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The long run without a stop, by ranks: (folder, weights sha256)."""
    runs = {}
    for ranks in (1, 2):
        folder = tmp_path_factory.mktemp("uninterrupted") / "run"
        endings = job(ranks, *long(ranks), "--output-dir", folder)
        assert [e.status for e in endings] == [0] * ranks, endings
        runs[ranks] = folder, digest_line(endings[0])
    return runs


@pytest.fixture(scope="module")
def ten_updates(tmp_path_factory):
    """A finished run of ten updates; tests that change it copy it first."""
    folder = tmp_path_factory.mktemp("ten") / "run"
    assert here(*SHORT, "--max-steps", 10, "--output-dir", folder).status == 0
    return folder


@pytest.fixture
def copy(ten_updates, tmp_path):
    shutil.copytree(ten_updates, tmp_path / "run")
    return tmp_path / "run"


def one_error(finished) -> str:
    """The one line that a wrong input gives, with exit status 2."""
    assert finished.status == 2, finished
    (line,) = finished.err.splitlines()
    assert line.startswith("error: ")
    return line


# -- Stopping anywhere ---------------------------------------------------------------------


@pytest.mark.parametrize("cause", ["SIGTERM", "SIGKILL", "exception"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_stopped_at_random_updates_ends_like_the_uninterrupted_one(
    uninterrupted, tmp_path, ranks, cause
):
    expected, digest = uninterrupted[ranks]
    folder, seed = tmp_path / "run", random.Random(f"{cause} {ranks}")
    where = ("--output-dir", folder)
    for update in (seed.randint(5, 14), seed.randint(7, 12)):
        # The whole job dies of SIGKILL; of the other two, one rank's share is enough.
        fault = {"kind": cause, "update": update, "value": str(folder / "checkpoints")}
        fault |= {} if cause == "SIGKILL" else {"rank": ranks - 1}
        endings = job(ranks, *long(ranks), *where, faults=[fault])
        status = {"SIGTERM": 143, "SIGKILL": -9, "exception": 1}[cause]
        assert [e.status for e in endings] == [status] * ranks, endings
        where = ("--resume", folder)
    endings = job(ranks, "--resume", folder)
    assert [e.status for e in endings] == [0] * ranks, endings
    assert digest_line(endings[0]) == digest
    assert losses(folder) == losses(expected)
    assert steps(folder) == list(range(1, 41))
    ours, theirs = metrics(folder), metrics(expected)
    assert [r.get("val_loss") for r in ours] == [r.get("val_loss") for r in theirs]
    assert [r.get("lr") for r in ours] == [r.get("lr") for r in theirs]
    assert [r.get("tokens") for r in ours] == [r.get("tokens") for r in theirs]


def test_a_signal_costs_at_most_one_update_without_any_save_every(tmp_path):
    run, faults = tmp_path / "run", [{"kind": "SIGTERM", "update": 7}]
    (ending,) = job(1, "--max-steps", 20, "--log-every", 1, "--output-dir", run, faults=faults)
    assert ending.status == 143
    # The update that the signal came in, and at most one more to agree with the other ranks.
    assert checkpoints(run) in (["step-00000007.pt"], ["step-00000008.pt"])
    (line,) = ending.err.splitlines()
    assert "SIGTERM" in line and f"--resume {run}" in line


def test_a_model_of_several_buckets_resumes_bit_for_bit_on_two_ranks(tmp_path):
    flags = (
        "--layers", 2, "--dropout", 0.1, "--batch-size", 2, "--max-steps", 5, "--save-every", 3,
        "--log-every", 1, "--val-fraction", 0,
    )  # fmt: skip
    small = {"kind": "small buckets", "value": 0.05}  # MB, of 0.55 to send
    whole = job(2, *flags, "--output-dir", tmp_path / "whole", faults=[small])
    faults = [{"kind": "SIGTERM", "update": 3}, small]
    stopped = job(2, *flags, "--output-dir", tmp_path / "run", faults=faults)
    resumed = job(2, "--resume", tmp_path / "run", faults=[small])
    assert [e.status for e in (*whole, *stopped, *resumed)] == [0, 0, 143, 143, 0, 0]
    assert digest_line(resumed[0]) == digest_line(whole[0])
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


@pytest.mark.parametrize("data", [("--pack",), ("--grad-accum", 2)], ids=str)
def test_packing_accumulation_and_a_schedule_resume_exactly(tmp_path, data):
    flags = (*SHORT, *data, "--max-steps", 9, "--schedule", "cosine", "--warmup-steps", 3)
    whole = here(*flags, "--output-dir", tmp_path / "whole")
    faults = [{"kind": "SIGKILL", "update": 6, "value": str(tmp_path / "run/checkpoints")}]
    (killed,) = job(1, *flags, "--output-dir", tmp_path / "run", faults=faults)
    resumed = here("--resume", tmp_path / "run")
    assert (killed.status, resumed.status) == (-9, 0), resumed.err
    assert digest_line(resumed) == digest_line(whole)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_three_kills_while_saving_lose_nothing(tmp_path):
    from soak.kill_while_saving import soak

    soak(ranks=1, kills=3, folder=tmp_path, seed=1)


# -- Other numbers of ranks ----------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_trains_on_the_same_records(tmp_path, before, after):
    flags = ("--max-steps", 14, "--log-every", 1, "--batch-size", 8 // before)
    for name in ("whole notes", "first notes", "last notes"):
        (tmp_path / name).mkdir()

    def watch(name: str) -> dict:
        return {"kind": "watch", "value": str(tmp_path / name)}

    job(before, *flags, "--output-dir", tmp_path / "whole", faults=[watch("whole notes")])
    faults = [watch("first notes"), {"kind": "SIGTERM", "update": 7}]
    endings = job(before, *flags, "--output-dir", tmp_path / "run", faults=faults)
    assert [e.status for e in endings] == [143] * before
    endings = job(after, "--resume", tmp_path / "run", faults=[watch("last notes")])
    assert [e.status for e in endings] == [0] * after, endings
    assert "keeps the 8 sequences an update" in endings[0].out  # how that is done is printed

    def ids_per_update(name: str) -> list[set[int]]:
        shares = [
            [json.loads(line)["ids"] for line in path.read_text("utf-8").splitlines()]
            for path in sorted((tmp_path / name).iterdir())
        ]
        return [{i for share in update for i in share} for update in zip(*shares, strict=True)]

    resumed = ids_per_update("first notes") + ids_per_update("last notes")
    assert resumed == ids_per_update("whole notes")
    assert len(resumed) == 14
    assert largest_difference(weights(tmp_path / "run"), weights(tmp_path / "whole")) <= 1e-6
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), abs=1e-6)


def test_ranks_that_cannot_keep_the_global_batch_are_refused_with_the_arithmetic(copy):
    before = hashes(copy)
    endings = job(3, "--resume", copy, "--max-steps", 12)
    assert [e.status for e in endings] == [2] * 3
    line = one_error(endings[0])
    assert "8 × accumulation 1 × ranks 3 = 24" in line and "had 8 " in line
    assert hashes(copy) == before


def test_a_batch_that_changes_the_update_is_refused_and_one_that_keeps_it_is_taken(copy):
    line = one_error(here("--resume", copy, "--max-steps", 12, "--batch-size", 4))
    assert "4 × accumulation 1 × ranks 1 = 4" in line and "8" in line
    flags = ("--batch-size", 4, "--grad-accum", 2, "--max-steps", 12)
    assert here("--resume", copy, *flags).status == 0


# -- Settings ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "value", "old"),
    [
        ("--seed", 1, "0"),
        ("--d-model", 128, "64"),
        ("--layers", 2, "1"),
        ("--dropout", 0.2, "0.1"),
        ("--seq-len", 32, "64"),
        ("--lr", 0.01, "0.0003"),
        ("--schedule", "cosine", "constant"),
        ("--warmup-steps", 5, "0"),
        ("--clip", 2, "1.0"),
        ("--weight-decay", 0.1, "0.01"),
        ("--val-fraction", 0.2, "0.1"),
        ("--builtin", "python-docs", "lessons"),
    ],
)
def test_a_setting_that_would_change_the_run_is_refused_by_name(ten_updates, flag, value, old):
    before = hashes(ten_updates)
    line = one_error(here("--resume", ten_updates, "--max-steps", 12, flag, value))
    assert flag in line and str(value) in line and old in line
    assert hashes(ten_updates) == before


def test_the_command_of_the_run_itself_with_resume_added_is_taken(copy):
    flags = ("--max-steps", 12, "--precision", "auto", "--device", "cpu", "--batch-size", 8)
    finished = here(*SHORT, *flags, "--lr", 3e-4, "--builtin", "lessons", "--resume", copy)
    assert finished.status == 0, finished.err


def test_more_steps_go_on_from_a_finished_run(ten_updates, copy, tmp_path):
    finished = here("--resume", copy, "--max-steps", 13)
    assert finished.status == 0, finished.err
    whole = here(*SHORT, "--max-steps", 13, "--output-dir", tmp_path / "whole")
    assert digest_line(finished) == digest_line(whole)
    assert steps(copy) == list(range(1, 14))
    assert losses(copy) == losses(tmp_path / "whole")


def test_a_finished_run_resumed_without_more_steps_stays_as_it_was(copy):
    old = weights(copy)
    finished = here("--resume", copy)
    assert finished.status == 0, finished.err
    assert largest_difference(weights(copy), old) == 0
    assert steps(copy) == list(range(1, 11))


def test_threads_given_to_the_run_are_kept_when_it_goes_on(tmp_path):
    flags = ("--cpu", "--threads", 1, "--max-steps", 2, "--save-every", 2)
    here(*flags, "--output-dir", tmp_path / "run", cpu=False)
    finished = here("--resume", tmp_path / "run", "--max-steps", 3, cpu=False)
    (line,) = [x for x in finished.out.splitlines() if x.startswith("threads ")]
    assert line.split()[1] == "1"


def test_another_corpus_is_refused_and_a_moved_one_is_taken(tmp_path):
    lines = [f"this is line number {i}\n" for i in range(30)]
    (tmp_path / "a.txt").write_text("".join(lines), encoding="utf-8")
    lines[7] = "this is another line\n"
    (tmp_path / "b.txt").write_text("".join(lines), encoding="utf-8")
    run = tmp_path / "run"
    flags = (*SHORT, "--max-steps", 2, "--output-dir", run)
    assert here("--corpus-file", tmp_path / "a.txt", *flags).status == 0
    before = hashes(run)
    again = ("--resume", run, "--max-steps", 4)
    assert "corpus" in one_error(here(*again, "--corpus-file", tmp_path / "b.txt"))
    assert hashes(run) == before
    (tmp_path / "a.txt").rename(tmp_path / "c.txt")
    assert "a.txt" in one_error(here(*again))
    assert here(*again, "--corpus-file", tmp_path / "c.txt").status == 0


def test_a_corpus_named_relatively_is_found_from_another_folder(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("one\ntwo\nthree\nfour\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    flags = ("--corpus-file", "a.txt", *SHORT, "--max-steps", 2, "--output-dir", "run")
    assert here(*flags).status == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    finished = here("--resume", tmp_path / "run", "--max-steps", 4)
    assert finished.status == 0, finished.err


# -- Checkpoints ---------------------------------------------------------------------------


def test_a_checkpoint_holds_plain_tensors_of_the_bare_model(uninterrupted):
    folder, _ = uninterrupted[2]
    newest = folder / "checkpoints" / checkpoints(folder)[-1]
    state = torch.load(newest, weights_only=True)
    names = dict(reference.TinyCausalTransformer().named_parameters()).keys()
    assert state["model"].keys() == names
    assert all(t.device.type == "cpu" for t in state["model"].values())
    assert largest_difference(state["model"], weights(folder)) == 0


def test_keep_leaves_the_newest_and_the_best(tmp_path):
    run = tmp_path / "run"
    flags = ("--max-steps", 12, "--save-every", 2, "--keep", 2, "--eval-every", 3, "--lr", 3)
    finished = here(*flags, "--output-dir", run)
    assert finished.status == 0, finished.err
    rated = {row["val_loss"]: row["step"] for row in metrics(run) if "val_loss" in row}
    best = rated[min(rated)]
    assert best < 10, "this rate was meant to make the validation loss rise again"
    newest = [f"step-{step:08d}.pt" for step in (10, 12)]
    assert checkpoints(run) == [f"step-{best:08d}.pt", *newest]


@pytest.mark.parametrize("keep", [1, 3])
@pytest.mark.parametrize("harm", ["a byte flipped", "cut short", "empty", "of another program"])
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(copy, harm, keep):
    newest, before = (copy / f"checkpoints/step-{step:08d}.pt" for step in (10, 8))
    content = bytearray(newest.read_bytes())
    if harm == "a byte flipped":
        content[len(content) // 2] ^= 1
    elif harm == "cut short":
        del content[-100:]
    elif harm == "empty":
        content.clear()
    newest.write_bytes(content)
    if harm == "of another program":
        torch.save({"model": {}}, newest)
    flags = ("--resume", copy, "--max-steps", 20, "--keep", keep)
    # The run dies between its first checkpoint and the step of the damaged one.
    fault = {"kind": "SIGKILL", "update": 2, "value": str(copy / "checkpoints/step-00000009.pt")}
    (killed,) = job(1, *flags, "--save-every", 1, faults=[fault])
    assert killed.status == -9, killed
    assert "step-00000010.pt is damaged" in killed.out
    assert f"going on from {before}" in killed.out
    assert steps(copy) == list(range(1, 10))
    finished = here(*flags)
    assert finished.status == 0, finished.err
    assert "going on from" in finished.out and "step-00000009.pt" in finished.out
    assert steps(copy) == list(range(1, 21))


def test_a_run_with_only_damaged_checkpoints_ends_in_one_line(copy):
    for state in (copy / "checkpoints").iterdir():
        state.write_bytes(b"nothing")
    before = hashes(copy)
    line = one_error(here("--resume", copy, "--max-steps", 12))
    assert all(f"step-{step:08d}" in line for step in (6, 8, 10))
    assert hashes(copy) == before


def test_a_checkpoint_that_would_run_code_is_not_unpickled(copy):
    class Harm:
        def __reduce__(self):
            return Path.touch, (copy / "harm",)

    named = copy / "checkpoints/step-00000010.pt"
    torch.save({**torch.load(named, weights_only=True), "harm": Harm()}, named)
    one_error(here("--resume", named, "--max-steps", 12))
    assert here("--resume", copy, "--max-steps", 12).status == 0  # from the one before
    assert not (copy / "harm").exists()


@pytest.mark.parametrize("named", ["run", "run/checkpoints", "run/checkpoints/step-00000100"])
def test_checkpoints_of_the_earlier_format_are_one_clear_line(tmp_path, monkeypatch, named):
    monkeypatch.chdir(tmp_path)
    folder = Path("run/checkpoints/step-00000100")
    folder.mkdir(parents=True)
    torch.save({"model": {}}, folder / "state.pt")
    (folder / "manifest.json").write_text('{"files": {}}', encoding="utf-8")
    Path("run/run.json").write_text('{"settings": {"model": "tiny"}}', encoding="utf-8")
    before = hashes(tmp_path)
    line = one_error(here("--resume", named))
    assert "checkpoints in folders" in line and "of an earlier version" in line
    assert hashes(tmp_path) == before


# -- A new run from a named checkpoint -----------------------------------------------------


@pytest.mark.parametrize("where", ["--output-dir", "default folder"])
def test_a_named_checkpoint_begins_a_new_run_and_touches_nothing_of_the_old_one(
    copy, tmp_path, monkeypatch, where
):
    monkeypatch.chdir(tmp_path)
    before, named = hashes(copy), copy / "checkpoints/step-00000006.pt"
    flags = ("--output-dir", "branch") if where == "--output-dir" else ()
    finished = here("--resume", named, *flags, "--max-steps", 11)
    assert finished.status == 0, finished.err
    assert f"going on from {named}" in finished.out
    (branch,) = [Path("branch")] if flags else Path("runs").iterdir()
    assert steps(branch) == list(range(1, 12))
    assert losses(branch)[:10] == losses(copy)
    assert checkpoints(branch) == [f"step-{step:08d}.pt" for step in (8, 10, 11)]
    assert hashes(copy) == before


def test_a_named_checkpoint_does_not_go_on_in_the_folder_that_it_came_from(copy):
    before, named = hashes(copy), copy / "checkpoints/step-00000006.pt"
    line = one_error(here("--resume", named, "--output-dir", copy))
    assert "--overwrite" in line and str(copy) in line
    assert hashes(copy) == before


def test_a_checkpoint_that_is_not_there_is_one_line(ten_updates):
    line = one_error(here("--resume", ten_updates / "checkpoints/step-00000007.pt"))
    assert "step-00000007.pt" in line


def test_the_trained_weights_are_no_checkpoint_and_that_is_said(ten_updates):
    line = one_error(here("--resume", ten_updates / "tiny_transformer.pt"))
    assert "tiny_transformer.pt" in line and "checkpoint" in line


def test_leftovers_of_a_killed_save_are_cleaned_up(copy):
    (copy / "checkpoints/step-00000012.pt.partial").write_bytes(b"half of it")
    assert here("--resume", copy, "--max-steps", 11).status == 0
    assert not [name for name in checkpoints(copy) if name.endswith(".partial")]


def test_a_resume_does_not_replace_the_checkpoint_it_came_from(copy):
    only = copy / "checkpoints/step-00000010.pt"
    before = only.stat().st_ino, only.stat().st_mtime_ns
    assert here("--resume", copy, "--max-steps", 11).status == 0
    assert (only.stat().st_ino, only.stat().st_mtime_ns) == before


def test_metrics_have_no_gaps_or_repeats_after_a_run_that_outran_its_checkpoint(tmp_path):
    run = tmp_path / "run"
    faults = [{"kind": "SIGKILL", "update": 10, "value": str(run / "checkpoints/step-00000005.pt")}]
    flags = ("--save-every", 5, "--log-every", 1, "--eval-every", 2, "--max-steps", 14)
    job(1, *flags, "--output-dir", run, faults=faults)
    assert steps(run)[-1] > 5 + 1, "this run was meant to outrun its checkpoint"
    with open(run / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 10, "lo')  # the kill came while it wrote
    for old in (run / "checkpoints").glob("*[!5].pt"):  # best ones came in between
        old.unlink()
    assert here("--resume", run).status == 0
    assert steps(run) == list(range(1, 15))
    validated = [row["step"] for row in metrics(run) if "val_loss" in row]
    assert validated == list(range(2, 15, 2))


# -- What --resume may name ----------------------------------------------------------------


def test_a_run_without_a_checkpoint_is_one_line_that_says_how_to_get_one(tmp_path):
    run = tmp_path / "run"
    assert here("--max-steps", 2, "--output-dir", run).status == 0
    before = hashes(run)
    assert "--save-every" in one_error(here("--resume", run, "--max-steps", 4))
    assert hashes(run) == before


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "3", '{"name": "another program"}', '{"settings": []}', '{"settings": null}',
     '{"settings": {"model": 5}}', '{"settings": {"corpus_file": 5}}',
     '{"settings": {"seed": "abc"}}', '{"settings": {"d_model": 0}}', "\udcff"],
)  # fmt: skip
def test_a_run_file_of_another_program_is_one_line(tmp_path, content):
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    line = one_error(here("--resume", run))
    assert str(run) in line
    assert (run / "run.json").read_bytes() == content.encode("utf-8", "surrogateescape")


@pytest.mark.parametrize("name", ["nowhere", "file.txt", ""])
def test_a_resume_of_nothing_is_one_line(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.txt").write_text("no run", encoding="utf-8")
    here_before = hashes(tmp_path)
    one_error(here("--max-steps", 2, "--resume", str(tmp_path / name) if name else ""))
    assert hashes(tmp_path) == here_before


def test_a_metrics_file_of_other_rows_is_no_traceback(copy):
    with open(copy / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('3\n[]\n{"note": "by hand"}\n\n')
    finished = here("--resume", copy, "--max-steps", 12)
    assert finished.status == 0, finished.err
    assert steps(copy) == list(range(1, 13))


def test_a_run_goes_on_in_another_folder_with_its_whole_history(copy, tmp_path):
    old = hashes(copy)
    finished = here("--resume", copy, "--max-steps", 12, "--output-dir", tmp_path / "new")
    assert finished.status == 0, finished.err
    assert steps(tmp_path / "new") == list(range(1, 13))
    assert hashes(copy) == old


def test_a_validated_checkpoint_goes_on_in_another_folder(tmp_path):
    flags = ("--save-every", 2, "--eval-every", 2, "--max-steps", 4)
    assert here(*flags, "--output-dir", tmp_path / "old").status == 0
    where = ("--output-dir", tmp_path / "new")
    finished = here("--resume", tmp_path / "old", "--max-steps", 6, *where)
    assert finished.status == 0, finished.err


def test_overwrite_beside_resume_is_refused_and_deletes_nothing(copy):
    before = hashes(copy)
    for named in (copy, copy / "checkpoints/step-00000010.pt"):
        line = one_error(here("--resume", named, "--output-dir", copy, "--overwrite"))
        assert "--overwrite" in line and "--resume" in line
    assert hashes(copy) == before


def test_the_resumed_folder_spelled_in_another_way_is_the_same_folder(copy, monkeypatch):
    monkeypatch.chdir(copy.parent)
    finished = here("--resume", "run", "--output-dir", copy, "--max-steps", 12)
    assert finished.status == 0, finished.err
    assert steps(copy) == list(range(1, 13))


def test_a_refused_resume_leaves_its_new_folder_free(copy, tmp_path):
    where = ("--output-dir", tmp_path / "new")
    one_error(here("--resume", copy, "--max-steps", 12, "--batch-size", 3, *where))
    finished = here("--resume", copy, "--max-steps", 12, *where)
    assert finished.status == 0, finished.err


def test_a_refused_resume_overwrites_no_other_run(copy, tmp_path):
    shutil.copytree(copy, tmp_path / "other")
    before = hashes(tmp_path / "other")
    where = ("--output-dir", tmp_path / "other", "--overwrite")
    one_error(here("--resume", copy, "--max-steps", 12, "--batch-size", 3, *where))
    assert hashes(tmp_path / "other") == before


def test_a_path_with_spaces_and_other_letters_is_resumed(tmp_path):
    run = tmp_path / "mein Lauf – 試験 [1]"
    assert here(*SHORT, "--max-steps", 4, "--keep", 1, "--output-dir", run).status == 0
    assert checkpoints(run) == ["step-00000004.pt"]
    assert here("--resume", f"{run}/", "--max-steps", 6).status == 0
    assert steps(run) == list(range(1, 7))


# -- --resume auto -------------------------------------------------------------------------


@pytest.mark.parametrize("place", [(), ("--checkpoint-dir", "elsewhere")], ids=["folder", "place"])
def test_auto_begins_goes_on_and_leaves_a_finished_run_as_it_is(tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    flags = (*SHORT, *place, "--max-steps", 9, "--output-dir", "run", "--resume", "auto")
    fault = {"kind": "exception", "update": 6}
    (failed,) = job(1, *flags, faults=[fault])
    assert failed.status == 1
    finished = here(*flags)
    assert finished.status == 0, finished.err
    assert "going on from" in finished.out and "step-00000004.pt" in finished.out
    whole = here(*SHORT, "--max-steps", 9, "--output-dir", "whole")
    assert digest_line(finished) == digest_line(whole)
    assert losses(Path("run")) == losses(Path("whole"))
    assert digest_line(here(*flags)) == digest_line(whole)
    assert steps(Path("run")) == list(range(1, 10))


def test_auto_begins_again_after_an_attempt_that_saved_nothing(tmp_path):
    flags = ("--max-steps", 4, "--output-dir", tmp_path / "run", "--resume", "auto")
    (failed,) = job(1, *flags, faults=[{"kind": "exception", "update": 3}])
    assert failed.status == 1 and (tmp_path / "run/run.json").exists()
    assert here(*flags).status == 0
    assert steps(tmp_path / "run") == [1, 4]


def test_auto_replaces_no_finished_run_that_kept_no_checkpoint(tmp_path):
    run = tmp_path / "run"
    assert here("--max-steps", 2, "--output-dir", run).status == 0
    before = hashes(run)
    one_error(here("--max-steps", 4, "--output-dir", run, "--resume", "auto"))
    assert hashes(run) == before


def test_auto_does_not_begin_again_over_damaged_checkpoints(copy):
    for state in (copy / "checkpoints").iterdir():
        state.write_bytes(b"nothing")
    before = hashes(copy)
    assert "damaged" in one_error(here("--output-dir", copy, "--resume", "auto"))
    assert hashes(copy) == before
