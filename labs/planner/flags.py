"""The command line."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from labs.planner.machines import GPUS, NETWORKS
from labs.planner.models import MODELS, PlanError
from labs.planner.runs import CHECKPOINTING

# Flags of llm_ddp_parallel_training.py that change nothing here: its command lines can be pasted.
WITHOUT_EFFECT = (
    "--device --seed --threads --output-dir --resume --generate --corpus-file --builtin "
    "--corpus-format --val-fraction --overlong --base-model --lora-alpha --lora-dropout "
    "--max-steps --lr --weight-decay --schedule --warmup-steps --clip --checkpoint-dir "
    "--log-every --eval-every --sample-every"
).split()
SWITCHES_WITHOUT_EFFECT = (
    "--cpu --overwrite --dry-run --pack --merge --compile --tensorboard".split()
)


class Parser(argparse.ArgumentParser):
    """argparse without the usage block: a wrong flag is one line."""

    def error(self, message: str) -> None:
        raise PlanError(f"{message} (see --help)")


def number(kind: type, low: float, high: float = math.inf) -> Callable[[str], Any]:
    """A converter for a finite number in [low, high], with a suffix: 13B, 200GB, 4M."""
    scales = {"K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}

    def convert(text: str) -> Any:
        digits = text.upper()
        digits = digits.removesuffix("B") if digits[-2:-1] in scales else digits
        scale = scales.get(digits[-1:])
        try:
            value = float(digits[:-1]) * scale if scale else float(digits)
        except ValueError:
            value = math.nan
        if not low <= value <= high or math.isinf(value) or (kind is int and value % 1):
            what = "a whole number" if kind is int else "a number"
            limit = "" if math.isinf(high) else f" and at most {high:g}"
            raise argparse.ArgumentTypeError(f"{text!r} is not {what} of at least {low:g}{limit}")
        return kind(value)

    return convert


def flag_parser() -> argparse.ArgumentParser:
    """The command line; a default of None depends on the model, see `read.py`."""
    about = (
        "Memory, time, scaling and checkpoints of a run, before it is paid for. Answers at once. "
        "Numbers may end in K, M, G, B or T, bytes in KB, MB, GB or TB."
    )
    names = {"prog": "python -m labs.planner", "usage": "%(prog)s [flags]", "description": about}
    parser = Parser(allow_abbrev=False, **names)
    count, part, positive = number(int, 1), number(float, 0, 1), number(float, 1e-3)
    ways = ("auto", "ddp", "zero1", "zero2", "fsdp", "hsdp")
    groups = {
        "model": (
            ("--model", ("tiny", "qwen", *MODELS), None, "tiny (default), qwen: the reference's"),
            ("--params", number(float, 1e5, 1e14), None, "of a Llama-like model: 13e9 or 13B"),
            ("--d-model", count, None, "width, as the next five instead of the model's own"),
            ("--layers", count, None, "layers"),
            ("--heads", count, None, "attention heads"),
            ("--kv-heads", count, None, "key-value heads"),
            ("--ffn", count, None, "feed-forward width"),
            ("--vocab", count, None, "vocabulary"),
            ("--seq-len", number(int, 2), None, "tokens (default: the model's own, else 4096)"),
            ("--lora-r", count, None, "train adapters of this rank instead of all (qwen: 8)"),
            ("--lora-targets", str, "q_proj,v_proj", "layers that get them"),
        ),
        "machine": (
            ("--gpu", tuple(GPUS), None, "(default: cpu for tiny and qwen, else a100-80gb)"),
            ("--nodes", number(int, 1, 1e6), 1, "machines"),
            ("--gpus-per-node", number(int, 1, 1e4), None, "ranks (default: tiny, qwen 1, else 8)"),
            ("--network", tuple(NETWORKS), None, "between nodes (default: what suits the GPU)"),
            ("--gpu-memory", number(float, 1e6), None, "instead of the GPU's own"),
            ("--peak", number(float, 1e6), None, "FLOP/s instead of the data sheet's"),
            ("--share", number(float, 1e-3, 1), None, "of it that kernels of a wide model reach"),
        ),
        "run": (
            ("--data", number(float, 1), None, "bytes of training text"),
            ("--tokens", number(float, 1), None, "training tokens, instead of --data"),
            ("--bytes-per-token", number(float, 0.1, 100), None, "(default: 4, English; tiny 1)"),
            ("--epochs", positive, 1.0, "passes over the data"),
            ("--batch-size", count, None, "of a micro-batch (default: the fastest that fits)"),
            ("--grad-accum", count, None, "micro-batches an update (default: by --global-batch)"),
            ("--global-batch", number(float, 1), 4e6, "tokens an update at most, as Llama 2"),
            ("--precision", ("auto", "fp32", "bf16", "fp16"), "auto", "of the matrix products"),
            ("--strategy", ways, None, "zero1: the optimizer is divided; zero2: and gradients; "
             "fsdp: and weights; hsdp: fsdp in a node, replicas across (default: the fastest "
             "that fits; tiny and qwen: ddp)"),
            ("--tensor", number(int, 1, 64), None, "ranks of a node that share every layer"),
            ("--sequence-parallel", ("on", "off"), "on", "tensor ranks also divide norms"),
            ("--pipeline", number(int, 1, 1024), None, "stages of layers"),
            ("--chunks", number(int, 1, 128), None, "of layers a stage; over 1: interleaved"),
            ("--dropout", number(float, 0, 0.99), 0.0, "its masks take memory"),
            ("--save-every", number(int, 0), 0, "on the cpu, the copy it writes takes memory"),
        ),
        "assumptions": (
            ("--price", number(float, 0), 2.0, "of a GPU-hour, in your currency"),
            ("--overlap", part, 0.8, "reached share of the overlap of communication and compute"),
            ("--jitter", part, 0.02, "relative deviation of a GPU's time for a micro-batch"),
            ("--slow-share", part, 0.0002, "GPUs that are slow at a time"),
            ("--slow-by", number(float, 0, 100), 0.1, "by so much"),
            ("--mtbf", number(float, 1), 50_000.0, "hours between failures of one GPU; 419 in 54 "
             "days on 16,384 (Llama 3, section 3.3.4) are 50,700"),
            ("--restart", number(float, 0), 600.0, "seconds until the run goes on after a failure"),
            ("--storage", number(float, 1e3), 1e9, "bytes/s that a node writes to checkpoints"),
            ("--snapshot", number(float, 1e3), 5e9, "bytes/s from a rank to its host's memory"),
            ("--keep", count, 3, "checkpoints kept besides the best"),
            ("--read-rate", number(float, 1), 1e9, "bytes/s of training data a node can read"),
        ),
        "output": (
            ("--all", bool, False, "list every layout, not the best of each kind"),
            ("--json", bool, False, "the plan for programs"),
            ("--picture", Path, None, "also draw memory by layout, replacing an old file"),
        ),
    }  # fmt: skip
    for title, flags in groups.items():
        add = parser.add_argument_group(title).add_argument
        if title == "run":
            again = "full: layers are computed twice; selective: all of a layer but products and "
            again += "attention (default: the fastest that fits; tiny and qwen: none)"
            options = {"nargs": "?", "const": "full", "choices": CHECKPOINTING}
            add("--gradient-checkpointing", help=again, **options)
        for flag, kind, default, text in flags:
            if kind is bool:
                add(flag, action="store_true", help=text)
            elif isinstance(kind, tuple):
                add(flag, choices=kind, default=default, help=text)
            else:
                figure = f"{default:g}" if isinstance(default, float) else default
                shown = "" if default is None else f" (default: {figure})"
                add(flag, type=kind, default=default, help=text + shown)
    for flag in WITHOUT_EFFECT:
        parser.add_argument(flag, help=argparse.SUPPRESS)
    for flag in SWITCHES_WITHOUT_EFFECT:
        parser.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    return parser
