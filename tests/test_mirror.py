"""--mirror and --resume URL: a copy on any file system of fsspec, complete or not used."""

from __future__ import annotations

import json
import shutil

import fsspec
import pytest
from conftest import digest_line, losses
from moto.server import ThreadedMotoServer
from quick import checkpoints, hashes, here, job, steps

FLAGS = ("--dropout", 0.1, "--save-every", 2, "--log-every", 1)


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


@pytest.fixture(params=["file", "s3"])
def url(request, tmp_path):
    """Where a run is mirrored: a new place on each file system."""
    if request.param == "file":
        return f"file://{tmp_path}/far away [1]/run"
    return f"{request.getfixturevalue('s3')}/{tmp_path.name}/run"


def files_at(url: str) -> list[str]:
    """The files of a mirror, relative to it."""
    fs, root = fsspec.core.url_to_fs(url)
    fs.invalidate_cache()
    return sorted(path[len(root) :].lstrip("/") for path in fs.find(root))


def saved_at(url: str) -> list[str]:
    return sorted({name.split("/")[1] for name in files_at(url) if name.startswith("checkpoints/")})


def one_error(finished) -> str:
    assert finished.status == 2, finished
    (line,) = finished.err.splitlines()
    assert line.startswith("error: ")
    return line


def test_a_lost_machine_goes_on_from_the_mirror_as_if_nothing_had_happened(
    url, tmp_path, monkeypatch
):
    whole = here(*FLAGS, "--max-steps", 12, "--output-dir", tmp_path / "whole")
    kill = {"kind": "SIGKILL", "update": 8, "value": str(tmp_path / "lost/checkpoints")}
    if url.startswith("file"):
        kill["value"] = f"{url[7:]}/checkpoints/step-00000004"
    flags = (*FLAGS, "--max-steps", 12, "--mirror", url, "--output-dir", tmp_path / "lost")
    if url.startswith("file"):
        job(1, *flags, faults=[kill])
    else:  # the S3 settings are in this process
        here(*flags[:-4], "--max-steps", 7, *flags[-4:])
    shutil.rmtree(tmp_path / "lost")
    resumed = here("--resume", url, "--max-steps", 12, "--output-dir", tmp_path / "new")
    assert resumed.status == 0, resumed.err
    assert digest_line(resumed) == digest_line(whole)
    assert losses(tmp_path / "new") == losses(tmp_path / "whole")
    assert {"run.json", "metrics.jsonl", "loss_curve.png", "tiny_transformer.pt"} <= set(
        files_at(url)
    )
    assert saved_at(url)[-1] == "step-00000012"


def test_the_mirror_keeps_as_many_checkpoints_as_the_run(url, tmp_path):
    run = tmp_path / "run"
    flags = (*FLAGS, "--max-steps", 9, "--keep", 2, "--eval-every", 3)
    finished = here(*flags, "--mirror", url, "--output-dir", run)
    assert finished.status == 0, finished.err
    assert saved_at(url) == checkpoints(run)
    if url.startswith("file"):  # nor do empty folders stay behind
        fs, root = fsspec.core.url_to_fs(url)
        assert sorted(p.split("/")[-1] for p in fs.ls(f"{root}/checkpoints", detail=False)) == (
            checkpoints(run)
        )


def test_a_checkpoint_of_the_mirror_can_be_named(url, tmp_path):
    run = tmp_path / "run"
    here(*FLAGS, "--max-steps", 6, "--mirror", url, "--output-dir", run)
    named = f"{url}/checkpoints/step-00000004"
    finished = here("--resume", named, "--output-dir", tmp_path / "new", "--mirror", f"{url}2")
    assert finished.status == 0, finished.err
    assert "step-00000004" in finished.out
    assert steps(tmp_path / "new") == list(range(1, 7))
    assert losses(tmp_path / "new") == losses(run)


@pytest.mark.parametrize("harm", ["damaged", "missing", "manifest damaged"])
def test_a_bad_newest_copy_is_named_and_the_one_before_is_used(url, tmp_path, harm):
    run = tmp_path / "run"
    here(*FLAGS, "--max-steps", 6, "--mirror", url, "--output-dir", run)
    fs, root = fsspec.core.url_to_fs(url)
    newest = f"{root}/checkpoints/step-00000006"
    if harm == "damaged":
        content = bytearray(fs.cat_file(f"{newest}/state.pt"))
        content[1000] ^= 255
        fs.pipe_file(f"{newest}/state.pt", bytes(content))
    elif harm == "missing":
        fs.rm(f"{newest}/state.pt")
    else:
        fs.pipe_file(f"{newest}/manifest.json", b'{"format": 1')
    finished = here("--resume", url, "--max-steps", 8, "--output-dir", tmp_path / "new")
    assert finished.status == 0, finished.err
    assert "step-00000006" in finished.out.split("continuing from")[0]
    assert "step-00000004" in finished.out
    assert steps(tmp_path / "new") == list(range(1, 9))


@pytest.fixture
def uploads(monkeypatch):
    """Notes every file that is sent to a plain folder; `fail` of the next ones go wrong."""
    from fsspec.implementations.local import LocalFileSystem

    class Uploads(list):
        fail = 0

    sent, put_file = Uploads(), LocalFileSystem.put_file

    def counted(self, source, target, *arguments, **options):
        if sent.fail:
            sent.fail -= 1
            raise OSError("the network is down")
        sent.append(str(target))
        return put_file(self, source, target, *arguments, **options)

    monkeypatch.setattr(LocalFileSystem, "put_file", counted)
    monkeypatch.setattr("time.sleep", lambda _: None)
    return sent


def test_the_manifest_is_sent_last(tmp_path, uploads):
    url = f"file://{tmp_path}/far"
    here(*FLAGS, "--max-steps", 3, "--mirror", url, "--output-dir", tmp_path / "run")
    of_two = [i for i, name in enumerate(uploads) if "step-00000002/" in name]
    assert "/manifest.json" in uploads[of_two[-1]] and "/state.pt" in uploads[of_two[0]]
    assert "/manifest.json" not in "".join(uploads[: of_two[-1]])


def test_an_upload_that_fails_now_and_then_is_tried_again(tmp_path, uploads):
    uploads.fail, url = 3, f"file://{tmp_path}/far"
    flags = ("--max-steps", 4, "--mirror", url, "--output-dir", tmp_path / "run")
    finished = here(*FLAGS, *flags)
    assert finished.status == 0, finished.err
    assert saved_at(url) == ["step-00000002", "step-00000004"]


def test_an_upload_that_always_fails_is_an_error_and_costs_no_checkpoint(tmp_path, uploads):
    uploads.fail, run = 10**6, tmp_path / "run"
    finished = here(
        *FLAGS, "--max-steps", 300, "--mirror", f"file://{tmp_path}/far", "--output-dir", run
    )
    assert finished.status == 1
    (line,) = finished.err.splitlines()
    assert f"file://{tmp_path}/far" in line and "the network is down" in line
    assert checkpoints(run)
    uploads.fail = 0
    assert here("--resume", run, "--max-steps", steps(run)[-1] + 2).status == 0


@pytest.mark.parametrize(
    ("url", "part"),
    [("nonsense://x/y", "nonsense"), ("gs://bucket/run", "gcs"), ("plain/folder", "file:///")],
)
@pytest.mark.parametrize("flag", ["--mirror", "--resume"])
def test_a_url_that_cannot_be_used_is_one_line(tmp_path, monkeypatch, flag, url, part):
    if flag == "--resume" and "://" not in url:
        part = url  # a folder that is not there
    monkeypatch.chdir(tmp_path)
    line = one_error(here("--max-steps", 2, flag, url))
    assert part in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("there", ["bucket/nothing", "nobucket/run"])
def test_a_resume_of_nothing_at_the_mirror_is_one_line(s3, tmp_path, monkeypatch, there):
    monkeypatch.chdir(tmp_path)
    assert there in one_error(here("--resume", f"s3://{there}"))
    assert not list(tmp_path.iterdir())


def test_a_failed_resume_from_a_mirror_leaves_its_folder_free(tmp_path):
    url, run = f"file://{tmp_path}/far", tmp_path / "new"
    here(*FLAGS, "--max-steps", 4, "--mirror", url, "--output-dir", tmp_path / "run")
    far = tmp_path / "far/checkpoints"
    far.rename(tmp_path / "away")
    before = hashes(tmp_path / "far")
    one_error(here("--resume", url, "--max-steps", 6, "--output-dir", run))
    assert hashes(tmp_path / "far") == before
    (tmp_path / "away").rename(far)
    finished = here("--resume", url, "--max-steps", 6, "--output-dir", run)
    assert finished.status == 0, finished.err


def test_a_kill_between_the_files_of_a_copy_leaves_the_settings_readable(tmp_path, monkeypatch):
    """A process that dies halfway through a file must not leave half of the settings there."""
    from fsspec.implementations.local import LocalFileSystem

    url = f"file://{tmp_path}/far"
    here(*FLAGS, "--max-steps", 4, "--mirror", url, "--output-dir", tmp_path / "run")
    put_file = LocalFileSystem.put_file

    def halfway(self, source, target, *arguments, **options):
        put_file(self, source, target, *arguments, **options)
        content = open(target, "rb").read()
        with open(target, "wb") as file:
            file.write(content[: len(content) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalFileSystem, "put_file", halfway)
    here("--resume", tmp_path / "run", "--max-steps", 6)
    monkeypatch.undo()
    assert json.loads((tmp_path / "far/run.json").read_text("utf-8"))
    finished = here("--resume", url, "--max-steps", 6, "--output-dir", tmp_path / "new")
    assert finished.status == 0, finished.err
