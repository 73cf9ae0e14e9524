"""What is chosen on machines with GPUs: device, precision, backend. PyTorch's answers are made up.

How ranks end there is in `test_gpu_endings.py`, what a step does in `test_gpu_step.py`, and what
only a GPU can show in `tests/gpu`.
"""

from __future__ import annotations

import os
import types

import pytest
import quick
import torch
from conftest import settings_of

import llm_ddp_parallel_training as ddp


@pytest.fixture
def pretend(monkeypatch):
    """Makes PyTorch answer as with so many GPUs of a compute capability; returns those opened."""
    opened = []

    def set_up(count=1, capability=(8, 0), hip=None, trouble=None):
        def set_device(device):
            if trouble:
                raise trouble
            opened.append(torch.device(device))

        card = types.SimpleNamespace(major=capability[0], minor=capability[1], uuid="GPU-0")
        answers = {
            "device_count": lambda: count, "is_available": lambda: count > 0,
            "set_device": set_device, "current_device": lambda: 0,
            "get_device_properties": lambda device=None: card,
            "get_device_capability": lambda device=None: capability,
        }  # fmt: skip
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        monkeypatch.setattr(torch.version, "hip", hip)
        return opened

    return set_up


def reason(launch, what):
    """(chosen, reason) of an automatic choice."""
    return next((chosen, why) for name, chosen, why in launch.choices if name == what)


# ------------------------------------------------------------------------------------------
# Device
# ------------------------------------------------------------------------------------------


def test_every_rank_of_a_machine_opens_its_own_gpu(pretend):
    opened = pretend(count=4)
    for local_rank in range(3):
        launch = ddp.Launch(local_rank, local_rank, 3, 3)
        ddp.choose_device(launch, "auto")
        assert launch.device == torch.device("cuda", local_rank)
    assert opened == [torch.device("cuda", i) for i in range(3)]


TROUBLES = [  # as torch.cuda raises them
    RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nPlease"),
    torch.AcceleratorError("CUDA error: invalid device ordinal\nCUDA kernel errors might"),
    torch.cuda.DeferredCudaCallError("CUDA call failed lazily at initialization with error: no"),
    AssertionError("libcudart functions unavailable."),
]


@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda trouble: type(trouble).__name__)
def test_a_gpu_that_is_counted_but_cannot_be_opened_is_one_line_or_the_cpu(pretend, trouble):
    """An old driver, or MIG: NVML counts the cards without opening them."""
    pretend(count=2, trouble=trouble)
    launch = ddp.Launch()
    ddp.choose_device(launch, "auto")
    _, why = reason(launch, "device")
    assert launch.device.type == "cpu" and str(trouble).splitlines()[0] in why
    with pytest.raises(ddp.UserError) as error:
        ddp.choose_device(ddp.Launch(), "cuda")
    message = str(error.value)
    assert "--device cuda" in message and "--device cpu" in message and "\n" not in message
    assert str(trouble).splitlines()[0] in message


def test_a_cpu_run_never_wakes_a_gpu_up(tmp_path):
    """An optimizer's step asks for the GPU's stream, which would open a context on it: 500 MB."""
    flags = ("--max-steps", 2, "--save-every", 1, "--output-dir", tmp_path / "run")
    (run,) = quick.job(1, *flags, module="pretend", PRETEND="no gpu asked")
    assert run.status == 0, run.out + run.err
    assert "no gpu was seen" in run.out.lower() and "asked for GPUs" not in run.out


def test_gpus_stay_visible_for_a_cpu_run_after_one_on_a_gpu(pretend, monkeypatch):
    """As in a notebook: hiding them would come too late, and would only confuse what follows."""
    pretend()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    ddp.choose_device(ddp.Launch(), "cpu")
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


# ------------------------------------------------------------------------------------------
# Precision
# ------------------------------------------------------------------------------------------

T4, A100 = {"bf16": False}, {"bf16": True}


@pytest.mark.parametrize("own_rank", [0, 1])
def test_ranks_with_different_cards_agree_on_one_precision(pretend, monkeypatch, own_rank):
    """Else DDP would average the gradients of fp16, which are scaled, with those of bf16."""
    pretend(capability=[(8, 0), (7, 5)][own_rank])
    monkeypatch.setattr(ddp, "join_group", lambda launch: [A100, T4])
    launch, settings = ddp.Launch(own_rank, 0, 2, 1), settings_of()
    ddp.set_up(launch, settings)
    assert settings.precision == "fp16"
    assert reason(launch, "precision") == ("fp16", "no bf16 in hardware on rank 1")


@pytest.mark.parametrize(
    ("capability", "hip", "bf16"),
    [((7, 5), None, False), ((8, 6), None, True), ((9, 0), None, True), ((9, 4), "6.4", True)],
)
def test_a_rank_tells_the_others_whether_its_card_has_bf16(pretend, capability, hip, bf16):
    """In hardware: PyTorch emulates it on a T4. On ROCm the capability is another number."""
    pretend(capability=capability, hip=hip)
    launch, settings = ddp.Launch(), settings_of()
    ddp.set_up(launch, settings)
    assert ddp.about_rank(launch)["bf16"] is bf16
    assert settings.precision == ("bf16" if bf16 else "fp16")
    assert "capability" not in reason(launch, "precision")[1]


# ------------------------------------------------------------------------------------------
# Backend
# ------------------------------------------------------------------------------------------


def about(host="a", gpu="GPU-0", device="cuda"):
    return {"host": host, "gpu": gpu if device == "cuda" else "", "device": device, "bf16": True}


@pytest.mark.parametrize(
    ("ranks", "backend"),
    [
        ([about(gpu="GPU-0"), about(gpu="GPU-1")], "nccl"),
        ([about("a", "GPU-0"), about("b", "GPU-1")], "nccl"),
        ([about("a", "0"), about("b", "0")], "nccl"),  # no uuid: the index, on two hosts
        ([about(), about()], "gloo"),
        ([about(gpu="GPU-0"), about(gpu="GPU-1"), about(gpu="GPU-1")], "gloo"),
        ([about(device="cpu"), about(device="cpu")], "gloo"),
    ],
)
def test_nccl_is_taken_if_and_only_if_every_rank_has_a_gpu_of_its_own(ranks, backend):
    assert ddp.choose_backend(ranks)[0] == backend


def test_one_gpu_a_task_is_not_taken_for_a_shared_gpu(pretend, monkeypatch):
    """srun --gpus-per-task=1 without LOCAL_WORLD_SIZE: every rank sees its card as number 0."""
    abouts = []
    for rank in range(2):
        pretend(count=1)
        own = types.SimpleNamespace(major=8, minor=0, uuid=f"GPU-{rank}")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, own=own: own)
        for name, value in {
            "RANK": rank,
            "WORLD_SIZE": 2,
            "MASTER_ADDR": "a",
            "MASTER_PORT": 1,
        }.items():
            monkeypatch.setenv(name, str(value))
        launch = ddp.read_launcher()
        ddp.choose_device(launch, "auto")
        assert launch.device == torch.device("cuda", 0)
        abouts.append(ddp.about_rank(launch))
    assert ddp.choose_backend(abouts)[0] == "nccl"


def test_ranks_that_share_a_gpu_find_out_through_the_store_and_form_a_gloo_group(tmp_path):
    flags = ("--max-steps", 1, "--output-dir", tmp_path / "run")
    first, other = quick.job(2, *flags, module="pretend", PRETEND="shared gpu")
    assert first.status == other.status == 0, first.err + other.err
    assert "gloo (several ranks share a GPU" in first.out


def test_a_rank_without_a_gpu_among_ranks_with_one_is_an_error_on_all_and_no_hang(tmp_path):
    flags = ("--max-steps", 1, "--output-dir", tmp_path / "run")
    first, other = quick.job(2, *flags, module="pretend", PRETEND="one gpu")
    assert first.status == other.status == 2
    (line,) = first.error_lines()
    assert "cpu (rank 0)" in line and "cuda (rank 1)" in line
    assert not (tmp_path / "run").exists()
