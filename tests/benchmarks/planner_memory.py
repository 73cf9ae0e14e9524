"""Predicted against measured peak memory of the reference's own training, on the CPU (Linux).

    python tests/benchmarks/planner_memory.py                     all cases (3 minutes, 6 GB)
    python tests/benchmarks/planner_memory.py --only tiny-128     one case
    python tests/benchmarks/planner_memory.py --without-heap

Each case is a process of its own. It imports everything, trains a very small model and notes its
resident size: that is "PyTorch's own". Then it builds model and optimizer and makes three updates
by the script's `training_step` on full windows. Measured is the highest resident size above that
mark; for Qwen2.5-0.5B (full architecture, random weights, fp32) also the part above the loaded
model. Predicted is what `labs.planner` says to the same flags. In MB of 1e6 bytes.

The script lets glibc keep what a step frees, so does this. With --without-heap glibc maps every
block of 1 MiB and more by itself instead: nothing is then lost between the blocks of its heap, and
the prediction leaves that part out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

CASES = {  # name: flags of the reference
    "tiny-128": "--model tiny --d-model 128 --layers 2 --seq-len 128 --batch-size 16",
    "tiny-256": "--model tiny --d-model 256 --layers 4 --seq-len 256 --batch-size 16",
    "tiny-384": "--model tiny --d-model 384 --layers 6 --heads 6 --seq-len 128 --batch-size 16",
    "tiny-1024": "--model tiny --d-model 1024 --layers 4 --heads 8 --seq-len 64 --batch-size 2",
    "tiny-512": "--model tiny --d-model 512 --layers 2 --heads 8 --seq-len 256 --batch-size 64",
    "qwen": "--model qwen --batch-size 4 --seq-len 256",
    "qwen-selective": "--model qwen --batch-size 4 --seq-len 256 "
    "--gradient-checkpointing selective",
    "qwen-full": "--model qwen --batch-size 4 --seq-len 256 --gradient-checkpointing",
}


def resident(key: str) -> int:
    """VmRSS, VmHWM or RssFile of this process in bytes."""
    with open("/proc/self/status", encoding="utf-8") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key)) * 1024


def train(model: Any, settings: Any, updates: int) -> None:
    """So many updates on full windows."""
    import torch

    import llm_ddp_parallel_training as ddp

    optimizer = ddp.build_optimizer(model, settings)
    scaler = torch.amp.GradScaler("cuda", enabled=False)
    for _ in range(updates):
        ids = torch.randint(0, 255, (settings.batch_size, settings.seq_len))
        batch = {"input_ids": ids, "labels": ids}
        if settings.model == "qwen":  # as its collator makes them: places that count, and targets
            places = torch.arange(ids.numel()).view_as(ids)[:, :-1].flatten()
            learned = {"learned": places, "targets": ids[:, 1:].flatten()}
            batch = {"labels": ids, "inputs": {"input_ids": ids, **learned}}
        ddp.training_step(model, optimizer, scaler, [batch], ddp.Launch(), settings)


def measure(flags: list[str]) -> dict[str, int]:
    """Bytes at the peak of a training: above PyTorch's own, and above the loaded model."""
    import torch

    import llm_ddp_parallel_training as ddp

    settings = ddp.parse_settings([*flags, "--cpu", "--precision", "fp32"])
    torch.manual_seed(0)
    if settings.model == "qwen":
        import peft  # noqa: F401
        from qwen_assets import full_config
        from transformers import Qwen2ForCausalLM
    small = ddp.parse_settings(["--cpu", "--precision", "fp32", "--seq-len", "16"])
    train(ddp.TinyCausalTransformer(64, 1, 4, 0.0, 16), small, 2)  # what is loaded late is loaded
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        ddp.set_up(ddp.Launch(), settings)  # which lets the process keep freed memory
    libraries, files = resident("VmRSS"), resident("RssFile")
    if settings.model == "qwen":
        base = Qwen2ForCausalLM(full_config()).eval()
        model = ddp.CausalLMWithLoss(ddp.add_lora(base, settings)).train()
    else:
        model = ddp.TinyCausalTransformer(
            settings.d_model, settings.layers, settings.heads, settings.dropout, settings.seq_len
        )
    loaded = resident("VmRSS")
    with open("/proc/self/clear_refs", "w", encoding="utf-8") as file:
        file.write("5")  # the peak begins anew
    train(model, settings, 3)
    # Pages of a library come in when they are first used: those that came meanwhile are not ours.
    peak = resident("VmHWM") - (resident("RssFile") - files)
    return {"measured": peak - libraries, "above_model": peak - loaded}


def predict(flags: list[str], heap: bool) -> dict[str, int]:
    """The same by the planner: all, and all but the weights."""
    from labs.planner import flag_parser, make_plan

    memory = make_plan(flag_parser().parse_args(flags))["memory"]
    total = memory["total"] - (0 if heap else memory["heap"])
    return {"predicted": total, "predicted_above_model": total - memory["weights"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=CASES, help="one case (default: all)")
    parser.add_argument("--without-heap", action="store_true", help="map every block by itself")
    parser.add_argument("--json", action="store_true", help="rows for programs")
    parser.add_argument("--measure", choices=CASES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(CASES[args.measure].split())))
        return
    rows = []
    for name in [args.only] if args.only else CASES:
        command = [sys.executable, "-W", "ignore", __file__, "--measure", name]
        environment = dict(os.environ)
        if args.without_heap:
            environment["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=3600, env=environment
        )
        if done.returncode:
            sys.exit(f"{name}: {done.stderr}")
        rows.append(
            {
                "case": name,
                **predict(CASES[name].split(), not args.without_heap),
                **json.loads(done.stdout.splitlines()[-1]),
            }
        )
    if args.json:
        print(json.dumps(rows))
        return
    print(f"{'MB':20}{'predicted':>10}{'measured':>10}{'ratio':>7}   above the model")
    for row in rows:
        keys = ("predicted", "measured", "predicted_above_model", "above_model")
        predicted, measured, *above = (row[key] / 1e6 for key in keys)
        text = f"{row['case']:20}{predicted:>10.1f}{measured:>10.1f}"
        text += f"{predicted / measured:>7.2f}"
        if row["case"].startswith("qwen"):
            text += f"{above[0]:>10.1f}{above[1]:>10.1f}{above[0] / above[1]:>7.2f}"
        print(text)


if __name__ == "__main__":
    main()
