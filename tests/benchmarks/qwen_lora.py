"""Qwen2.5-0.5B with LoRA: this script beside transformers.Trainer with PEFT.

    python tests/benchmarks/qwen_lora.py                  all cases (about 15 minutes, 16 GB)
    python tests/benchmarks/qwen_lora.py --only packed --products
                                                          one case, and how near it comes to its
                                                          own matrix products
    python tests/benchmarks/qwen_lora.py --device cuda --precision bf16 --rounds 20

Full architecture, random weights, LoRA r 8 on q_proj and v_proj with dropout 0.05. A step is
forward, backward, clipping to 1.0 and AdamW; on this side it is the script's `training_step` on
what its collator returns, collating included. Every side of a case lives in a process of its own;
they take turns step by step, in reversed order every other round, so that a drift of the machine
meets both alike. The table gives medians over the rounds after the first, and medians of the
ratios within a round. Speed counts real tokens, padding left out. Memory is the peak resident size
of the training above the resident size with the model loaded, in GB; on a GPU, what PyTorch has
allocated there takes the place of the resident size.

What the project asks for on the CPU: lines at least 1.25, packed at least 1.8 times the speed of
the Trainer on lines; full windows at least 1.2 times the speed with at most 0.7 of the memory; with
gradient checkpointing at most 0.3 of the memory, at least as fast.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

THREADS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
VOCAB = 151936
TRAINER, OURS, PRODUCTS = "Trainer", "script", "products"
CASES = {  # name: (data of this side, data of the Trainer, rows, tokens a row, flags)
    "lines": ("lines", "lines", 8, 64, ()),
    "packed": ("packed", "lines", 8, 64, ("--pack",)),
    "full": ("full", "full", 4, 256, ()),
    "checkpointing": ("full", "full", 4, 256, ("--gradient-checkpointing", "full")),
    "selective": ("full", "full", 4, 256, ("--gradient-checkpointing", "selective")),
}
TITLES = {
    "lines": "lines of about ten tokens, 8 a step",
    "packed": "the same lines, --pack, 8 x 64",
    "full": "full windows, 4 x 256",
    "checkpointing": "the same, --gradient-checkpointing full",
    "selective": "the same, selective",
}


def samples_of(data: str, count: int) -> list[np.ndarray]:
    """Token ids of full windows, or of lines with 4 to 24 tokens, about ten on average."""
    rng = random.Random(0)
    if data == "full":
        sizes = [256] * count
    else:
        sizes = [min(24, max(4, round(rng.lognormvariate(2.2, 0.4)))) for _ in range(count)]
    return [np.array([rng.randrange(VOCAB) for _ in range(size)]) for size in sizes]


def resident(key: str) -> float:
    """VmRSS or VmHWM of this process in GB."""
    with open("/proc/self/status", encoding="utf-8") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key)) / 1e6


class Meter:
    """Waits for the parent's word before a step, and reports on it: [tokens/s, GB]."""

    def __init__(self, device: str) -> None:
        self.gpu = device == "cuda"

    def start_training(self) -> None:
        if self.gpu:
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated() / 1e9
            return
        ctypes.CDLL(None).malloc_trim(0)  # what loading has freed counts on neither side
        self.before = resident("VmRSS")
        with open("/proc/self/clear_refs", "w", encoding="utf-8") as file:
            file.write("5")  # the peak begins anew

    def begin(self) -> None:
        if not sys.stdin.readline():
            os._exit(0)
        self.since = time.perf_counter()

    def end(self, tokens: int) -> None:
        if self.gpu:
            torch.cuda.synchronize()  # a step returns when its last work is queued, not done
        seconds = time.perf_counter() - self.since
        peak = torch.cuda.max_memory_allocated() / 1e9 if self.gpu else resident("VmHWM")
        print(json.dumps([tokens / seconds, peak - self.before]), flush=True)


def base_model(args: argparse.Namespace) -> Any:
    """The base as from_pretrained gives it: in eval mode, on the CPU.

    A GPU makes its random weights at once, for which a CPU needs half a minute.
    """
    from qwen_assets import full_config
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[args.precision]
    with torch.device(args.device):
        model = AutoModelForCausalLM.from_config(full_config(args.layers), dtype=dtype)
    return model.to("cpu").eval()


def script_side(args: argparse.Namespace, steps: int) -> None:
    """`steps` updates by the script's own functions."""
    base = base_model(args)
    import llm_ddp_parallel_training as ddp

    data, _, rows, seq_len, flags = CASES[args.only]
    where = ("--device", args.device, "--precision", args.precision)
    batch = ("--batch-size", str(rows), "--seq-len", str(seq_len))
    settings = ddp.parse_settings(["--model", "qwen", *where, *batch, *flags])
    launch = ddp.Launch()
    ddp.set_up(launch, settings)
    samples = samples_of(data, rows * steps * (6 if settings.pack else 1))
    windows = [[i] for i in range(len(samples))]
    if settings.pack:
        windows = ddp.best_fit([len(ids) for ids in samples], seq_len)
        random.Random(0).shuffle(windows)
    # As TokenizedSamples gives them: a window's pieces as (ids, which of them are learned).
    items = [(w[0], [(samples[i], np.ones(len(samples[i]), bool)) for i in w]) for w in windows]

    class Padding:
        pad_token_id = eos_token_id = 0

    collate = ddp.qwen_collator(Padding, settings)
    model = ddp.CausalLMWithLoss(ddp.add_lora(base, settings).to(launch.device)).train()
    optimizer = ddp.build_optimizer(model, settings)
    scaler = torch.amp.GradScaler("cuda", enabled=settings.precision == "fp16")
    meter = Meter(args.device)
    meter.start_training()
    for step in range(steps):
        mine = items[rows * step : rows * (step + 1)]
        meter.begin()
        ddp.training_step(model, optimizer, scaler, [collate(mine)], launch, settings)
        meter.end(sum(len(ids) for _, pieces in mine for ids, _ in pieces))


def trainer_side(args: argparse.Namespace, steps: int) -> None:
    """`steps` updates by transformers.Trainer on a PEFT model, at the same settings."""
    base = base_model(args)
    import logging

    from peft import LoraConfig, get_peft_model
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainerCallback, TrainingArguments

    logging.disable(logging.WARNING)
    _, data, rows, _, _ = CASES[args.only]
    samples = samples_of(data, rows * steps)
    lora = LoraConfig(
        r=8, lora_alpha=16, lora_dropout=0.05, target_modules=["q_proj", "v_proj"],
        task_type="CAUSAL_LM",
    )  # fmt: skip
    meter = Meter(args.device)

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **options: Any) -> None:
            meter.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
            done = rows * (state.global_step - 1)
            meter.end(sum(len(ids) for ids in samples[done : done + rows]))

    class InOrder(Trainer):
        def _get_train_sampler(self, *args: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    def pad(batch: list[np.ndarray]) -> dict:
        shape = (len(batch), max(map(len, batch)))
        ids, labels = torch.zeros(shape, dtype=torch.long), torch.full(shape, -100)
        mask = torch.zeros(shape, dtype=torch.long)
        for row, tokens in enumerate(map(torch.from_numpy, batch)):
            ids[row, : len(tokens)] = labels[row, : len(tokens)] = tokens
            mask[row, : len(tokens)] = 1
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=rows, max_steps=steps,
            learning_rate=2e-4, weight_decay=0.01, max_grad_norm=1.0, optim="adamw_torch_fused",
            lr_scheduler_type="constant", use_cpu=args.device == "cpu",
            bf16=args.precision == "bf16", fp16=args.precision == "fp16", report_to=[],
            save_strategy="no", logging_strategy="no", disable_tqdm=True,
            remove_unused_columns=False,
        )  # fmt: skip
        trainer = InOrder(
            model=get_peft_model(base, lora), args=arguments, train_dataset=samples,
            data_collator=pad, callbacks=[Clock()],
        )  # fmt: skip
        meter.start_training()
        trainer.train()


def products_side(args: argparse.Namespace, steps: int) -> None:
    """Nothing but the matrix products of a step on full windows: forward, gradients of inputs."""
    from qwen_assets import full_config

    torch.set_num_threads(THREADS)
    _, _, rows, seq_len, _ = CASES[args.only]
    c, tokens = full_config(args.layers), rows * seq_len
    key_width = c.hidden_size * c.num_key_value_heads // c.num_attention_heads
    layer = [(c.hidden_size, c.hidden_size)] * 2 + [(key_width, c.hidden_size)] * 2  # q, o; k, v
    layer += [(c.intermediate_size, c.hidden_size)] * 2 + [(c.hidden_size, c.intermediate_size)]
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    device, dtype = args.device, dtypes[args.precision]
    weights = [torch.randn(s, device=device, dtype=dtype) for s in layer * args.layers]
    wide = {n: torch.randn(tokens, n, device=device, dtype=dtype) for s in layer for n in s}
    head = torch.randn(VOCAB, c.hidden_size, device=device, dtype=dtype)
    meter = Meter(device)
    meter.start_training()
    for _ in range(steps):
        meter.begin()
        for weight in weights:
            wide[weight.shape[1]] @ weight.t()
            wide[weight.shape[0]] @ weight
        for part in wide[c.hidden_size].split(256):  # the logits as the script has them: in chunks
            (part @ head.t()) @ head
        meter.end(tokens)


SIDES: dict[str, Callable] = {OURS: script_side, TRAINER: trainer_side, PRODUCTS: products_side}


def measure(case: str, args: argparse.Namespace) -> dict:
    """The sides of a case, in turns: [tokens/s, GB] of each, and ratios of the script to them."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(THREADS), "HF_HUB_OFFLINE": "1"}
    errors = tempfile.TemporaryFile("w+", encoding="utf-8")
    sides = [OURS, TRAINER] + [PRODUCTS] * args.products
    workers, seen = {}, {side: [] for side in sides}
    for side in sides:
        command = [sys.executable, "-W", "ignore", __file__, "--side", side, "--only", case]
        command += ["--layers", str(args.layers), "--rounds", str(args.rounds)]
        command += ["--device", args.device, "--precision", args.precision]
        workers[side] = subprocess.Popen(
            command, env=environment, text=True, encoding="utf-8",
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
        )  # fmt: skip

    def step(side: str) -> list[float]:
        worker = workers[side]
        worker.stdin.write("go\n")
        worker.stdin.flush()
        for line in worker.stdout:
            if line.startswith("["):
                return json.loads(line)
        errors.seek(0)
        sys.exit(f"{case}: the {side} side ended\n{errors.read()}")

    for turn in range(1 + args.rounds):  # the first one, which warms up, is left out
        for side in sides[:: -1 if turn % 2 else 1]:
            result = step(side)
            if turn:
                seen[side].append(result)
    for process in workers.values():
        process.communicate()  # closes its input

    def ratios(side: str) -> list[list[float]]:
        return [[a[k] / b[k] for k in (0, 1)] for a, b in zip(seen[OURS], seen[side])]

    seen["ratio"] = ratios(TRAINER)
    if args.products:
        seen["of prod."] = [[speed, 0.0] for speed, _ in ratios(PRODUCTS)]
    return {
        side: [statistics.median(column) for column in zip(*results)]
        for side, results in seen.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="measured steps (default: 5)")
    parser.add_argument("--only", choices=CASES, help="one case (default: all)")
    parser.add_argument("--layers", type=int, default=24, help="fewer: to try it out (default: 24)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default: cpu)")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32")
    parser.add_argument(
        "--products",
        action="store_true",
        help="beside it, the step's matrix products and nothing else",
    )
    parser.add_argument("--json", action="store_true", help="a line a case, for programs")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        SIDES[args.side](args, 1 + args.rounds)
        return
    if not args.json:
        print(f"{args.layers} layers, {args.precision}, {args.rounds} rounds, {THREADS} threads")
        print(f"{'':49}{'tokens/s':>10}{'GB':>8}")
    for case in [args.only] if args.only else CASES:
        result = measure(case, args)
        if args.json:
            print(json.dumps(result), flush=True)
            continue
        for side, (speed, memory) in result.items():
            title, digits = TITLES[case] if side == OURS else "", 1 if side in SIDES else 2
            print(f"{title:40}{side:9}{speed:10.{digits}f}{memory:8.2f}", flush=True)


if __name__ == "__main__":
    main()
