"""--checkpoint-dir and --resume URL: checkpoints in a folder or on any file system of fsspec, and
at a URL the results as well."""

from __future__ import annotations

import shutil
from pathlib import Path

import fsspec
import pytest
from conftest import digest_line, fingerprint, losses
from fsspec.implementations.memory import MemoryFileSystem
from moto.server import ThreadedMotoServer
from quick import checkpoints, here, steps

import llm_ddp_parallel_training as ddp

FLAGS = ("--dropout", 0.1, "--save-every", 2, "--log-every", 1, "--d-model", 16)
RESULTS = {"run.json", "metrics.jsonl", "loss_curve.png", "tiny_transformer.pt"}


@pytest.fixture(scope="module")
def s3():
    """A server that speaks S3, with one bucket; fsspec finds it by the environment."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        fsspec.filesystem("s3").mkdir("bucket")
        yield "s3://bucket"
    server.stop()


@pytest.fixture
def memory():
    """A URL on a file system that is empty at first."""
    MemoryFileSystem.store.clear()
    yield "memory://store/run"
    MemoryFileSystem.store.clear()


@pytest.fixture(params=["folder", "file", "memory", "s3"])
def place(request, tmp_path):
    """A new place for checkpoints, on each kind of file system."""
    if request.param == "memory":
        return request.getfixturevalue("memory")
    if request.param == "s3":
        return f"{request.getfixturevalue('s3')}/{tmp_path.name}/run"
    return ("file://" if request.param == "file" else "") + f"{tmp_path}/far away [1]/run"


def files_at(place: str) -> dict[str, bytes]:
    """The files in a place by their names relative to it, with what is in them."""
    fs, root = fsspec.core.url_to_fs(place)
    fs.invalidate_cache()
    return {path[len(root) :].lstrip("/"): fs.cat_file(path) for path in fs.find(root)}


def saved_at(place: str) -> list[int]:
    """The updates whose checkpoints are there."""
    return sorted(int(name[5:-3]) for name in files_at(place) if name.startswith("step-"))


def one_error(finished) -> str:
    assert finished.status == 2, finished
    (line,) = finished.err.splitlines()
    assert line.startswith("error: ")
    return line


# -- Going on ------------------------------------------------------------------------------


def test_a_lost_machine_goes_on_from_the_place_and_leaves_its_results_there(place, tmp_path):
    whole = here(*FLAGS, "--max-steps", 9, "--output-dir", tmp_path / "whole")
    flags = (*FLAGS, "--max-steps", 5, "--checkpoint-dir", place, "--output-dir", tmp_path / "lost")
    lost = here(*flags)
    assert lost.status == 0, lost.err
    shutil.rmtree(tmp_path / "lost")
    new = ("--output-dir", tmp_path / "new", "--tensorboard")
    resumed = here("--resume", place, "--max-steps", 9, *new)
    assert resumed.status == 0, resumed.err
    assert digest_line(resumed) == digest_line(whole)
    assert losses(tmp_path / "new") == losses(tmp_path / "whole")
    assert saved_at(place) == [6, 8, 9]
    assert not (tmp_path / "new/checkpoints").exists()
    there, new = files_at(place), tmp_path / "new"
    results = {name for name in there if not name.startswith("step-")}
    if "://" in place:
        assert results >= RESULTS and [n for n in results if n.startswith("tensorboard/")]
        assert all(there[name] == (new / name).read_bytes() for name in results)
    else:
        assert not results  # they are in the run's folder


def test_old_checkpoints_go_and_the_best_stays(place, tmp_path):
    flags = (*FLAGS, "--max-steps", 9, "--keep", 2, "--eval-every", 3, "--lr", 3)
    for where in ((), ("--checkpoint-dir", place)):
        finished = here(*flags, *where, "--output-dir", tmp_path / f"run {len(where)}")
        assert finished.status == 0, finished.err
    names = [f"step-{update:08d}.pt" for update in saved_at(place)]
    assert names == checkpoints(tmp_path / "run 0") and len(names) == 3


def test_a_checkpoint_at_the_place_begins_a_new_run_when_it_is_named(place, tmp_path):
    here(*FLAGS, "--max-steps", 6, "--checkpoint-dir", place, "--output-dir", tmp_path / "run")
    before = files_at(place)
    named = f"{place}/step-00000004.pt"
    finished = here("--resume", named, "--max-steps", 7, "--output-dir", tmp_path / "new")
    assert finished.status == 0, finished.err
    assert f"going on from {named}" in finished.out
    assert steps(tmp_path / "new") == list(range(1, 8))
    assert losses(tmp_path / "new")[:6] == losses(tmp_path / "run")
    assert checkpoints(tmp_path / "new") == ["step-00000006.pt", "step-00000007.pt"]
    assert files_at(place) == before


@pytest.mark.parametrize("harm", ["a byte flipped", "half of it"])
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(place, tmp_path, harm):
    here(*FLAGS, "--max-steps", 6, "--checkpoint-dir", place, "--output-dir", tmp_path / "run")
    fs, root = fsspec.core.url_to_fs(place)
    content = bytearray(fs.cat_file(f"{root}/step-00000006.pt"))
    content[len(content) // 2] ^= 255
    content = content if harm == "a byte flipped" else content[: len(content) // 2]
    fs.pipe_file(f"{root}/step-00000006.pt", bytes(content))
    finished = here("--resume", place, "--max-steps", 8, "--output-dir", tmp_path / "new")
    assert finished.status == 0, finished.err
    assert "step-00000006.pt is damaged" in finished.out
    assert f"going on from {place}/step-00000004.pt" in finished.out
    assert steps(tmp_path / "new") == list(range(1, 9))


def test_a_run_remembers_where_its_checkpoints_are(memory, tmp_path):
    run, flags = tmp_path / "run", (*FLAGS, "--max-steps", 4)
    assert here(*flags, "--checkpoint-dir", memory, "--output-dir", run).status == 0
    finished = here("--resume", run, "--max-steps", 6)
    assert finished.status == 0, finished.err
    assert saved_at(memory) == [2, 4, 6] and steps(run) == list(range(1, 7))


def test_a_run_can_move_its_checkpoints_to_another_place(memory, tmp_path):
    run, flags = tmp_path / "run", (*FLAGS, "--max-steps", 4)
    assert here(*flags, "--output-dir", run).status == 0
    for updates in (6, 8):  # the second time, the run knows the place
        where = ("--checkpoint-dir", memory) if updates == 6 else ()
        finished = here("--resume", run, "--max-steps", updates, *where)
        assert finished.status == 0, finished.err
    assert saved_at(memory) == [6, 8]
    assert checkpoints(run) == ["step-00000002.pt", "step-00000004.pt"]


def test_a_folder_named_relatively_is_found_from_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = (*FLAGS, "--checkpoint-dir", "saved", "--max-steps", 2, "--output-dir", "run")
    assert here(*flags).status == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    finished = here("--resume", tmp_path / "run", "--max-steps", 4)
    assert finished.status == 0, finished.err
    assert saved_at(tmp_path / "saved") == [2, 4]


# -- A place that belongs to another run ---------------------------------------------------


@pytest.mark.parametrize("how", ["new", "resumed"])
def test_a_place_that_holds_checkpoints_of_another_run_is_refused(place, tmp_path, how):
    here(*FLAGS, "--max-steps", 4, "--checkpoint-dir", place, "--output-dir", tmp_path / "first")
    here(*FLAGS, "--max-steps", 2, "--output-dir", tmp_path / "second")
    before, own = files_at(place), fingerprint(tmp_path)
    flags = ("--output-dir", tmp_path / "third") if how == "new" else ()
    flags += () if how == "new" else ("--resume", tmp_path / "second")
    line = one_error(here("--max-steps", 4, *flags, "--checkpoint-dir", place))
    assert f"--checkpoint-dir {place} holds checkpoints of another run" in line
    assert files_at(place) == before and fingerprint(tmp_path) == own


def test_overwrite_replaces_the_checkpoints_of_another_run(place, tmp_path):
    here(*FLAGS, "--max-steps", 6, "--checkpoint-dir", place, "--output-dir", tmp_path / "first")
    flags = (*FLAGS, "--max-steps", 3, "--checkpoint-dir", place, "--output-dir", tmp_path / "new")
    finished = here(*flags, "--overwrite")
    assert finished.status == 0, finished.err
    assert saved_at(place) == [2, 3]


def test_overwrite_takes_a_link_away_and_not_what_it_leads_to(tmp_path):
    run, disk = tmp_path / "run", tmp_path / "large disk"
    here(*FLAGS, "--max-steps", 2, "--output-dir", run)
    (run / "checkpoints").rename(disk)
    (run / "checkpoints").symlink_to(disk)
    finished = here(*FLAGS, "--max-steps", 3, "--output-dir", run, "--overwrite")
    assert finished.status == 0, finished.err
    assert [path.name for path in disk.iterdir()] == ["step-00000002.pt"]
    assert not (run / "checkpoints").is_symlink() and (run / "tiny_transformer.pt").exists()


def test_a_place_that_is_called_by_a_link_is_the_same_place(tmp_path):
    run, link = tmp_path / "run", tmp_path / "link"
    here(*FLAGS, "--max-steps", 2, "--output-dir", run, "--checkpoint-dir", tmp_path / "saved")
    link.symlink_to(tmp_path / "saved")
    finished = here("--resume", run, "--checkpoint-dir", link, "--max-steps", 4)
    assert finished.status == 0, finished.err


def test_a_place_in_the_home_folder_is_found_again(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for updates in (2, 4):
        flags = ("--max-steps", updates, "--checkpoint-dir", "~/saved", "--output-dir", "run")
        finished = here(*FLAGS, *flags, "--resume", "auto")
        assert finished.status == 0, finished.err
    assert (tmp_path / "saved" / "step-00000004.pt").exists() and "going on" in finished.out


# -- A store that is away ------------------------------------------------------------------


@pytest.fixture
def store(memory, monkeypatch):
    """The memory file system as a store that goes away: `store.fail(method, times)`."""

    class Store:
        url = memory

        def fail(self, method: str, times: float) -> None:
            works, left = getattr(MemoryFileSystem, method), times

            def fails(fs, *arguments, **options):
                nonlocal left
                left -= 1
                if left >= 0:
                    raise ConnectionError("the network is down")
                return works(fs, *arguments, **options)

            monkeypatch.setattr(MemoryFileSystem, method, fails)

    monkeypatch.setattr("time.sleep", lambda _: None)
    return Store()


def test_an_upload_that_fails_now_and_then_is_tried_again_without_a_word(tmp_path, store):
    store.fail("pipe_file", 3)
    flags = (*FLAGS, "--max-steps", 4, "--checkpoint-dir", store.url)
    finished = here(*flags, "--output-dir", tmp_path / "run")
    assert (finished.status, finished.err) == (0, "")
    assert saved_at(store.url) == [2, 4]


def test_a_store_that_is_away_for_longer_is_a_warning_and_tried_at_the_next_save(tmp_path, store):
    store.fail("pipe_file", 4)
    flags = (*FLAGS, "--max-steps", 6, "--checkpoint-dir", store.url)
    finished = here(*flags, "--output-dir", tmp_path / "run")
    assert finished.status == 0
    (line,) = finished.err.splitlines()
    assert line.startswith(f"warning: cannot write a checkpoint to {store.url}: ")
    assert "the network is down" in line
    assert saved_at(store.url) == [4, 6] and "tiny_transformer.pt" in files_at(store.url)


def test_a_store_that_stays_away_leaves_the_results_in_the_runs_folder(tmp_path, store):
    run = tmp_path / "run"
    store.fail("pipe_file", float("inf"))
    store.fail("put_file", float("inf"))
    flags = (*FLAGS, "--max-steps", 4, "--checkpoint-dir", store.url, "--output-dir", run)
    finished = here(*flags)
    assert finished.status == 1
    *warnings, line = finished.err.splitlines()
    assert len(warnings) == 2 and all(w.startswith("warning: ") for w in warnings)
    assert line.startswith(f"error: the results are in {run}, cannot write them to {store.url}: ")
    assert line.endswith("the network is down")
    assert {path.name for path in run.iterdir()} == RESULTS
    assert digest_line(finished)


def test_a_picture_that_cannot_be_drawn_does_not_keep_the_weights_from_the_store(
    tmp_path, store, monkeypatch
):
    def full(*_) -> None:
        raise ddp.WriteError("cannot write loss_curve.png: no space left on device")

    monkeypatch.setattr(ddp, "draw_loss_curve", full)
    flags = (*FLAGS, "--max-steps", 2, "--checkpoint-dir", store.url)
    finished = here(*flags, "--output-dir", tmp_path / "run")
    assert (finished.status, finished.err.count("no space left")) == (1, 1)
    assert "tiny_transformer.pt" in files_at(store.url)


def test_a_store_that_is_away_at_the_start_is_one_line_and_leaves_the_folder_free(tmp_path, store):
    run = tmp_path / "run"
    flags = ("--max-steps", 2, "--checkpoint-dir", store.url, "--output-dir", run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryFileSystem, "ls", away)
        line = one_error(here(*flags))
        assert f"--checkpoint-dir {store.url}: the network is down" in line
        assert not run.exists()
        assert "the network is down" in one_error(here("--resume", store.url))
    assert here(*flags).status == 0


def away(*_, **__):
    raise ConnectionError("the network is down")


def test_an_upload_that_breaks_off_is_never_taken_for_a_checkpoint(tmp_path, store, monkeypatch):
    pipe_file = MemoryFileSystem.pipe_file

    def breaks_off(fs, path, content, **options):
        half = content[: len(content) // 2] if "step-00000004" in path else content
        pipe_file(fs, path, half, **options)
        if half is not content:
            raise ConnectionError("the network is down")

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", breaks_off)
    flags = (*FLAGS, "--checkpoint-dir", store.url, "--output-dir", tmp_path / "run")
    assert here(*flags, "--max-steps", 4).status == 0
    assert "step-00000004.pt" not in files_at(store.url)
    monkeypatch.undo()
    finished = here("--resume", tmp_path / "run", "--max-steps", 6)
    assert finished.status == 0, finished.err
    assert f"going on from {store.url}/step-00000002.pt" in finished.out
    assert not [name for name in files_at(store.url) if name.endswith(".partial")]


# -- What cannot be used -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "part"), [("nonsense://x/y", "nonsense"), ("gs://bucket/run", "gcs")]
)
@pytest.mark.parametrize("flag", ["--checkpoint-dir", "--resume"])
def test_a_url_that_cannot_be_used_is_one_line(tmp_path, monkeypatch, flag, url, part):
    monkeypatch.chdir(tmp_path)
    assert part in one_error(here("--max-steps", 2, flag, url))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["file.txt", "file.txt/inside", "/proc/inside"])
def test_a_place_that_cannot_be_written_is_said_before_the_training(tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    Path("file.txt").write_text("no folder", encoding="utf-8")
    before = fingerprint(tmp_path)
    line = one_error(here("--max-steps", 2, "--checkpoint-dir", place))
    assert "--checkpoint-dir" in line and place in line
    assert fingerprint(tmp_path) == before


@pytest.mark.parametrize("there", ["bucket/nothing", "nobucket/run"])
def test_a_resume_of_nothing_is_one_line(s3, tmp_path, monkeypatch, there):
    monkeypatch.chdir(tmp_path)
    assert there in one_error(here("--resume", f"s3://{there}"))
    assert not list(tmp_path.iterdir())


def test_a_failed_resume_leaves_its_folder_free(memory, tmp_path):
    new = ("--output-dir", tmp_path / "new")
    here(*FLAGS, "--max-steps", 4, "--checkpoint-dir", memory, "--output-dir", tmp_path / "run")
    before = files_at(memory)
    one_error(here("--resume", memory, "--max-steps", 6, "--batch-size", 3, *new))
    assert files_at(memory) == before and not (tmp_path / "new").exists()
    finished = here("--resume", memory, "--max-steps", 6, *new)
    assert finished.status == 0, finished.err
