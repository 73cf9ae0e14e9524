"""The machine: its card, how fast that is, and a base model to train over."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator
from importlib.metadata import version

from gpu.bench import Bench
from gpu.table import Row

# PyTorch's name of a card, and its name in labs.planner, whose peaks are those of the
# vendors' data sheets for dense 16-bit matrix products. Variants with another peak (NVL, GB200, the
# PCIe H100, Ti, D) are not listed: for them, only the measured product counts.
CARDS = {
    "NVIDIA H200": "h200-141gb",
    "NVIDIA H100 80GB HBM3": "h100-80gb",
    "NVIDIA B200": "b200-180gb",
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA A100 80GB PCIe": "a100-80gb",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100-PCIE-40GB": "a100-40gb",
    "Tesla V100-SXM2-32GB": "v100-32gb",
    "Tesla T4": "t4-16gb",
    "NVIDIA L4": "l4-24gb",
    "NVIDIA GeForce RTX 3090": "rtx-3090-24gb",
    "NVIDIA GeForce RTX 4090": "rtx-4090-24gb",
}


def machine(bench: Bench) -> Iterator[Row]:
    """What all this runs on. Writes facts.json for the other checks."""
    import torch

    from labs import planner

    facts = {"half": "bf16", "card": None, "peak": None, "cards": torch.cuda.device_count()}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    size, dtype = (8192, torch.bfloat16) if bench.cuda else (1024, torch.float32)
    if bench.cuda:
        if not torch.cuda.is_available():
            raise SystemExit("PyTorch sees no CUDA device here; --device cpu is the rehearsal")
        card = torch.cuda.get_device_properties(0)
        if card.name in CARDS:
            facts["card"] = CARDS[card.name]
            facts["peak"] = planner.GPUS[facts["card"]].peak
        if card.major < 8 and not torch.version.hip:  # as the script chooses
            facts["half"], dtype = "fp16", torch.float16
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        yield Row(
            "GPU", f"{facts['cards']} x {card.name}, {card.total_memory / 1e9:.0f} GB, capability "
            f"{card.major}.{card.minor}, CUDA {torch.version.cuda}, NCCL {nccl}"
        )  # fmt: skip
    packages = ("torch", "transformers", "peft", "accelerate", "numpy")
    yield Row("versions", ", ".join(f"{name} {version(name)}" for name in packages))
    yield Row("host", f"Python {platform.python_version()}, {cores} cores, {platform.machine()}")
    a, b = (torch.randn(size, size, device=bench.device, dtype=dtype) for _ in range(2))
    rounds, repeats = [], 20 if bench.cuda else 2
    for _ in range(4):
        synchronize(bench)
        begin = time.perf_counter()
        for _ in range(repeats):
            a @ b
        synchronize(bench)
        rounds.append((time.perf_counter() - begin) / repeats)
    facts["matmul"] = 2 * size**3 / sorted(rounds[1:])[1]  # the first one warms up
    name = str(dtype).removeprefix("torch.")
    sheet = f", data sheet {facts['peak'] / 1e12:.0f}" if facts["peak"] else ""
    yield Row(f"product of {size} x {size}, {name}", f"{facts['matmul'] / 1e12:.1f} TFLOP/s{sheet}")
    (bench.work.parent / "facts.json").write_text(json.dumps(facts), encoding="utf-8")


def synchronize(bench: Bench) -> None:
    """Waits for the GPU: its work is only queued when a call returns."""
    import torch

    if bench.cuda:
        torch.cuda.synchronize()


def random_base(bench: Bench) -> Iterator[Row]:
    """Writes the folder for --base-model: Qwen2.5-0.5B's architecture with random weights."""
    import torch
    from qwen_assets import full_config, make_tokenizer
    from transformers import AutoModelForCausalLM
    from transformers import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    torch.manual_seed(0)
    config = full_config(bench.layers)
    if not bench.cuda:  # the embedding alone would take most of the rehearsal
        config.vocab_size = 2048
    with torch.device(bench.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():  # else all tokens are about as likely, and no mistake would show
        model.get_input_embeddings().weight.mul_(5)
    model.save_pretrained(bench.base)
    make_tokenizer().save_pretrained(bench.base)
    count = sum(p.numel() for p in model.parameters())
    yield Row("base model", f"random weights, {bench.layers} layers, {count / 1e6:.0f} million")
