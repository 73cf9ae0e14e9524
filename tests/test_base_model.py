"""The base model: from a folder or the hub, what is refused, and that a run keeps to one."""

from __future__ import annotations

import json
import shutil
import socket

import pytest
import torch
from conftest import losses
from quick import job
from qwen_tests import here, run_here, settings_of

import llm_ddp_parallel_training as ddp
from llm_ddp_parallel_training import UserError

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Looking up a host fails the test."""

    def refuse(host, *args, **kwargs):
        raise AssertionError(f"network used: {host}")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def change_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")


def truncate_weights(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def remove(folder, pattern):
    files = list(folder.glob(pattern))
    assert files
    for file in files:
        file.unlink()


def masked_model(folder):
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=416, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, initializer_range=0.3,
    )  # fmt: skip
    remove(folder, "model.safetensors")
    BertForMaskedLM(config).save_pretrained(folder)


def model_with_scaled_logits(folder):
    from transformers import GraniteConfig, GraniteForCausalLM

    torch.manual_seed(0)
    config = GraniteConfig(
        vocab_size=416, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=32, logits_scaling=8.0, initializer_range=0.3,
    )  # fmt: skip
    remove(folder, "model.safetensors")
    GraniteForCausalLM(config).save_pretrained(folder)


def more_tokens_than_rows(folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<more {i}>" for i in range(451 - len(tokenizer))])
    tokenizer.save_pretrained(folder)


WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
TOO_MANY_LAYERS = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda f: remove(f, "config.json"), "the folder has no config.json"),
        (lambda f: remove(f, "*token*"), "the folder has no tokenizer"),
        (lambda f: remove(f, "model.safetensors"), ""),
        (truncate_weights, ""),
        (lambda f: change_config(f, model_type="t5"), ""),
        (lambda f: change_config(f, model_type="no-such-model"), "no-such-model"),
        (lambda f: change_config(f, **TOO_MANY_LAYERS), "the files lack the weights model"),
        (masked_model, "is not a causal model"),
        (model_with_scaled_logits, "its logits are not the plain output of its head"),
        (more_tokens_than_rows, "its tokenizer has token 450, its embedding 401 rows"),
        (lambda f: change_config(f, **WINDOW), "a token sees the last 8"),
    ],
    ids=[
        "no config", "no tokenizer", "no weights", "cut weights", "T5", "unknown type",
        "missing layer", "masked", "scaled logits", "more tokens", "sliding window",
    ],
)  # fmt: skip
def test_a_folder_that_is_no_causal_model_is_one_line_and_exit_2(
    small_qwen, tmp_path, spoil, expected
):
    folder = tmp_path / "base"
    shutil.copytree(small_qwen, folder)
    spoil(folder)
    ended = run_here("--base-model", folder, "--output-dir", tmp_path / "run")
    assert ended.status == 2
    assert ended.err.startswith(f"error: --base-model {folder}: ") and expected in ended.err
    assert ended.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("no/such/folder", "no such folder"),
        ("./nowhere", "no such folder"),
        ("Qwen/Qwen2.5-0.5B-Instruct", ""),  # a hub id, not in the cache, and the hub is off
    ],
)
def test_a_base_model_that_is_not_there_says_how_to_use_a_folder(
    tmp_path, monkeypatch, name, expected
):
    monkeypatch.chdir(tmp_path)
    ended = run_here("--base-model", name)
    assert ended.status == 2
    assert ended.err.startswith(f"error: --base-model {name}: {expected}")
    assert ended.err.endswith(
        "; a folder that save_pretrained wrote needs no network: --base-model FOLDER\n"
    )
    assert ended.err.count("\n") == 1 and not any(tmp_path.iterdir())


def test_without_a_network_nobody_waits_for_the_hubs_retries(tmp_path, monkeypatch):
    lookups = []

    def unknown(host, *args, **kwargs):
        lookups.append(host)
        raise socket.gaierror(-2, "Name or service not known")

    def no_pause(seconds):
        raise AssertionError(f"waited {seconds} s to try again")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr("time.sleep", no_pause)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.chdir(tmp_path)
    ended = run_here("--base-model", "no-one/no-model")
    assert (ended.status, lookups) == (2, ["huggingface.co"])
    assert ended.err.count("\n") == 1 and "needs no network: --base-model FOLDER" in ended.err


def test_behind_a_proxy_the_hubs_name_is_for_the_proxy_to_resolve(monkeypatch):
    asked = []

    def stop(name, **options):
        asked.append((name, options["local_files_only"]))
        raise OSError("stop here")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("urllib.request.getproxies", lambda: {"https": "http://proxy:3128"})
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", stop)
    with pytest.raises(UserError, match="stop here"):  # and `no_network` would fail the test
        ddp.load_base(settings_of("--base-model", "no-one/no-model"))
    assert asked == [("no-one/no-model", False)]


@pytest.mark.parametrize(("rank", "order"), [(0, ["load", "meet"]), (1, ["meet", "load"])])
def test_rank_0_loads_first_so_that_a_download_happens_once(monkeypatch, rank, order):
    events = []

    def load(settings):
        events.append("load")
        return None, None

    def then(*_, **__):
        raise UserError("stop here")

    monkeypatch.setattr(ddp.dist, "barrier", lambda: events.append("meet"))
    monkeypatch.setattr(ddp, "load_base", load)
    monkeypatch.setattr(ddp, "build_data", then)
    with pytest.raises(UserError, match="stop here"):
        ddp.build_qwen(ddp.Launch(rank=rank, world_size=2), settings_of())
    assert events == order


def test_a_wrong_base_model_on_two_ranks_is_one_line_of_the_first(tmp_path):
    (tmp_path / "empty").mkdir()
    flags = ("--model", "qwen", "--base-model", tmp_path / "empty")
    endings = job(2, *flags, "--output-dir", tmp_path / "run")
    assert endings[0].status == 2 and endings[1].status > 0  # it waited for rank 0 to load
    assert len(endings[0].error_lines()) == 1 and "no config.json" in endings[0].err
    assert "Traceback" not in endings[0].err + endings[1].err
    assert not (tmp_path / "run").exists()


# One base for all of a run


@pytest.fixture(scope="module")
def run_with_checkpoints(small_qwen, tmp_path_factory):
    """Two updates of a run of four that was stopped, and a finished run of the same base."""
    root = tmp_path_factory.mktemp("runs")
    flags = ("--max-steps", 2, "--save-every", 1, "--log-every", 1)
    here(root / "run", "--base-model", small_qwen, *flags)
    return root / "run"


@pytest.fixture
def own_run(run_with_checkpoints, tmp_path):
    """A copy of it that a test may go on with."""
    shutil.copytree(run_with_checkpoints, tmp_path / "run")
    return tmp_path / "run"


def other_base(small_qwen, folder):
    """The same shapes, and one weight that is another one."""
    shutil.copytree(small_qwen, folder)
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    name = sorted(tensors)[-1]
    tensors[name].flatten()[0] += 1e-3
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_run_does_not_go_on_over_another_base(small_qwen, own_run, tmp_path):
    other = other_base(small_qwen, tmp_path / "other")
    for more in (("--max-steps", 3), ("--generate", "x")):
        before = (own_run / "run.json").read_bytes()
        ended = run_here("--resume", own_run, "--base-model", other, *more)
        assert ended.status == 2 and ended.err.count("\n") == 1, ended.err
        assert ended.err.startswith(f"error: --base-model {other} has other weights")
        assert (own_run / "run.json").read_bytes() == before


def test_a_base_that_changed_in_its_place_is_noticed(small_qwen, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(small_qwen, base)
    flags = ("--base-model", base, "--max-steps", 1, "--save-every", 1)
    here(tmp_path / "run", *flags)
    shutil.rmtree(base)
    other_base(small_qwen, base)
    for more in (("--max-steps", 3), ("--generate", "x")):
        ended = run_here("--resume", tmp_path / "run", *more)
        assert ended.status == 2 and f"{base} has other weights" in ended.err


def test_a_base_that_was_moved_can_be_named_anew(small_qwen, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(small_qwen, "base")
    flags = ("--max-steps", 2, "--save-every", 1, "--log-every", 1)
    here(tmp_path / "run", "--base-model", "base", *flags)
    about = json.loads((tmp_path / "run/run.json").read_text("utf-8"))
    assert about["settings"]["base_model"] == str((tmp_path / "base").resolve())
    config = json.loads((tmp_path / "run/adapter/adapter_config.json").read_text("utf-8"))
    assert config["base_model_name_or_path"] == str((tmp_path / "base").resolve())
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "base").rename(tmp_path / "elsewhere/moved")

    for more in (("--max-steps", 3), ("--generate", "x")):
        ended = run_here("--resume", tmp_path / "run", *more)
        assert ended.status == 2 and "no such folder" in ended.err  # and not looked up in the hub
        assert ended.err.endswith("--base-model FOLDER\n") and ended.err.count("\n") == 1

    named = ("--base-model", tmp_path / "elsewhere/moved")
    assert run_here("--resume", tmp_path / "run", "--generate", "x", *named).status == 0
    ended = run_here("--resume", tmp_path / "run", "--max-steps", 3, *named)
    assert ended.status == 0, ended.err
    assert len(losses(tmp_path / "run")) == 3
    about = json.loads((tmp_path / "run/run.json").read_text("utf-8"))
    assert about["settings"]["base_model"] == str((tmp_path / "elsewhere/moved").resolve())
    # The next one finds it by itself.
    assert run_here("--resume", tmp_path / "run", "--generate", "x").status == 0
