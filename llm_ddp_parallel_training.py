"""PyTorch DistributedDataParallel from launch to saved weights, in one file.

Two processes on one CPU, nothing to download:

    python -m torch.distributed.run --standalone --nproc_per_node=2 \\
        llm_ddp_parallel_training.py --model tiny --cpu --batch-size 2 --max-steps 2

One process, no process group at all:

    python llm_ddp_parallel_training.py --model tiny --cpu --max-steps 2

Real text (the Python language reference that ships with CPython), two processes:

    python -m torch.distributed.run --standalone --nproc_per_node=2 \\
        llm_ddp_parallel_training.py --cpu --builtin python-docs --max-steps 500 --lr 3e-3

Qwen2.5-0.5B-Instruct with LoRA, one process per GPU:

    python -m torch.distributed.run --standalone --nproc_per_node=2 \\
        llm_ddp_parallel_training.py --model qwen --batch-size 1 --seq-len 64 --max-steps 2

It is read from top to bottom. Who came for DDP reads six sections, about 950 lines,
each found by its name behind a "# " ("# Sampler"):

    launch and process group     who am I, which device, which backend
    sampler                      how ranks share the samples of an epoch
    the training step            where gradients meet, and why the result is exact
    validation and sampling      work that is shared, but not through DDP
    the trainer                  the loop, and the state that a checkpoint must hold
    the story                    main(): all of it in order

The others serve the run: settings, faults and signals, corpus, collators, models, files and
checkpoints, log. "Ranks meet" marks every place where processes wait for each other.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import ctypes
import dataclasses
import datetime
import errno
import functools
import hashlib
import importlib.util
import inspect
import itertools
import json
import math
import mmap
import os
import platform
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

PAD, EOS, VOCAB = 256, 257, 258  # the tiny model's tokens after the 256 byte values
IGNORE = -100  # a label that the loss leaves out
PEER_LOSS_GRACE_S = 5  # how long a rank that lost a peer leaves the floor to the one that failed
SAMPLE_PROMPT, SAMPLE_LENGTH = "The ", 200  # tokens

LESSONS = """\
One process trains one copy of the model, and DDP keeps all the copies the same.
The launcher starts the processes and tells each of them its rank and the world size.
Rank zero is a process like the others; it only has the extra duty to write things down.
The local rank counts the processes of one machine and picks the device.
Before the first step, rank zero sends its weights to everybody.
Each rank reads other samples, so each rank computes another gradient.
The all-reduce adds up the gradients of all ranks and hands the same sum to everyone.
Equal weights and equal gradients give equal weights again after the step.
A gradient is ready as soon as the backward pass has left its layer.
DDP collects gradients in buckets, because one large message is faster than many small ones.
While one bucket travels, the backward pass works on the next layer.
A replica needs the memory of the whole model; more ranks do not make a model fit.
The global batch is the batch per rank, times accumulation steps, times ranks.
Inside no_sync the gradients stay local and wait for the last micro-batch.
The mean of two means is not the mean, unless both count the same number of tokens.
So divide the sum of all losses by the number of all tokens, once, at the end.
A sampler that forgets the epoch shows every epoch in the same order.
A collective that one rank does not reach makes all the others wait.
Clip the gradient after it was averaged, and after the scaler was undone.
The learning rate follows the number of updates, not the number of micro-batches.
AdamW keeps two running means for each weight, so it needs twice the memory of the weights.
Weight decay pulls matrices towards zero; biases and norms are left in peace.
Validation counts every sample once, whatever the number of ranks.
Dropout should differ between ranks, but the first weights must not.
Gloo carries tensors between CPUs, and NCCL carries them between GPUs.
A checkpoint is written beside the old one and renamed when it is complete.
If one rank fails, all should stop soon and say why.
The same seed, the same data and the same settings should give the same run.
A loss that becomes infinite should stop the run before it spoils the weights.
Two ranks on one machine share its memory bandwidth, so two are rarely twice as fast.
A causal mask hides the future: a token sees itself and what came before.
A model that guesses at random among 258 tokens has a loss of about 5.55.
"""


class RunError(Exception):
    """Ends the run with one line for the reader instead of a traceback."""

    status = 1
    by_all_ranks = True  # every rank raises it, so rank 0 prints it for all


class UserError(RunError):
    """The user's input or settings are wrong; nothing was trained or overwritten."""

    status = 2


class LaunchError(UserError):
    """The launcher's variables make no sense; this rank's own, so this rank says it."""

    by_all_ranks = False


class Diverged(RunError):
    """The loss or the gradient stopped being a finite number."""

    status = 3


class WriteError(RunError):
    """Rank 0 could not write a file."""

    by_all_ranks = False


class Stopped(RunError):
    """A signal asked the run to end; the state is saved."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.status = 128 + number  # as shells do: 143 for SIGTERM, 130 for SIGINT


# ------------------------------------------------------------------------------------------
# Settings
# ------------------------------------------------------------------------------------------

# What holds when a flag is not given; None depends on other flags, see `check_settings`.
DEFAULTS: dict[str, Any] = {
    "model": "tiny", "device": "auto", "cpu": False, "seed": 0, "threads": None,
    "output_dir": None, "overwrite": False, "resume": None, "dry_run": False, "generate": None,
    "corpus_file": None, "builtin": None, "corpus_format": None, "val_fraction": 0.1,
    "pack": False, "overlong": None, "num_workers": 0,
    "d_model": 64, "layers": 1, "heads": 4, "dropout": 0.0, "seq_len": None,
    "base_model": "Qwen/Qwen2.5-0.5B-Instruct", "lora_r": 8, "lora_alpha": 16,
    "lora_dropout": 0.05, "lora_targets": "q_proj,v_proj", "gradient_checkpointing": False,
    "merge": False,
    "batch_size": 8, "grad_accum": 1, "epochs": None, "max_steps": None, "lr": None,
    "weight_decay": 0.01, "schedule": "constant", "warmup_steps": 0, "clip": 1.0,
    "precision": "auto", "compile": False, "save_every": 0, "keep": 3, "mirror": None,
    "log_every": 10, "eval_every": 0, "sample_every": 0, "tensorboard": False,
}  # fmt: skip

# With --resume, these may differ from the interrupted run; any other difference is refused.
MAY_CHANGE = {
    "device", "cpu", "threads", "output_dir", "overwrite", "resume", "dry_run", "generate",
    "corpus_file", "num_workers", "gradient_checkpointing", "merge", "batch_size", "grad_accum",
    "epochs", "max_steps", "save_every", "keep", "mirror", "log_every", "eval_every",
    "sample_every", "tensorboard",
}  # fmt: skip


class OneLineParser(argparse.ArgumentParser):
    """argparse without the usage block: a wrong flag is one `UserError`."""

    def error(self, message: str) -> None:
        raise UserError(f"{message} (see --help)")


def number(kind: type, low: float, high: float = math.inf, above: bool = False) -> Callable:
    """A converter for argparse: a finite `kind` of at least `low` (or above it), at most `high`."""
    what = "a whole number" if kind is int else "a number"
    bounds = f"above {low}" if above else f"of at least {low}"
    high = 2**31 - 1 if kind is int and high == math.inf else high
    bounds += "" if high == math.inf else f" and at most {high}"

    def convert(text: str) -> Any:
        """Raises `ArgumentTypeError`, which the parser turns into a `UserError` with the flag."""
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (low < value if above else low <= value) or not value <= high or value == math.inf:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what} {bounds}")
        return value

    return convert


def flag_parser() -> argparse.ArgumentParser:
    """The command line; a flag that is not given leaves no trace in the result."""
    parser = OneLineParser(
        prog="llm_ddp_parallel_training.py", allow_abbrev=False, argument_default=argparse.SUPPRESS,
        description="Train a language model on one or several processes with PyTorch DDP.",
        epilog="exit status: 0 done, 2 wrong input or settings, 3 diverged, 143 stopped by SIGTERM "
        "and 130 by Ctrl-C after saving, 1 anything else. Environment: DDP_TIMEOUT_S, seconds "
        "after which a rank that the others wait for counts as hung (default: 600)",
    )  # fmt: skip
    # fmt: off
    add = parser.add_argument_group("run").add_argument
    add("--model", choices=("tiny", "qwen"),
        help="tiny: byte-level Transformer, no download; qwen: Qwen2.5 with LoRA (default: tiny)")
    add("--device", choices=("auto", "cpu", "cuda", "mps"),
        help="auto: CUDA, else a Mac's GPU (one process only), else the CPU (default: auto)")
    add("--cpu", action="store_true", help="the same as --device cpu")
    add("--seed", type=number(int, 0, 2**31 - 1),
        help="fixes initial weights, split, order and dropout (default: 0)")
    add("--threads", type=number(int, 1, 4096),
        help="CPU threads per rank (default: cores / ranks on this machine)")
    add("--output-dir", type=Path,
        help="where the run writes (default: runs/<model>-<date>-<time>, or the resumed run)")
    add("--overwrite", action="store_true", help="replace the run that --output-dir holds")
    add("--resume", metavar="DIR_OR_URL",
        help="continue a run from its newest complete checkpoint, or from the named one; flags "
        "that are not given keep their values")
    add("--dry-run", action="store_true",
        help="check settings and data, print what would happen; train and write nothing")
    add("--generate", metavar="PROMPT",
        help="continue PROMPT with the model of the --resume run, on the CPU")

    add = parser.add_argument_group("data").add_argument
    add("--corpus-file", type=Path, help="your own UTF-8 text instead of --builtin")
    add("--builtin", choices=("lessons", "python-docs"),
        help="lessons: a few dozen sentences; python-docs: the language reference that CPython "
        "carries, about 460 KB (default: lessons)")
    add("--corpus-format", choices=("lines", "document", "jsonl"),
        help='lines: a sample a line; document: one running text; jsonl: {"text": ...} a line, or '
        'with qwen {"messages": [...]} (default: document for python-docs, jsonl for *.jsonl, '
        "else lines)")
    add("--val-fraction", type=number(float, 0, 0.9),
        help="share of the samples held out for validation; 0: none (default: 0.1)")
    add("--pack", action="store_true",
        help="fill every window with several samples: no padding, more tokens a second; with tiny "
        "joined by EOS, with qwen invisible to each other")
    add("--overlong", choices=("truncate", "split", "drop"),
        help="samples longer than --seq-len: cut off, cut in pieces, or leave out "
        "(default: truncate; --pack and documents always split)")
    add("--num-workers", type=number(int, 0, 256),
        help="processes per rank that prepare batches; raise it only if the data is slower than "
        "the step (default: 0: the rank does it)")
    add("--seq-len", type=number(int, 2),
        help="most tokens in a window; lower it, after --batch-size, when memory runs out "
        "(default: 64 tiny, 256 qwen)")

    add = parser.add_argument_group("tiny").add_argument
    add("--d-model", type=number(int, 1), help="width of the model (default: 64)")
    add("--layers", type=number(int, 1), help="Transformer layers (default: 1)")
    add("--heads", type=number(int, 1), help="attention heads, a divisor of --d-model (default: 4)")
    add("--dropout", type=number(float, 0, 0.99),
        help="probability; raise it when the validation loss rises again (default: 0)")

    add = parser.add_argument_group("qwen").add_argument
    add("--base-model", metavar="ID_OR_DIR",
        help="a causal model of transformers, by hub id or as a local folder, which needs no "
        "network (default: Qwen/Qwen2.5-0.5B-Instruct)")
    add("--lora-r", type=number(int, 1), help="rank of the adapters (default: 8)")
    add("--lora-alpha", type=number(float, 0, above=True),
        help="their scale is alpha / r (default: 16)")
    add("--lora-dropout", type=number(float, 0, 0.99), help="probability (default: 0.05)")
    add("--lora-targets", metavar="NAMES",
        help="Linear layers that get an adapter (default: q_proj,v_proj)")
    add("--gradient-checkpointing", action="store_true",
        help="compute most layers twice and keep less: when memory runs out at --batch-size 1")
    add("--merge", action="store_true",
        help="also write merged/, a plain transformers model with the adapter merged in")

    add = parser.add_argument_group("optimization").add_argument
    add("--batch-size", type=number(int, 1),
        help="sequences per rank and micro-batch; lower this first when memory runs out, and "
        "raise --grad-accum by the same factor (default: 8)")
    add("--grad-accum", type=number(int, 1), help="micro-batches per update (default: 1)")
    add("--epochs", type=number(int, 1), help="passes over the corpus (default: by --max-steps)")
    add("--max-steps", type=number(int, 1),
        help="updates, over as many epochs as it takes (default: 300, unless --epochs is given)")
    add("--lr", type=number(float, 0, above=True),
        help="peak learning rate; divide it by 3 when the loss jumps (default: 3e-4 tiny, "
        "2e-4 qwen)")
    add("--weight-decay", type=number(float, 0),
        help="AdamW's decay, on matrices only (default: 0.01)")
    add("--schedule", choices=("constant", "linear", "cosine"),
        help="of the rate after the warmup: level, or falling to 0 (default: constant)")
    add("--warmup-steps", type=number(int, 0),
        help="updates over which the rate rises from 0 (default: 0)")
    add("--clip", type=number(float, 0),
        help="largest norm of the global gradient; 0: no clipping (default: 1)")
    add("--precision", choices=("auto", "fp32", "bf16", "fp16"),
        help="of the matrix products and of a frozen base; trained weights stay fp32 (default: "
        "auto: on CUDA bf16 or fp16, whichever the card has, else fp32)")
    add("--compile", action="store_true", help="torch.compile: slower start, faster steps")

    add = parser.add_argument_group("checkpoints").add_argument
    add("--save-every", type=number(int, 0),
        help="updates between two checkpoints, written beside the training, and one at every best "
        "validation; 0: only when stopped by a signal (default: 0)")
    add("--keep", type=number(int, 1),
        help="newest checkpoints kept, besides the best; lower it when the disk fills (default: 3)")
    add("--mirror", metavar="URL",
        help="copy checkpoints and results there, through fsspec: s3://bucket/run, file:///nfs/run")

    add = parser.add_argument_group("watching").add_argument
    add("--log-every", type=number(int, 1), help="updates between two log lines (default: 10)")
    add("--eval-every", type=number(int, 0),
        help="updates between two validations; 0: only at the end (default: 0)")
    add("--sample-every", type=number(int, 0),
        help="updates between two generated samples; 0: only at the end (default: 0)")
    add("--tensorboard", action="store_true", help="also write event files for TensorBoard")
    # fmt: on
    return parser


def parse_settings(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line. Raises `UserError` for unknown or contradictory flags.

    With --resume, flags that are not given keep the values of the interrupted run.
    """
    given = vars(flag_parser().parse_args(argv))
    given.update(after_restart(given))
    saved = saved_settings(given["resume"]) if "resume" in given else {}
    for name in sorted(given.keys() & saved.keys() - MAY_CHANGE):
        if given[name] != saved[name] and (name, given[name]) != ("precision", "auto"):
            raise UserError(
                f"--{name.replace('_', '-')} {given[name]} differs from the interrupted run's "
                f"{saved[name]}, which --resume continues; leave the flag out, or start a new run"
            )
    if "corpus_file" in given:
        saved.pop("builtin", None)
    if {"epochs", "max_steps"} & given.keys():  # the length is given anew, not the smaller of both
        saved.pop("epochs", None)
        saved.pop("max_steps", None)
    if "cpu" in given:
        saved.pop("device", None)
    if given.get("precision") == "auto" and saved:
        given["precision"] = saved["precision"]
    settings = argparse.Namespace(**{**DEFAULTS, **saved, **given})
    settings.batch_given = bool({"batch_size", "grad_accum"} & given.keys())
    check_settings(settings)
    return settings


def check_settings(settings: argparse.Namespace) -> None:
    """Refuses contradictions and fills in the defaults that depend on other flags."""
    s, qwen = settings, settings.model == "qwen"
    if s.cpu and s.device not in ("auto", "cpu"):
        raise UserError(f"--cpu contradicts --device {s.device}; give one of them")
    if s.corpus_file and s.builtin:
        raise UserError("--corpus-file contradicts --builtin; give one of them")
    if s.d_model % s.heads:
        raise UserError(f"--heads {s.heads} does not divide --d-model {s.d_model}")
    if s.mirror and "://" not in s.mirror:
        raise UserError(f"--mirror {s.mirror} is not a URL; a folder is written file:///path")
    if s.generate is not None and not s.resume:
        raise UserError("--generate PROMPT needs --resume RUN, the folder of a finished run")
    if s.generate == "":
        raise UserError("--generate needs a prompt of at least one character")
    if qwen and s.num_workers and sys.platform != "linux":
        raise UserError("--num-workers with --model qwen needs Linux, where processes can fork")
    try:
        (s.generate or "").encode("utf-8")
    except UnicodeEncodeError:
        raise UserError("--generate needs a prompt in UTF-8") from None
    for flag in ("merge", "gradient_checkpointing"):
        if getattr(s, flag) and not qwen:
            raise UserError(f"--{flag.replace('_', '-')} needs --model qwen")

    s.device = "cpu" if s.cpu else s.device
    if not s.corpus_file and not s.builtin:
        s.builtin = "lessons"
    if s.corpus_format is None:
        jsonl = s.corpus_file and s.corpus_file.suffix.lower() == ".jsonl"
        document = s.builtin == "python-docs"
        s.corpus_format = "jsonl" if jsonl else "document" if document else "lines"
    if s.builtin and s.corpus_format == "jsonl":
        raise UserError("--corpus-format jsonl needs a --corpus-file")
    s.pack = s.pack or s.corpus_format == "document"
    if s.pack and s.overlong in ("truncate", "drop"):
        raise UserError(f"--overlong {s.overlong} contradicts packing, which always splits")
    s.overlong = s.overlong or ("split" if s.pack else "truncate")
    if s.epochs is None and s.max_steps is None:
        s.max_steps = 300
    s.seq_len = s.seq_len or (256 if qwen else 64)
    s.lr = s.lr or (2e-4 if qwen else 3e-4)


# ------------------------------------------------------------------------------------------
# Launch and process group
# ------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Where:
    """What a rank is doing right now, for messages about errors and hangs."""

    step: int = 0
    phase: str = "set-up"
    meets: bool = False  # whether this phase waits for other ranks
    since: float = dataclasses.field(default_factory=time.monotonic)

    def enter(self, phase: str, meets: bool = False) -> None:
        self.phase, self.meets, self.since = phase, meets, time.monotonic()


@dataclasses.dataclass
class Launch:
    """Who this process is, and what it runs on.

    `rank` counts all processes, `local_rank` those of one machine. `choices` collects every
    automatic decision as (what, chosen, reason) for the header and `run.json`.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    choices: list[tuple[str, str, str]] = dataclasses.field(default_factory=list)
    where: Where = dataclasses.field(default_factory=Where)
    timeout: int = 600  # seconds after which a rank that others wait for counts as hung
    lock: Any = None  # the run folder's lock file, open until the process ends

    def choose(self, what: str, chosen: Any, reason: str) -> None:
        self.choices.append((what, str(chosen), reason))

    def say(self, text: str) -> None:
        """Prints once for the whole job: rank 0 speaks, the others are silent."""
        if self.rank == 0:
            with contextlib.suppress(BrokenPipeError):  # the reader left: `| head`
                print(text, flush=True)


def read_launcher(where: Where | None = None) -> Launch:
    """Reads RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE as torchrun sets them.

    None of them set: one process on its own. Raises `UserError` for values that make no sense.
    """

    def variable(
        name: str, default: int, low: int, below: float = math.inf, kind: type = LaunchError
    ) -> int:
        """A whole number, `low` or more and under `below`; else raises `kind`."""
        text = os.environ.get(name, str(default))
        if not text.strip().isdecimal() or len(text) > 9 or not low <= int(text) < below:
            limit = "" if below == math.inf else f" and below {below}"
            raise kind(
                f"environment variable {name}={text!r} should be a whole number of at least "
                f"{low}{limit}; launch with python -m torch.distributed.run, or unset it"
            )
        return int(text)

    world_size = variable("WORLD_SIZE", 1, 1)
    rank = variable("RANK", 0, 0, world_size)
    local_world_size = variable("LOCAL_WORLD_SIZE", world_size, 1, world_size + 1)
    local_rank = variable("LOCAL_RANK", rank % local_world_size, 0, local_world_size)
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if world_size > 1 else ():
        if not os.environ.get(name):
            raise LaunchError(
                f"WORLD_SIZE={world_size} but {name} is not set; "
                "launch with python -m torch.distributed.run"
            )
    timeout = variable("DDP_TIMEOUT_S", 600, 1, kind=UserError)  # alike on all ranks
    launch = Launch(rank, local_rank, world_size, local_world_size, timeout=timeout)
    launch.where = where or launch.where
    return launch


def choose_device(launch: Launch, settings: argparse.Namespace) -> None:
    """Sets `launch.device`, the precision and the threads, each with its reason."""
    asked, several = settings.device, launch.world_size > 1
    if asked == "mps" and several:
        raise UserError("--device mps trains in one process only; use --device cpu for several")
    mps = asked in ("auto", "mps") and not several and torch.backends.mps.is_available()
    # CUDA is asked about only when it may be used: a CPU run must not depend on its driver.
    gpus = torch.cuda.device_count() if asked in ("auto", "cuda") else 0
    if asked == "cuda" and not gpus:
        raise UserError("--device cuda: PyTorch sees no CUDA device here; use --device cpu")
    if asked == "mps" and not mps:
        raise UserError("--device mps: PyTorch sees no Metal GPU here; use --device cpu")
    if gpus:
        launch.device = torch.device("cuda", launch.local_rank % gpus)
        torch.cuda.set_device(launch.device)
    elif mps:
        launch.device = torch.device("mps")
    order = "cuda, cpu" if several else "cuda, mps, cpu"
    why = f"--device {asked}" if asked != "auto" else f"the first of {order} that is here"
    launch.choose("device", launch.device, why)

    why = f"--precision {settings.precision}"
    if settings.precision == "auto":
        settings.precision, why = "fp32", f"default on {launch.device.type}"
        if launch.device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(launch.device)
            settings.precision = "bf16" if major >= 8 else "fp16"
            why = f"capability {major}.{minor}; bf16 in hardware begins at 8.0"
    elif settings.precision == "fp16" and launch.device.type != "cuda":
        raise UserError("--precision fp16 needs CUDA; a new run can use bf16 or fp32")
    launch.choose("precision", settings.precision, why)
    choose_threads(launch, settings)
    keep_freed_memory(launch)


def choose_threads(launch: Launch, settings: argparse.Namespace) -> None:
    """Gives each rank of a machine its share of the cores."""
    affinity = getattr(os, "sched_getaffinity", None)  # the cores we may use; Linux only
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    threads = max(1, cores // launch.local_world_size)
    why = f"{counted(cores, 'core')} / {counted(launch.local_world_size, 'rank')} on this machine"
    # torchrun sets OMP_NUM_THREADS=1 for several processes when the user did not set it; a user's
    # own 1 looks the same, so use --threads 1.
    omp = os.environ.get("OMP_NUM_THREADS", "")
    by_torchrun = omp == "1" and launch.local_world_size > 1 and "TORCHELASTIC_RUN_ID" in os.environ
    if settings.threads:
        threads, why = settings.threads, "--threads"
    elif omp.isdecimal() and int(omp) > 0 and not by_torchrun:
        threads, why = int(omp), "OMP_NUM_THREADS"
    torch.set_num_threads(threads)
    launch.choose("threads", f"{threads} per rank", why)


def keep_freed_memory(launch: Launch) -> None:
    """Lets glibc keep what a step frees for the next step, instead of returning it to the kernel.

    Memory that comes back has to be cleared page by page, which costs a CPU step up to a tenth.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if launch.device.type == "cpu" and hasattr(libc, "mallopt"):
        m_trim_threshold, m_mmap_max = -1, -4  # malloc.h
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, 2**30)
        launch.choose(
            "allocator", "keeps freed memory", "the kernel would clear it anew in every update"
        )


def set_up(launch: Launch) -> None:
    """Chooses the backend and joins the process group; one process has none. Ranks meet."""
    if launch.world_size == 1:
        launch.choose("backend", "none", "one process: no process group, no DDP")
        return
    backend, why = "gloo", f"{launch.device.type} run"
    if launch.device.type == "cuda":
        if sys.platform == "win32":
            why = "NCCL is not built for Windows"
        elif launch.local_world_size > torch.cuda.device_count():
            why = "several ranks share a GPU, which NCCL refuses"
        else:
            backend, why = "nccl", "one CUDA device per rank"
    launch.choose("backend", backend, why)
    why = "PyTorch's default; no other was faster" if backend == "gloo" else "PyTorch's default"
    launch.choose("buckets", "25 MB of gradients a message", why)
    join_group(launch, backend)


def join_group(launch: Launch, backend: str) -> None:
    """Forms the process group with the ranks that the launcher's variables name. Ranks meet."""
    # While training, the watchdog finds what hangs. The group itself must outlast a download, a
    # slow disk and the upload of the results, for which the others wait for rank 0.
    timeout = datetime.timedelta(seconds=max(launch.timeout + 60, 7200))
    store, rank, ranks = next(dist.rendezvous("env://", timeout=timeout))
    # torchrun keeps its store over a restart, with the addresses of dead ranks in it.
    store = dist.PrefixStore(f"attempt/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=ranks, timeout=timeout,
        device_id=launch.device if backend == "nccl" else None,
    )  # fmt: skip


def gather(value: Any, launch: Launch) -> list:
    """The values of all ranks, in rank order. Ranks meet."""
    values = [value] * launch.world_size
    if launch.world_size > 1:
        dist.all_gather_object(values, value)
    return values


def from_rank_0(value: Any, launch: Launch) -> Any:
    """Rank 0's value, on every rank. Ranks meet."""
    shared = [value]
    if launch.world_size > 1:
        dist.broadcast_object_list(shared)
    return shared[0]


@contextlib.contextmanager
def together(launch: Launch) -> Iterator[None]:
    """A block in which any rank may find the user's mistake: all ranks raise it, or none.

    Ranks meet at its end: all must enter it, and none may use a collective inside.
    """
    found = None
    try:
        yield
    except UserError as error:
        found = str(error)
    for message in gather(found, launch):
        if message is not None:
            raise UserError(message)


# ------------------------------------------------------------------------------------------
# Faults and signals
# ------------------------------------------------------------------------------------------


def print_on_any_terminal() -> None:
    """Escapes what the terminal's encoding lacks, instead of failing: cp1252 has no "�"."""
    with contextlib.suppress(AttributeError):  # a notebook's stream has no codec
        sys.stdout.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def one_clear_ending(where: Where) -> Iterator[None]:
    """Turns every way out of the run into one readable cause and the right exit status.

    A `RunError` is printed by rank 0 as one line. Any other exception keeps its traceback. A rank
    that merely lost a peer leaves the floor to the peer: it waits a moment, so that the launcher
    sees the rank that really failed first and names it as the root cause.
    """
    rank = os.environ.get("RANK", "0")  # as it stands: it may be what is wrong
    leader = not rank.isdecimal() or int(rank) == 0
    try:
        yield
    except RunError as error:
        if leader or not error.by_all_ranks:
            kind = "stopped" if isinstance(error, Stopped) else "error"
            print(f"{kind}: {error}", file=sys.stderr, flush=True)
        elif not isinstance(error, Stopped):
            time.sleep(PEER_LOSS_GRACE_S)  # rank 0 may come later: the launcher would kill it mute
        write_launcher_error(str(error))
        if leader and error.by_all_ranks:
            prevent_restart()
        sys.exit(error.status)
    except KeyboardInterrupt:
        if leader:
            print("interrupted", file=sys.stderr, flush=True)
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        place = f"rank {rank}, update {where.step}, {where.phase}"
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            message = (
                f"{place}: out of memory; lower --batch-size or --seq-len, or the model's size"
            )
            print(f"error: {message} ({reason_of(error)})", file=sys.stderr, flush=True)
            write_launcher_error(message)
            sys.exit(1)
        network = isinstance(error, dist.DistBackendError | dist.DistNetworkError)
        if not network and not ("gloo" in str(error) and "peer" in str(error)):
            print(f"{place}: failed", file=sys.stderr, flush=True)
            raise
        time.sleep(PEER_LOSS_GRACE_S)
        print(
            f"{place}: lost contact with another rank, whose own message or the launcher's summary "
            "names the cause", file=sys.stderr, flush=True,
        )  # fmt: skip
        sys.exit(1)
    finally:
        if dist.is_initialized():
            # Gloo's threads drop the last tensors a moment after a collective has returned, and
            # need the interpreter for it: a group destroyed meanwhile hangs or aborts the process.
            time.sleep(0.2)
            dist.destroy_process_group()


def write_launcher_error(message: str) -> None:
    """Tells torchrun the cause, in the format of its error file, so that its summary shows it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": message, "extraInfo": extra}}, file)


def prevent_restart() -> None:
    """Tells torchrun to end the job: with --max-restarts it would repeat the same mistake."""
    limit = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if limit.isdecimal() and int(limit) > 0:
        os.kill(os.getppid(), signal.SIGTERM)


class StopRequest:
    """SIGTERM and SIGINT as a wish, which the ranks fulfil together after the current update.

    Python runs its signal handlers between two lines of Python, so a rank that waits inside a
    collective would not notice. The wake-up descriptor is written at once, and a thread reads it:
    the first signal sets `number`, a second one a second later ends the process on the spot.
    (Ctrl-C under torchrun arrives twice at once: from the terminal and from the launcher.)
    """

    def __init__(self) -> None:
        self.number = 0

    def __enter__(self) -> StopRequest:
        self.listener, self.sender = socket.socketpair()
        self.sender.setblocking(False)
        self.old_wakeup = signal.set_wakeup_fd(self.sender.fileno(), warn_on_full_buffer=False)
        wanted = (signal.SIGINT, signal.SIGTERM)
        self.old_handlers = {n: signal.signal(n, lambda *_: None) for n in wanted}
        threading.Thread(target=self._listen, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.old_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self.old_wakeup)
        self.sender.close()

    def _listen(self) -> None:
        first = math.inf
        while received := self.listener.recv(1):
            if received[0] in (signal.SIGINT, signal.SIGTERM):
                if time.monotonic() - first > 1:
                    os._exit(128 + received[0])
                if not self.number:
                    self.number, first = received[0], time.monotonic()


def ignore_signals(_: int) -> None:
    """For loader workers: a signal to the whole process group is for the rank to handle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


class Watchdog:
    """Finds the rank that the others wait for, and ends the job with everybody's stack.

    A thread of each rank notes once a second, in the launcher's key-value store, what the rank
    does. When a rank stays in one phase too long, all ranks print their stacks, compare notes for
    three more seconds, and the first rank that still answers names the missing one. Ranks whose
    torchrun was killed stop as if it had sent SIGTERM: nobody could end them any more.
    """

    SAVING = "waiting for the last save"  # a phase that may last: a slow disk is no hang

    def __init__(self, launch: Launch) -> None:
        self.launch, self.main, self.over = launch, threading.get_ident(), threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.launcher = os.getppid()

    def __enter__(self) -> None:
        if self.launch.world_size > 1:
            self.launch.where.enter("begin")
            self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.over.set()
        if self.thread.ident:
            self.thread.join(timeout=5)  # it may be waiting for a store that left with rank 0

    def _watch(self) -> None:
        rank, where, readings = str(self.launch.rank), self.launch.where, []
        ranks = [str(r) for r in range(self.launch.world_size)]
        try:
            # A connection of its own: the one of the process group may be waiting.
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            patience = datetime.timedelta(seconds=10)
            libuv = sys.platform != "win32"  # where PyTorch is built without it
            store = dist.TCPStore(address, port, is_master=False, timeout=patience, use_libuv=libuv)
            restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = dist.PrefixStore(f"watchdog/{restart}", store)
            for beat in itertools.count():
                note = {
                    "beat": beat, "step": where.step, "phase": where.phase, "meets": where.meets,
                    "host": socket.gethostname(), "pid": os.getpid(),
                }  # fmt: skip
                store.set(rank, json.dumps(note))
                notes = [json.loads(store.get(r)) for r in ranks if store.check([r])]
                if any(note["phase"] == self.SAVING for note in notes):
                    where.since = time.monotonic()
                if time.monotonic() - where.since > self.launch.timeout:
                    store.set("hang", "")
                if store.check(["hang"]):
                    if not readings:
                        stack = traceback.format_stack(sys._current_frames()[self.main])
                        print(f"stack of rank {rank}:", *stack, file=sys.stderr, flush=True)
                    readings.append(notes)
                    if len(readings) == 4:
                        break
                if (self.over.wait(1) and not readings) or self._orphaned():
                    return
        except (RuntimeError, dist.DistError):  # the store left with the launcher or rank 0
            self._orphaned()
            return
        self._end(readings[0], readings[-1])

    def _orphaned(self) -> bool:
        """Whether torchrun is gone; if so, asks this rank to stop."""
        gone = "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != self.launcher
        if gone:
            if self.launch.rank == 0:
                print("the launcher was killed", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
        return gone

    def _end(self, before: list[dict], after: list[dict]) -> None:
        silent = [
            r for r, (old, new) in enumerate(zip(before, after)) if old["beat"] == new["beat"]
        ]
        newest = max(note["step"] for note in after)
        behind = [r for r, n in enumerate(after) if n["step"] < newest or not n["meets"]]
        places = ", ".join(
            f"rank {r} at update {note['step']}, {note['phase']}"
            + " (does not answer)" * (r in silent)
            for r, note in enumerate(after)
        )
        missing = ", ".join(f"rank {r}" for r in silent or behind) or "none, all wait"
        verdict = f"no progress for {self.launch.timeout} s; missing: {missing} ({places})"
        if self.launch.rank == min(set(range(len(after))) - set(silent), default=0):
            print(f"error: {verdict}", file=sys.stderr, flush=True)
        else:
            time.sleep(2)  # the launcher ends all when the first one leaves: let it have spoken
        for note in (after[r] for r in silent):  # for those the launcher would wait 30 s
            if note["host"] == socket.gethostname():
                with contextlib.suppress(OSError):
                    os.kill(note["pid"], getattr(signal, "SIGKILL", signal.SIGTERM))
        write_launcher_error(verdict)
        os._exit(1)


# ------------------------------------------------------------------------------------------
# Corpus and dataset
# ------------------------------------------------------------------------------------------

CHUNK = 1 << 20  # bytes of the corpus that are looked at in one go
SAMPLES_AT_ONCE = 1 << 16  # of its samples; small, for freed memory stays with the process
BOM = b"\xef\xbb\xbf"  # the UTF-8 byte-order mark


class Corpus:
    """The bytes of a corpus: a memory map of a file, or a built-in text.

    A map costs each rank address space, not memory: the pages belong to the operating system and
    are shared by all ranks of a machine. `source` is a path or the bytes themselves; `begin` is 3
    behind a byte-order mark, else 0. Pickled (for loader workers) as its source.
    """

    def __init__(self, source: Path | bytes) -> None:
        self.source = source
        self.name = str(source) if isinstance(source, Path) else "built-in text"
        self.buffer = map_file(source) if isinstance(source, Path) else source
        self.data = np.frombuffer(self.buffer, dtype=np.uint8)
        self.begin = len(BOM) if self.buffer[:3] == BOM else 0
        self.checksum = 0  # CRC-32 of the text, known when `chunks` has gone through it once

    def __reduce__(self) -> tuple:
        return Corpus, (self.source,)

    def identity(self) -> str:
        return f"{len(self.data) - self.begin} bytes, crc32 {self.checksum:08x}"

    def chunks(self) -> Iterator[tuple[int, bytes]]:
        """Yields (offset, bytes) of pieces of about `CHUNK` bytes, all of them valid UTF-8.

        A piece ends behind a line feed if it holds one, else between two characters. Raises
        `UserError` with line number and byte offset of the first byte that is not UTF-8.
        """
        offset, line, size, self.checksum = self.begin, 1, len(self.data), 0
        while offset < size:
            end = min(offset + CHUNK, size)
            piece = self.buffer[offset:end]
            if end < size:
                cut = piece.rfind(b"\n") + 1
                if not cut:  # no line feed: step back over a cut character, or a cut CRLF
                    back = 0
                    while back < 4 and self.data[end - back] & 0xC0 == 0x80:
                        back += 1
                    end -= back % 4  # four in a row are not UTF-8: found here or next
                    cut = end - offset - (self.data[end - 1] == ord("\r"))
                piece = piece[:cut]
            if not piece.isascii():
                try:
                    piece.decode("utf-8")
                except UnicodeDecodeError as error:
                    line += piece.count(b"\n", 0, error.start)
                    utf16 = self.buffer[:2] in (b"\xff\xfe", b"\xfe\xff")
                    hint = "the file looks like UTF-16; " if utf16 else ""
                    raise UserError(
                        f"{self.name}, line {line}, byte offset {offset + error.start}: "
                        f"byte 0x{piece[error.start]:02x} is not UTF-8; {hint}save it as UTF-8"
                    ) from None
            yield offset, piece
            self.checksum = zlib.crc32(piece, self.checksum)
            line += piece.count(b"\n")
            offset += len(piece)


def map_file(path: Path) -> bytes | mmap.mmap:
    """Maps a regular file for reading. Raises `UserError` if it cannot be read."""
    try:
        if path.exists() and not path.is_file():
            raise UserError(f"--corpus-file {path} is not a regular file")
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    except OSError as error:
        raise UserError(f"--corpus-file {path}: {error.strerror}") from None


class Lines(Sequence[str]):
    """The samples of a corpus with one sample a line: `lines[i]` is a non-empty text.

    Only the offsets of first and last byte are held (uint32 below 4 GiB: 8 bytes a sample); the
    text is cut out of the map when it is asked for. Lines end in LF or CRLF, blank ones are
    skipped and counted in `blank`. With `jsonl`, a sample is the "text" of a JSON object, or with
    `chat` too the list under "messages".
    """

    def __init__(self, corpus: Corpus, jsonl: bool = False, chat: bool = False) -> None:
        self.corpus, self.jsonl, self.chat, self.blank = corpus, jsonl, chat, 0
        offsets = "I" if len(corpus.data) < 2**32 else "Q"
        starts, ends = array.array(offsets), array.array(offsets)
        open_since, has_text = corpus.begin, False  # the line that the last piece left open
        for offset, piece in corpus.chunks():
            block = np.frombuffer(piece, dtype=np.uint8)
            feeds = np.flatnonzero(block == ord("\n"))
            first = np.concatenate(([0], feeds + 1))
            first = first[first < len(block)]
            # A line whose bytes are all at most 32 holds nothing but spaces and control bytes.
            texts = np.maximum.reduceat(block, first) > 32
            texts[0] |= has_text
            begin = first + offset
            begin[0] = open_since
            end = feeds + offset
            has_text, open_since = False, offset + len(block)
            if len(feeds) < len(first):  # the last line goes on in the next piece, or is the last
                has_text, open_since = bool(texts[-1]), int(begin[-1])
                texts, begin = texts[:-1], begin[:-1]
            end = end - (corpus.data[end - 1] == ord("\r"))
            self.blank += int(len(texts) - texts.sum())
            starts.frombytes(begin[texts].astype(starts.typecode).tobytes())
            ends.frombytes(end[texts].astype(ends.typecode).tobytes())
        size = len(corpus.data)
        if open_since < size:  # no line feed at the end of the file
            self.blank += not has_text
            if has_text:
                starts.append(open_since)
                ends.append(size - (corpus.buffer[size - 1 : size] == b"\r"))
        self.starts = np.frombuffer(starts, dtype=starts.typecode)
        self.ends = np.frombuffer(ends, dtype=ends.typecode)
        self.text_sizes: np.ndarray | None = None
        if jsonl:
            self._check_jsonl()

    def _check_jsonl(self) -> None:
        """Parses every line once, so that a bad one is found now and not after an hour."""
        sizes = np.zeros(len(self), dtype=np.uint32)
        wanted = '{"text": "..."}' + (' or {"messages": [...]}' if self.chat else "")
        for i in range(len(self)):
            try:
                sample = self[i]
                if not isinstance(sample, str):
                    if not (self.chat and isinstance(sample, list) and sample):
                        raise TypeError
                    sample = "".join(m["role"] + m["content"] for m in sample)
                sizes[i] = len(sample.encode("utf-8"))
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                line = self.corpus.buffer[: self.starts[i]].count(b"\n") + 1
                reason = error.msg if isinstance(error, json.JSONDecodeError) else "another shape"
                raise UserError(
                    f"{self.corpus.name}, line {line}: not a JSON object like {wanted} ({reason})"
                ) from None
        self.starts, self.ends = self.starts[sizes > 0], self.ends[sizes > 0]
        self.blank += int((sizes == 0).sum())
        self.text_sizes = sizes[sizes > 0]

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> str | list[dict]:
        raw = self.corpus.buffer[int(self.starts[index]) : int(self.ends[index])]
        if not self.jsonl:
            return raw.decode("utf-8")
        content = json.loads(raw)
        if self.chat and "messages" in content:
            return list(content["messages"])  # a text in its place would pass for a sample
        return content["text"]

    def sizes(self, ids: slice | np.ndarray) -> np.ndarray:
        """UTF-8 bytes of the samples `ids`, int64."""
        if self.text_sizes is not None:
            return self.text_sizes[ids].astype(np.int64)
        return self.ends[ids].astype(np.int64) - self.starts[ids].astype(np.int64)


class Document:
    """A running text as a stream of byte tokens, without byte-order mark, CRLF read as LF.

    CRLF is not rewritten in memory: `marks` holds, for every 4 KiB, how many tokens lie before it.
    """

    BLOCK = 4096

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus
        size = len(corpus.data) - corpus.begin
        dropped = np.zeros(-(-size // self.BLOCK) + 1, dtype=np.int64)  # [k + 1]: CRs in block k
        for offset, piece in corpus.chunks():
            block = np.frombuffer(piece, dtype=np.uint8)
            if b"\r\n" in piece:
                crs = np.flatnonzero((block[:-1] == ord("\r")) & (block[1:] == ord("\n")))
                np.add.at(dropped, (crs + offset - corpus.begin) // self.BLOCK + 1, 1)
        self.marks = np.arange(len(dropped)) * self.BLOCK - np.cumsum(dropped)
        self.length = size - int(dropped.sum())

    def __len__(self) -> int:
        return self.length

    def text(self, begin: int, end: int) -> str:
        return self.read(begin, end).astype(np.uint8).tobytes().decode("utf-8", errors="ignore")

    def read(self, begin: int, end: int) -> np.ndarray:
        """Tokens `begin` up to `end` (exclusive), uint16."""
        base = self.corpus.begin
        if base + self.length == len(self.corpus.data):  # no CRLF anywhere
            return self.corpus.data[base + begin : base + end].astype(np.uint16)
        first, last = self.marks.searchsorted((begin, end - 1), side="right") - 1
        raw = self.corpus.buffer[base + first * self.BLOCK : base + (last + 1) * self.BLOCK]
        raw = raw.replace(b"\r\n", b"\n")[begin - self.marks[first] : end - self.marks[first]]
        return np.frombuffer(raw, dtype=np.uint8).astype(np.uint16)


class Without:
    """The numbers 0 … size-1 without some of them (sorted); holds only those left out.

    Like an array, it is indexed by a number or by an array of numbers.
    """

    def __init__(self, size: int, left_out: np.ndarray) -> None:
        self.size = size - len(left_out)
        self.jumps = np.array(left_out, dtype=np.int64)
        self.jumps -= np.arange(len(left_out))

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        return index + np.searchsorted(self.jumps, index, side="right")


def hold_out(size: int, fraction: float, seed: int) -> np.ndarray:
    """Sorted positions of the validation samples, int64: one at random out of each stretch.

    Exactly `round(size * fraction)`, but at least one sample is left for training.
    """
    count = min(round(size * fraction), max(size - 1, 0))
    random, held_out = np.random.default_rng([seed, 1]), np.empty(count, dtype=np.int64)
    for begin in range(0, count, SAMPLES_AT_ONCE):
        end = min(begin + SAMPLES_AT_ONCE, count)
        edges = np.arange(begin, end + 1) * size // count
        steps = random.random(end - begin) * np.diff(edges)
        held_out[begin:end] = edges[:-1] + steps.astype(np.int64)
    return held_out


class IndexedTextDataset(Dataset):
    """Non-empty texts; item `i` is `(record_id, text)`.

    `ids` picks a part of the texts (default: all); a record id is a text's position in the whole
    corpus. Raises `ValueError` for an empty text.
    """

    def __init__(self, texts: Sequence[str], ids: np.ndarray | Without | None = None) -> None:
        if not isinstance(texts, Lines):  # Lines holds no empty text by construction
            for i, text in enumerate(texts):
                if not text:
                    raise ValueError(f"text {i} is empty")
        self.texts = texts
        self.ids = Without(len(texts), np.arange(0)) if ids is None else ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> tuple[int, str]:
        if not 0 <= index < len(self):
            raise IndexError(f"item {index} of {len(self)}")
        record_id = int(self.ids[index])
        return record_id, self.texts[record_id]


def encode(text: str) -> np.ndarray:
    """The UTF-8 bytes of a text and EOS as tokens, uint16 `[bytes + 1]`."""
    tokens = np.frombuffer(text.encode("utf-8") + b"\0", dtype=np.uint8).astype(np.uint16)
    tokens[-1] = EOS
    return tokens


class DocumentPart:
    """Tokens `begin` up to `end` of a document, as one stream for `TokenWindows`."""

    def __init__(self, document: Document, begin: int, end: int) -> None:
        self.document, self.begin, self.lengths = document, begin, [end - begin]

    def read(self, stream: int, begin: int, end: int) -> np.ndarray:
        """Tokens of the part, uint16, cut at its end; there is only stream 0."""
        end = min(end, self.lengths[stream])
        return self.document.read(self.begin + begin, self.begin + end)


class SeparateSamples:
    """Each sample, closed by EOS, as a stream of its own for `TokenWindows`."""

    def __init__(self, texts: Lines, ids: np.ndarray | Without) -> None:
        self.texts, self.ids = texts, ids
        self.lengths = texts.sizes(ids[np.arange(len(ids))]) + 1

    def read(self, stream: int, begin: int, end: int) -> np.ndarray:
        """Tokens of sample `stream`, uint16, cut at its EOS."""
        return encode(self.texts[self.ids[stream]])[begin:end]


class JoinedSamples:
    """All samples, each closed by EOS, one after another as one stream for `TokenWindows`.

    Holds the token offset of every 64th sample only.
    """

    EVERY = 64

    def __init__(self, texts: Lines, ids: np.ndarray | Without) -> None:
        self.texts, self.ids = texts, ids
        offsets, length, step = [], 0, self.EVERY * 4096
        for begin in range(0, len(ids), step):
            sizes = texts.sizes(ids[np.arange(begin, min(begin + step, len(ids)))]) + 1
            offsets.append((length + np.cumsum(sizes) - sizes)[:: self.EVERY])
            length += int(sizes.sum())
        self.offsets = np.concatenate(offsets) if offsets else np.zeros(1, dtype=np.int64)
        self.lengths = [length]

    def read(self, stream: int, begin: int, end: int) -> np.ndarray:
        """Tokens of the joined samples, uint16, cut at the last EOS; there is only stream 0."""
        group = int(np.searchsorted(self.offsets, begin, side="right")) - 1
        position, parts = int(self.offsets[group]), []
        for i in range(group * self.EVERY, len(self.ids)):
            if position >= end:
                break
            tokens = encode(self.texts[self.ids[i]])
            parts.append(tokens[max(begin - position, 0) : end - position])
            position += len(tokens)
        return np.concatenate(parts)


class TokenWindows(Dataset):
    """Windows of `seq_len` tokens over the streams of a source; item `i` is `(i, tokens)`.

    Neighbours overlap by one token: a window of T tokens predicts T - 1 of them, so that every
    token of a stream, but for its first, is predicted exactly once. A source has `lengths`, the
    tokens of each stream, and `read(stream, begin, end)`, tokens as uint16, cut at the end.
    """

    def __init__(self, source: Any, seq_len: int) -> None:
        self.source, self.stride = source, seq_len - 1
        targets = np.maximum(np.asarray(source.lengths, dtype=np.int64) - 1, 0)
        self.windows_up_to = np.cumsum(-(-targets // self.stride))

    def __len__(self) -> int:
        return int(self.windows_up_to[-1]) if len(self.windows_up_to) else 0

    def __getitem__(self, index: int) -> tuple[int, np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        stream = int(self.windows_up_to.searchsorted(index, side="right"))
        window = index - (int(self.windows_up_to[stream - 1]) if stream else 0)
        begin = window * self.stride
        return index, self.source.read(stream, begin, begin + self.stride + 1)


@dataclasses.dataclass
class Data:
    """Training and validation samples, what was done to get them, and how to recognize them."""

    train: Dataset
    validation: Dataset
    summary: str
    identity: str  # length and checksum of the text
    chat: bool = False  # some samples are conversations


def build_data(settings: argparse.Namespace, tokenizer: Any = None) -> Data:
    """Reads the corpus and splits it: into bytes, or into the tokens of a `tokenizer`.

    Every rank does the same and gets the same; nothing here depends on the rank. Raises
    `UserError` for anything that cannot be trained on.
    """
    s = settings
    corpus = Corpus(s.corpus_file or builtin_text(s.builtin))
    if s.corpus_format == "document":
        return document_data(corpus, s, tokenizer)
    texts = Lines(corpus, jsonl=s.corpus_format == "jsonl", chat=tokenizer is not None)
    if not len(texts):
        raise UserError(
            f"{corpus.name} holds no samples: {counted(len(corpus.data), 'byte')}, "
            f"{counted(texts.blank, 'blank line')}"
        )
    dropped, counts = np.zeros(0, dtype=np.int64), Counter()
    for begin in () if tokenizer else range(0, len(texts), SAMPLES_AT_ONCE):
        tokens = texts.sizes(slice(begin, begin + SAMPLES_AT_ONCE)) + 1
        long = np.flatnonzero(tokens > s.seq_len)
        counts["overlong"] += len(long)
        counts["lost"] += int((tokens[long] - (s.overlong == "truncate") * s.seq_len).sum())
        if s.overlong == "drop":
            dropped = np.concatenate((dropped, long + begin))
    kept = Without(len(texts), dropped)
    held_out = kept[hold_out(len(kept), s.val_fraction, s.seed)]
    left_out = np.union1d(dropped, held_out) if len(dropped) else held_out
    parts = [Without(len(texts), left_out), held_out]
    if tokenizer:
        sets = [TokenizedSamples(map(IndexedTextDataset(texts, part).__getitem__, range(len(part))),
                                 tokenizer, s, counts) for part in parts]  # fmt: skip
    elif s.pack:
        sets = [TokenWindows(JoinedSamples(texts, part), s.seq_len) for part in parts]
    elif s.overlong == "split":
        sets = [TokenWindows(SeparateSamples(texts, part), s.seq_len) for part in parts]
    else:
        sets = [IndexedTextDataset(texts, part) for part in parts]
    if not len(sets[0]):
        raise UserError(
            f"of {counted(len(texts), 'sample')} none can be trained on: longer than --seq-len "
            f"{s.seq_len} tokens: {counts['overlong']}, no token to predict: {counts['unlabelled']}"
        )
    summary = (
        f"{counted(len(texts), 'sample')}, {len(held_out):,} held out, "
        f"{counted(texts.blank, 'blank line')} skipped"
    )
    if counts["overlong"] and not (s.pack and not tokenizer):
        done = {"truncate": "cut off", "drop": "left out", "split": "cut in pieces"}[s.overlong]
        summary += f"; {counts['overlong']:,} longer than {s.seq_len} tokens {done}"
        if s.overlong != "split":
            remedy = "; --overlong split keeps them" if not tokenizer else ""
            summary += f" ({counted(counts['lost'], 'token')} lost{remedy})"
    if counts["unlabelled"]:
        summary += f"; {counts['unlabelled']:,} without a token to predict left out"
    return Data(*sets, summary, corpus.identity(), chat=counts["chats"] > 0)


def document_data(corpus: Corpus, settings: argparse.Namespace, tokenizer: Any) -> Data:
    """A running text in full windows; its tail is held out."""
    s, document = settings, Document(corpus)
    cut = len(document) - round(len(document) * s.val_fraction)
    parts = [(0, cut), (cut, len(document))]
    if tokenizer:
        texts = [document.text(*part) if part[0] < part[1] else "" for part in parts]
        sets = [TokenizedSamples([(i, t)] if t else [], tokenizer, s, Counter())
                for i, t in enumerate(texts)]  # fmt: skip
    else:
        sets = [TokenWindows(DocumentPart(document, *part), s.seq_len) for part in parts]
    if not len(sets[0]):
        raise UserError(f"{corpus.name} is too short to train on: {counted(len(document), 'byte')}")
    summary = f"document of {len(document):,} bytes, the last {len(document) - cut:,} held out"
    return Data(*sets, summary, corpus.identity())


def builtin_text(name: str) -> bytes:
    """A text that needs no download: the lessons above, or the language reference of CPython."""
    if name == "lessons":
        return LESSONS.encode("utf-8")
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UserError(
            "--builtin python-docs: this Python carries no pydoc_data; use a full CPython, or "
            "--corpus-file"
        ) from None
    return "\n".join(topics[name] for name in sorted(topics)).encode("utf-8")


# ------------------------------------------------------------------------------------------
# Sampler
# ------------------------------------------------------------------------------------------


class EpochSampler(Sampler[int]):
    """The order of an epoch for one process: a permutation fixed by (seed, epoch).

    `set_epoch(epoch, start)` chooses the epoch and how many samples of it, counted over all
    ranks, were already trained on.
    """

    num_replicas, rank = 1, 0

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed = size, seed
        self.epoch, self.start = 0, 0

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        self.epoch, self.start = epoch, start

    def __len__(self) -> int:
        return len(range(self.start + self.rank, self.size, self.num_replicas))

    def __iter__(self) -> Iterator[int]:
        order = np.arange(self.size, dtype=np.uint32 if self.size < 2**32 else np.uint64)
        np.random.default_rng([self.seed, 0, self.epoch]).shuffle(order)
        # Rank r of N takes positions r, r + N, r + 2N, … So the first B samples of all ranks
        # together are the first N·B of the order: the batch that one process would have taken.
        for index in order[self.start + self.rank :: self.num_replicas]:
            yield int(index)


class ShardSampler(EpochSampler, DistributedSampler):
    """The share of one rank in the order of an epoch.

    It differs from its base `DistributedSampler` in three points: the order is sliced and never
    copied into a list, it can start inside an epoch, and nothing is repeated to make the shares
    even. A rank that runs out of samples first trains on padding that weighs nothing (see
    `updates_of_epoch`), so every sample counts exactly once an epoch.
    """

    def __init__(self, size: int, seed: int, num_replicas: int, rank: int) -> None:
        EpochSampler.__init__(self, size, seed)
        self.num_replicas, self.rank = num_replicas, rank


# ------------------------------------------------------------------------------------------
# Collators
# ------------------------------------------------------------------------------------------


def tiny_collator(items: Sequence[tuple[int, str | np.ndarray]], seq_len: int) -> dict:
    """Texts, or windows of tokens, as one padded batch.

    Args:
        items: (record_id, text or uint16 tokens) pairs. None at all gives one row of padding.
        seq_len: T; longer texts are cut off.

    Returns:
        input_ids int64 [B, T], padded with PAD; labels int64 [B, T], −100 at padding;
        record_ids int64 [B], −1 for a row of padding only.
    """
    rows = np.full((max(len(items), 1), seq_len), PAD, dtype=np.int64)
    for row, (_, content) in zip(rows, items):
        tokens = (encode(content) if isinstance(content, str) else content)[:seq_len]
        row[: len(tokens)] = tokens
    input_ids = torch.from_numpy(rows)
    record_ids = torch.tensor([record_id for record_id, _ in items] or [-1])
    labels = input_ids.masked_fill(input_ids == PAD, IGNORE)  # PAD never occurs in a text
    return {"input_ids": input_ids, "labels": labels, "record_ids": record_ids}


def valid_targets(labels: torch.Tensor) -> int:
    """How many tokens of a batch are predicted: labels [B, T] but for the first and −100."""
    return int((labels[:, 1:] != IGNORE).sum())


def tokenize(tokenizer: Any, content: str | list[dict]) -> tuple[np.ndarray, np.ndarray]:
    """One sample as token ids and labels, both int64 [T].

    Of a text, every token is learned, and the EOS behind it. Of a conversation, rendered by the
    tokenizer's chat template, only what the assistant says, up to its end-of-turn token.
    """
    if isinstance(content, str):
        ids = tokenizer(content, verbose=False)["input_ids"]
        if not ids or ids[-1] != tokenizer.eos_token_id:
            ids = [*ids, tokenizer.eos_token_id]
        return np.array(ids), np.array(ids)
    text, answers = render_chat(tokenizer, content)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = np.array(encoded["input_ids"])
    begin, end = np.array(encoded["offset_mapping"]).T
    labels = np.full(len(ids), IGNORE)
    # An end-of-turn token is special, but not always one of those that the tokenizer has names for.
    special = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
    for first, last in answers:
        inside = np.flatnonzero((first <= begin) & (begin < end) & (end <= last))
        ends = inside[np.isin(ids[inside], special)]
        if len(ends):  # what a template puts behind the end-of-turn token is no answer
            inside = inside[inside <= ends[-1]]
        labels[inside] = ids[inside]
    return ids, labels


def render_chat(tokenizer: Any, messages: list[dict]) -> tuple[str, list[tuple[int, int]]]:
    """A conversation as text, and the spans of characters that the assistant wrote.

    Few templates mark the assistant's part. But an answer is what rendering the conversation
    *with* it adds to rendering it *without* it, generation prompt included.
    """

    def render(upto: int, prompt: bool) -> str:
        return tokenizer.apply_chat_template(
            messages[:upto], tokenize=False, add_generation_prompt=prompt
        )

    if not tokenizer.chat_template:
        raise UserError("chat data needs a tokenizer with a chat template: an -Instruct model")
    try:
        text, answers = render(len(messages), False), []
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                before, after = render(i, True), render(i + 1, False)
                if not (after.startswith(before) and text.startswith(after)):
                    raise UserError(
                        f"the chat template rewrites what stands before message {i + 1}, so its "
                        "answer cannot be found; use a template that only appends"
                    )
                answers.append((len(before), len(after)))
    except UserError:
        raise
    except Exception as error:  # of the template language, for a role it does not know
        raise UserError(f"the chat template refuses a conversation: {reason_of(error)}") from None
    return text, answers


def fit(ids: np.ndarray, labels: np.ndarray, settings: argparse.Namespace, counts: Counter) -> list:
    """Cuts a sample to --seq-len: a list of none, one or several (ids, labels).

    Pieces of a split sample overlap by one token, so that each token is predicted once. A piece
    that predicts nothing is left out. `counts` notes what was done.
    """
    length, overlong = settings.seq_len, settings.overlong
    starts: Sequence[int] = [0]
    if len(ids) > length:
        counts["overlong"] += 1
        counts["lost"] += len(ids) - length * (overlong == "truncate")
        starts = {"truncate": [0], "drop": [], "split": range(0, len(ids) - 1, length - 1)}[
            overlong
        ]
    pieces = [(ids[i : i + length], labels[i : i + length]) for i in starts]
    kept = [piece for piece in pieces if (piece[1][1:] != IGNORE).any()]
    counts["unlabelled"] += len(pieces) - len(kept)
    return kept


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Packs samples into windows: for each window, the numbers of its samples.

    Best fit, longest first: each sample goes into the fullest window that still takes it. Bit k of
    `free` says that some window has k tokens left, so the best window is one shift and one lowest
    bit away.
    """
    windows: list[list[int]] = []
    with_room: dict[int, list[list[int]]] = {}
    free = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if fitting := free >> lengths[i]:
            room = lengths[i] + (fitting & -fitting).bit_length() - 1
            window = with_room[room].pop()
            if not with_room[room]:
                free &= ~(1 << room)
        else:
            room, window = capacity, []
            windows.append(window)
        window.append(i)
        room -= lengths[i]
        with_room.setdefault(room, []).append(window)
        free |= 1 << room
    return windows


class TokenizedSamples(Dataset):
    """Samples as tokens; item `i` is `(record_id, pieces)`, a piece being (ids, labels).

    One piece an item, or with --pack as many as fill a window. All are held in memory, on every
    rank, 16 bytes a token.
    """

    def __init__(
        self, samples: Any, tokenizer: Any, settings: argparse.Namespace, counts: Counter
    ) -> None:
        records, pieces = [], []
        for record_id, content in samples:
            counts["chats"] += not isinstance(content, str)
            try:
                cut = fit(*tokenize(tokenizer, content), settings, counts)
            except UserError as error:
                raise UserError(f"sample {record_id + 1}, blank lines left out: {error}") from None
            records += [record_id] * len(cut)
            pieces += cut
        windows: Sequence[Sequence[int]] = [[i] for i in range(len(pieces))]
        if settings.pack:
            windows = best_fit([len(ids) for ids, _ in pieces], settings.seq_len)
        self.items = [(records[w[0]], [pieces[i] for i in w]) for w in windows]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[int, list]:
        return self.items[index]


def qwen_collator(tokenizer: Any, settings: argparse.Namespace) -> Callable:
    """The collate function of a causal model: a closure over its tokenizer."""
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    def collate_fn(items: Sequence[tuple[int, Any]]) -> dict:
        """(record_id, text, conversation or pieces) pairs as one batch, padded to its longest.

        Returns input_ids, labels (−100 at padding, which is told by length: PAD may be EOS),
        attention_mask (1 at tokens) and record_ids; with --pack, instead of the mask, position_ids
        that restart at 0 with every piece. All int64 [B, T] but record_ids [B]. No items give one
        row that predicts nothing.
        """
        rows = []
        for _, content in items:
            if isinstance(content, str) or isinstance(content[0], dict):
                content = fit(*tokenize(tokenizer, content), settings, Counter())
            rows.append(content)
        nothing = [(np.array([pad, pad]), np.full(2, IGNORE))]
        rows = [row or nothing for row in rows] or [nothing]
        shape = len(rows), max(sum(len(ids) for ids, _ in row) for row in rows)
        input_ids, labels = torch.full(shape, pad), torch.full(shape, IGNORE)
        mask, positions = torch.zeros(shape, dtype=torch.int64), torch.arange(shape[1])
        positions = positions.repeat(shape[0], 1)
        for row, pieces in enumerate(rows):
            at = 0
            for ids, piece_labels in pieces:
                end = at + len(ids)
                input_ids[row, at:end] = torch.from_numpy(ids)
                # The first token of a piece has nothing before it to be predicted from.
                labels[row, at + 1 : end] = torch.from_numpy(piece_labels[1:])
                mask[row, at:end] = 1
                positions[row, end:] = torch.arange(shape[1] - end)  # the next piece, or padding
                at = end
        context = {"position_ids": positions} if settings.pack else {"attention_mask": mask}
        record_ids = torch.tensor([record_id for record_id, _ in items] or [-1])
        return {"input_ids": input_ids, "labels": labels, **context, "record_ids": record_ids}

    return collate_fn


# ------------------------------------------------------------------------------------------
# Models
# ------------------------------------------------------------------------------------------


class CausalLayer(nn.TransformerEncoderLayer):
    """PyTorch's pre-norm layer with its forward pass written out, always causal.

    The parameters, their names and the numbers are those of its base class; written out it is easy
    to step through, and copies fewer tensors.
    """

    def forward(
        self, src: torch.Tensor, src_mask: Any = None, src_key_padding_mask: Any = None,
        is_causal: bool = True,
    ) -> torch.Tensor:  # fmt: skip
        """src [B, T, D] → [B, T, D]; `src_mask` is what `is_causal` stands for."""
        batch, length, width = src.shape
        heads, attention = self.self_attn.num_heads, self.self_attn
        qkv = F.linear(self.norm1(src), attention.in_proj_weight)  # (B, T, 3·D)
        qkv = qkv.view(batch, length, 3, heads, width // heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # (B, heads, T, D/heads) each
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=True,
            dropout_p=attention.dropout if self.training else 0.0,
        )  # fmt: skip
        mixed = mixed.transpose(1, 2).reshape(batch, length, width)  # (B, T, D)
        hidden = src + self.dropout1(attention.out_proj(mixed))
        fed = self.dropout(self.activation(self.linear1(self.norm2(hidden))))  # (B, T, 4·D)
        return hidden + self.dropout2(self.linear2(fed))


def summed_loss(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [B, T, V], labels int64 [B, T] → summed cross-entropy in nats, number of targets.

    Position t predicts label t + 1; −100 is left out. The sum is float64 (on Metal float32).
    """
    # Shifting the labels instead of the logits spares a copy of the larger tensor.
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE).flatten()  # (B·T)
    logits = logits.flatten(0, 1).float()  # (B·T, V)
    losses = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none")
    return losses.sum(dtype=sum_dtype(losses)), (targets != IGNORE).sum()


class TinyCausalTransformer(nn.Module):
    """A byte-level causal Transformer: embeddings, `nn.TransformerEncoder`, norm, head.

    Pre-norm layers with GELU and a feed-forward width of 4 · d_model, after Radford et al. 2019
    (GPT-2); the contract for shapes: ids [B, T] → embeddings [B, T, d_model] → logits [B, T, 258].
    """

    def __init__(
        self,
        d_model: int = 64,
        layers: int = 1,
        heads: int = 4,
        dropout: float = 0.0,
        seq_len: int = 64,
    ) -> None:
        super().__init__()
        self.config = {
            "d_model": d_model, "layers": layers, "heads": heads,
            "dropout": dropout, "seq_len": seq_len,
        }  # fmt: skip
        self.token_emb = nn.Embedding(VOCAB, d_model)
        self.pos_emb = nn.Embedding(seq_len, d_model)
        self.drop = nn.Dropout(dropout)
        # No biases: that of the keys shifts all scores of a query alike, so its gradient is zero
        # but for rounding noise, which AdamW would blow up into steps that differ between runs.
        layer = CausalLayer(
            d_model, heads, 4 * d_model, dropout, "gelu",
            batch_first=True, norm_first=True, bias=False,
        )  # fmt: skip
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(d_model, bias=False)
        self.lm_head = nn.Linear(d_model, VOCAB, bias=False)
        self._initialize(layers)

    def _initialize(self, layers: int) -> None:
        """Normal(0, 0.02), and less for the two matrices of a layer that feed the residual stream:
        their sum over 2 · layers branches then keeps its scale (Radford et al. 2019, section 2.3).
        """
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2:
                residual = name.endswith(("out_proj.weight", "linear2.weight"))
                scale = 0.02 / math.sqrt(2 * layers) if residual else 0.02
                nn.init.normal_(parameter, std=scale)

    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """ids int64 [B, T] → next-token logits [B, T, 258]; T is at most seq_len."""
        length = input_ids.shape[1]
        hidden = self.token_emb(input_ids) + self.pos_emb.weight[:length]  # (B, T, d_model)
        # True above the diagonal: position i must not look at j > i. `CausalLayer` says the same
        # by is_causal=True and does not read the mask; PyTorch's own layer in its place would.
        # Padding is on the right, so that causality alone hides it from every real token.
        mask = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).triu(1)
        hidden = self.encoder(self.drop(hidden), mask=mask, is_causal=True)
        return self.lm_head(self.norm(hidden))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy in nats of logits[:, :-1] against labels[:, 1:].

        A scalar, float64 (on Metal float32), so that sums over ranks agree to 1e-7.
        Labels of −100 are left out; a batch without any label gives 0, with zero gradients.
        """
        total, count = summed_loss(self.logits(input_ids), labels)
        return total / count.clamp(min=1)


class FrozenHeadLoss(torch.autograd.Function):
    """Sum of the cross-entropies of softmax(h Wᵀ + b), without the [N, V] logits.

    With z = h Wᵀ + b, p = softmax(z) and target t, the loss is logsumexp(z) − z_t and its gradient
    by h is p W − W_t. The head is frozen, so no other gradient is asked for, and the forward pass
    can finish this one while the logits of a chunk exist: the largest tensor is [CHUNK, V].
    """

    CHUNK = 256  # rows

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, head: nn.Linear, targets: torch.Tensor):
        """hidden [N, D], head [D → V], targets int64 [N] → scalar, summed up in float64."""
        weight, bias = head.weight, head.bias
        total = torch.zeros((), dtype=sum_dtype(hidden), device=hidden.device)
        gradient = torch.empty(hidden.shape, dtype=torch.float32, device=hidden.device)
        buffer = weight.new_empty(min(FrozenHeadLoss.CHUNK, len(hidden)), len(weight))
        with torch.autocast(hidden.device.type, enabled=False):
            for at in range(0, len(hidden), FrozenHeadLoss.CHUNK):
                rows = hidden[at : at + FrozenHeadLoss.CHUNK].to(weight.dtype)  # (C, D)
                target = targets[at : at + FrozenHeadLoss.CHUNK, None]  # (C, 1)
                logits = torch.mm(rows, weight.t(), out=buffer[: len(rows)])  # (C, V)
                if bias is not None:
                    logits += bias
                logits = logits.float()  # fp32: no copy, all that follows is in place
                top = logits.amax(1, keepdim=True)
                chosen = logits.gather(1, target)
                normalizer = logits.sub_(top).exp_().sum(1, keepdim=True)  # logits is now e^(z-top)
                total += (normalizer.log() + top - chosen).sum(dtype=total.dtype)
                part = gradient[at : at + FrozenHeadLoss.CHUNK]
                part.copy_(torch.mm(logits.to(weight.dtype), weight)).div_(normalizer)  # p W
                part.sub_(weight[target[:, 0]])  # − W_t
        ctx.save_for_backward(gradient)
        ctx.dtype = hidden.dtype
        return total

    @staticmethod
    def backward(ctx: Any, by_total: torch.Tensor):
        (gradient,) = ctx.saved_tensors
        return (gradient * by_total).to(ctx.dtype), None, None


class CausalLMWithLoss(nn.Module):
    """A PEFT model whose forward pass returns the mean loss of its batch: the module DDP wraps.

    Of a padded batch, the real tokens are moved into one row with positions that restart, so that
    nothing is computed for padding, as long as that row is short: attention grows with its square.
    """

    FLATTEN_UP_TO = 1024  # tokens

    def __init__(self, peft_model: Any) -> None:
        super().__init__()
        self.model = peft_model

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor,
        attention_mask: torch.Tensor | None = None, position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """int64 [B, T] each → mean cross-entropy in nats over labels[:, 1:], 0 without any.

        Either the mask is given, or positions that restart at 0 with every sample: transformers
        then lets the samples of a row attend to themselves only.
        """
        targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE)  # position t predicts token t + 1
        if attention_mask is not None:
            real = attention_mask.bool()
            if real.all():
                attention_mask = None  # SDPA has a faster path for a plain causal mask
            elif 0 < int(real.sum()) <= self.FLATTEN_UP_TO:
                position_ids = (real.cumsum(1) - 1)[real][None]  # (1, tokens)
                input_ids, targets = input_ids[real][None], targets[real][None]
                attention_mask = None
        causal = self.model.get_base_model()  # the adapters sit inside it
        hidden = causal.base_model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids,
            use_cache=False,  # with a cache, positions that restart would not separate samples
        ).last_hidden_state  # (B, T, D)  # fmt: skip
        learned = targets != IGNORE
        total = FrozenHeadLoss.apply(
            hidden[learned], causal.get_output_embeddings(), targets[learned]
        )
        return total / learned.sum().clamp(min=1)


def load_base(settings: argparse.Namespace) -> tuple[Any, Any]:
    """The base model and its tokenizer, from a local folder or by id from the hub.

    Runs no code from the model's repository. Raises `UserError` for whatever keeps it from being
    a causal model that can be used here.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # no warning when workers fork
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # PEFT asks transformers by a name that is on its way out.
    warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
    name, folder = settings.base_model, Path(settings.base_model).expanduser()
    trouble, local = f"--base-model {name}", folder.is_dir()
    remedy = "; a folder that save_pretrained wrote needs no network: --base-model FOLDER"
    if local and not (folder / "config.json").is_file():
        raise UserError(f"{trouble}: the folder has no config.json{remedy}")
    if not local and not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name):
        raise UserError(f"{trouble}: no such folder{remedy}")
    name = str(folder.resolve()) if local else name  # adapter_config.json keeps it: absolute
    options = {"local_files_only": local or hub_is_unknown(), "trust_remote_code": False}
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
        model, report = AutoModelForCausalLM.from_pretrained(
            name, dtype=dtypes[settings.precision], attn_implementation="sdpa",
            output_loading_info=True, **options,
        )  # fmt: skip
    except Exception as error:  # of the hub, the disk, the parser: one line for any of them
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{trouble}: {type(error).__name__}: {reason}{remedy}") from None
    if report["missing_keys"]:  # transformers would go on with random values
        missing = ", ".join(sorted(report["missing_keys"])[:3])
        raise UserError(f"{trouble}: the files lack the weights {missing}{remedy}")
    if not tokenizer("a")["input_ids"]:  # transformers makes up an empty one
        raise UserError(f"{trouble}: the folder has no tokenizer{remedy}")
    if not tokenizer.is_fast or tokenizer.eos_token_id is None:
        raise UserError(f"{trouble}: it needs a fast tokenizer with an EOS token")
    with torch.no_grad():
        probe = torch.tensor([[1, 2], [1, 3]])
        logits = model(probe, use_cache=False).logits  # (2, 2, V)
        plain = model.get_output_embeddings()(model.base_model(probe, use_cache=False)[0])
    # What a causal model says of the first token cannot know the second.
    if not torch.allclose(logits[0, 0], logits[1, 0], rtol=1e-3, atol=1e-3):
        raise UserError(f"{trouble}: {type(model).__name__} is not a causal model")
    if not torch.allclose(logits, plain, rtol=1e-3, atol=1e-3):
        raise UserError(f"{trouble}: its logits are not the plain output of its head (soft caps?)")
    return model, tokenizer


def hub_is_unknown() -> bool:
    """Whether the hub's name does not resolve, which its client would try again for a minute."""
    import urllib.parse
    import urllib.request

    from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE

    if not HF_HUB_OFFLINE and not urllib.request.getproxies():  # a proxy resolves names itself
        try:
            socket.getaddrinfo(urllib.parse.urlsplit(ENDPOINT).hostname, None)
        except OSError:
            return True
    return False


def checkpoint_layers(model: Any) -> None:
    """Makes the layers keep their input only and compute the rest again in the backward pass.

    The last sixth keeps its results: backward begins there, at once after they were computed. That
    gives a sixth of the repeated work back, for a small part of the memory saved.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    # Not reentrant: DDP then sees each gradient once, and frozen embeddings may come first.
    enable = getattr(model, "activation_checkpointing_enable", None)  # its newer name
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    for layer in layers[len(layers) - len(layers) // 6 :]:
        layer.gradient_checkpointing = False
        recompute_gates(layer)


def recompute_gates(model: Any) -> None:
    """Makes gated feed-forward layers keep less: act(gate) · up is computed again in backward.

    Of the three widest tensors of a layer one goes, and only element-wise work is done twice.
    Layers that compute something else stay as they are.
    """

    def gated(mlp: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [..., D] → [..., D], as the layer's own forward pass."""
        product = checkpoint(
            lambda gate, up: mlp.act_fn(gate) * up, mlp.gate_proj(hidden), mlp.up_proj(hidden),
            use_reentrant=False, preserve_rng_state=False,
        )  # fmt: skip
        return mlp.down_proj(product)

    parts = ("gate_proj", "up_proj", "down_proj", "act_fn")
    for mlp in [m for m in model.modules() if all(hasattr(m, part) for part in parts)]:
        weight = mlp.gate_proj.weight
        probe = torch.linspace(-1, 1, weight.shape[1], dtype=weight.dtype)[None]
        with torch.no_grad():
            if torch.allclose(mlp(probe), gated(mlp, probe), rtol=1e-3):
                mlp.forward = functools.partial(gated, mlp)


class SixteenBitDropout(nn.Dropout):
    """Dropout on the CPU with one random 64-bit number for four elements.

    PyTorch draws one number an element, on one thread: 4 to 6 % of a LoRA update. An element goes
    where its 16 bits are below p · 65,536; p is rounded to that, and the rest divided by 1 − p.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[...] → [...], some elements 0, their expectation kept; in eval mode nothing changes."""
        if not self.training or not self.p or input.device.type != "cpu":
            return super().forward(input)
        gone = round(self.p * 2**16)
        words = torch.empty(-(-input.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
        bits = words.view(torch.int16)[: input.numel()].view(input.shape)  # −32,768 to 32,767
        return input.masked_fill(bits < gone - 2**15, 0) * (2**16 / (2**16 - gone))


def add_lora(model: Any, settings: argparse.Namespace) -> Any:
    """Freezes the base and adds adapters in fp32 (Hu et al. 2021) to the Linear layers named."""
    from peft import LoraConfig, get_peft_model

    embeddings = (model.get_output_embeddings(), model.get_input_embeddings())
    linear = {
        name.rpartition(".")[2] for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module not in embeddings
    }  # fmt: skip
    targets = [name.strip() for name in settings.lora_targets.split(",") if name.strip()]
    wrong = [name for name in targets if name not in linear]
    if wrong or not targets:  # PEFT overlooks a wrong name beside a right one
        raise UserError(
            f"--lora-targets: no Linear layer is called {', '.join(wrong) or '(nothing)'}; this "
            f"model has {', '.join(sorted(linear))}"
        )
    config = LoraConfig(
        r=settings.lora_r, lora_alpha=settings.lora_alpha, lora_dropout=settings.lora_dropout,
        target_modules=targets, bias="none", task_type="CAUSAL_LM",
    )  # fmt: skip
    peft_model = get_peft_model(model, config, autocast_adapter_dtype=True)
    for module in peft_model.modules():
        for name in getattr(module, "lora_dropout", ()):
            module.lora_dropout[name] = SixteenBitDropout(settings.lora_dropout)
    if settings.gradient_checkpointing:
        checkpoint_layers(model)
    else:
        recompute_gates(model)
    return peft_model


def sum_dtype(like: torch.Tensor) -> torch.dtype:
    """The type that sums of losses are kept in: float64, which only Metal GPUs lack."""
    return torch.float32 if like.device.type == "mps" else torch.float64


def trained_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """(name, parameter) of all that is trained, in name order."""
    return sorted((n, p) for n, p in model.named_parameters() if p.requires_grad)


def frozen_checksum(model: nn.Module) -> str:
    """CRC-32 over the frozen weights in name order."""
    crc32 = 0
    for _, parameter in sorted(model.named_parameters()):
        if not parameter.requires_grad:
            values = parameter.detach().cpu().contiguous().flatten().view(torch.uint8)
            crc32 = zlib.crc32(values.numpy(), crc32)
    return f"{crc32:08x}"


def digest_of(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """sha256 of (name, tensor) pairs, in their order: each name, then its values' bytes."""
    digest = hashlib.sha256()
    for name, tensor in named:
        digest.update(name.encode("utf-8"))
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def parameter_digest(model: nn.Module) -> str:
    """sha256 of the trained parameters in name order."""
    return digest_of(trained_parameters(model))


class QuickStartAdamW(torch.optim.AdamW):
    """PyTorch's AdamW, its methods without the wrappers that import torch.compile's machinery.

    That import takes nearly as long as that of torch, and serves optimizers that are compiled.
    """

    add_param_group, state_dict, load_state_dict, zero_grad = (
        getattr(method, "__wrapped__", method)  # what functools.wraps keeps: the method itself
        for method in (
            torch.optim.AdamW.add_param_group, torch.optim.AdamW.state_dict,
            torch.optim.AdamW.load_state_dict, torch.optim.AdamW.zero_grad,
        )
    )  # fmt: skip
    step = torch.no_grad()(getattr(torch.optim.AdamW.step, "__wrapped__", torch.optim.AdamW.step))


def build_optimizer(model: nn.Module, settings: argparse.Namespace) -> torch.optim.AdamW:
    """AdamW over the trained parameters; weight decay on matrices only."""
    trained = [parameter for _, parameter in trained_parameters(model)]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return QuickStartAdamW(groups, lr=settings.lr, betas=(0.9, 0.95), fused=True)


def learning_rate(update: int, settings: argparse.Namespace, updates: int) -> float:
    """The rate of update 0, 1, 2, …: a function of completed updates and nothing else."""
    s = settings
    if update < s.warmup_steps:
        return s.lr * (update + 1) / s.warmup_steps
    if s.schedule == "constant":
        return s.lr
    progress = (update - s.warmup_steps) / max(updates - s.warmup_steps, 1)  # in [0, 1)
    if s.schedule == "linear":
        return s.lr * (1 - progress)
    return s.lr * 0.5 * (1 + math.cos(math.pi * progress))


# ------------------------------------------------------------------------------------------
# The training step
# ------------------------------------------------------------------------------------------


def updates_of_epoch(
    loader: DataLoader, sampler: EpochSampler, settings: argparse.Namespace
) -> Iterator[list[dict]]:
    """Yields the micro-batches of one update after another, until the epoch ends.

    All ranks get the same number of updates and of micro-batches in each: what is left of the
    epoch is known to all of them, and a rank whose share ran out gets a row of padding.
    """
    ranks, batch = sampler.num_replicas, settings.batch_size
    left = sampler.size - sampler.start
    batches = iter(loader)
    empty = loader.collate_fn([])
    while left > 0:
        samples = min(left, batch * settings.grad_accum * ranks)  # of this update, over all ranks
        micro_batches = math.ceil(math.ceil(samples / ranks) / batch)
        yield [next(batches, empty) for _ in range(micro_batches)]
        left -= samples


@dataclasses.dataclass
class StepResult:
    """What one update did, over all ranks and micro-batches."""

    loss: float  # nats per token, mean over all valid tokens of the global batch
    tokens: int  # valid targets in the global batch
    grad_norm: float  # L2 norm of the gradient of that loss, before clipping
    skipped: bool = False  # the fp16 scaler found an overflow, and left the weights alone
    stop: int = 0  # number of a signal that reached any rank before its gradient was sent


def training_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    micro_batches: list[dict],
    launch: Launch,
    settings: argparse.Namespace,
    stop: int = 0,
) -> StepResult:
    """One update from the micro-batches of this rank; `model` is DDP-wrapped or bare.

    The gradient to follow is that of the mean over all valid tokens of the global batch,

        G = (1/n) · Σ_r Σ_j ∇S_rj ,   n = Σ_r Σ_j n_rj ,

    where S_rj is the summed loss of micro-batch j on rank r and n_rj its number of valid tokens.
    The model returns the mean S_rj / n_rj, and DDP divides the sum over the N ranks by N. So each
    rank runs backward on (n_rj / c) · mean = S_rj / c, with a constant c, and DDP leaves

        g = (1/N) · Σ_r Σ_j ∇S_rj / c ,   hence   G = (c·N / n) · g .

    n is only known when all ranks have added up; it travels together with the loss, after the
    backward pass. Any c gives the same G, and with a constant a rank can begin before it knows n.
    c is the most targets that a rank can have in an update: 8 windows of 64 tokens give 8 · 63 =
    504, since the first token of a window has nothing before it. Without padding c·N / n is 1.

    `where` is told each phase, so that the watchdog can name the one in which a rank hangs.
    """
    device = launch.device
    capacity = settings.batch_size * settings.grad_accum * (settings.seq_len - 1)  # c
    # What ranks must agree on, as one message: [Σ S_rj, Σ n_rj, SIGTERM?, SIGINT?]
    totals = torch.tensor([0, 0, stop == signal.SIGTERM, stop == signal.SIGINT], device=device)
    totals = totals.to(sum_dtype(totals))

    for j, batch in enumerate(micro_batches):
        last = j == len(micro_batches) - 1
        # DDP decides in the forward pass whether the backward pass will synchronize, so both are
        # inside no_sync: local gradients add up until the last micro-batch sends the sum.
        accumulate = not last and launch.world_size > 1
        with model.no_sync() if accumulate else contextlib.nullcontext():
            tokens = valid_targets(batch["labels"])
            launch.where.enter("forward")
            with autocast(launch, settings):
                loss = model(**inputs_of(batch, device))
            # Ranks meet: in the last backward pass DDP all-reduces bucket after bucket.
            launch.where.enter("backward", meets=last)
            scaler.scale(loss * (tokens / capacity)).backward()
        totals[0] += loss.detach() * tokens
        totals[1] += tokens

    launch.where.enter("sum of losses", meets=True)
    if launch.world_size > 1:
        dist.all_reduce(totals)  # ranks meet: the only other message of a step, 32 bytes
    loss_sum, tokens, terminated, interrupted = totals.tolist()
    launch.where.enter("optimizer")
    scaler.unscale_(optimizer)  # before anything looks at the size of a gradient
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
    # The gradients hold g; G is g times this, and clipping will be one factor more.
    correction = capacity * launch.world_size / max(tokens, 1)  # c·N / n
    norm = float(nn.utils.get_total_norm(gradients)) * correction
    result = StepResult(loss_sum / max(tokens, 1), int(tokens), norm)
    result.stop = int(signal.SIGTERM if terminated else signal.SIGINT if interrupted else 0)

    # Every rank sees the same averaged gradient and the same loss, so all come to one verdict.
    if not math.isfinite(result.loss):
        raise Diverged(f"the loss is {result.loss}")
    if not math.isfinite(norm) and not scaler.is_enabled():
        raise Diverged(f"the loss is {result.loss:.4f}, but the gradient norm is {norm}")
    shrink = min(1.0, settings.clip / (norm + 1e-6)) if settings.clip else 1.0
    if math.isfinite(norm):
        # One kernel for all gradients instead of one each; clip_grads_with_norm_ does it so, too.
        torch._foreach_mul_(gradients, correction * shrink)
    before = scaler.get_scale()
    scaler.step(optimizer)  # fp16: not taken when unscale_ found an overflow
    scaler.update()
    result.skipped = scaler.get_scale() < before
    if scaler.get_scale() < 1:  # it begins at 65,536; without a scaler it is 1
        raise Diverged("fp16 gradients overflow even without a loss scale")
    optimizer.zero_grad(set_to_none=True)
    return result


def autocast(launch: Launch, settings: argparse.Namespace) -> contextlib.AbstractContextManager:
    """Runs matrix products in bf16 or fp16 where asked for; weights and loss stay fp32."""
    if settings.precision == "fp32":
        return contextlib.nullcontext()
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[settings.precision]
    return torch.autocast(launch.device.type, dtype=dtype)


def inputs_of(batch: dict, device: torch.device) -> dict:
    """What the model takes of a batch, on its device."""
    return {k: v.to(device, non_blocking=True) for k, v in batch.items() if k != "record_ids"}


# ------------------------------------------------------------------------------------------
# Validation and sampling
# ------------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loader: DataLoader,
    launch: Launch,
    settings: argparse.Namespace,
    stop: StopRequest | None = None,
) -> float | None:
    """Mean loss over the validation set in nats per token; each sample counts once.

    `model` is the bare module: the DDP wrapper would meet the other ranks in its forward pass.
    Sums come before the mean, so the value depends neither on the number of ranks nor on the
    batch size. Returns None when a signal reached any rank meanwhile.
    """
    ranks, model_was_training = launch.world_size, model.training
    rounds = math.ceil(math.ceil(len(loader.dataset) / ranks) / settings.batch_size)
    totals = torch.zeros(2, device=launch.device)  # summed loss, valid tokens
    totals = totals.to(sum_dtype(totals))
    batches = iter(loader)
    model.eval()
    for _ in range(rounds):  # as many on every rank, so that all can agree to stop
        launch.where.enter("validation", meets=True)
        if stop:
            stop.number = agreed(stop.number, launch)  # ranks meet
            if stop.number:
                model.train(model_was_training)
                return None
        batch = next(batches, None)
        if batch is not None:  # a rank's share may be one batch shorter
            tokens = valid_targets(batch["labels"])
            with autocast(launch, settings):
                totals[0] += model(**inputs_of(batch, launch.device)) * tokens
            totals[1] += tokens
    if ranks > 1:
        dist.all_reduce(totals)  # ranks meet
    model.train(model_was_training)
    return float(totals[0] / totals[1])


def agreed(number: int, launch: Launch) -> int:
    """The largest of all ranks' numbers. Ranks meet."""
    if launch.world_size == 1:
        return number
    largest = torch.tensor(float(number), device=launch.device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)


@torch.no_grad()
def generate(
    model: TinyCausalTransformer, prompt: str, length: int, seed: int, temperature: float = 0.8
) -> str:
    """A continuation of the prompt by up to `length` bytes, sampled; it ends at EOS.

    Random numbers come from a generator of its own, so that sampling never changes the training.
    """
    device = model.lm_head.weight.device
    random = torch.Generator().manual_seed(seed)
    tokens = list(prompt.encode("utf-8"))
    begin, was_training = len(tokens), model.training
    # The last position of a window has nothing to predict in training, so it has learned nothing.
    trained_positions = model.config["seq_len"] - 1
    model.eval()
    for _ in range(length):
        window = torch.tensor([tokens[-trained_positions:]], device=device)
        logits = model.logits(window)[0, -1].float().cpu() / temperature
        logits[PAD] = -math.inf
        token = int(torch.multinomial(logits.softmax(-1), 1, generator=random))
        if token == EOS:
            break
        tokens.append(token)
    model.train(was_training)
    return bytes(tokens[begin:]).decode("utf-8", errors="replace")


@torch.no_grad()
def qwen_answer(
    peft_model: Any, tokenizer: Any, prompt: str, chat: bool, base: bool = False, length: int = 48
) -> str:
    """A greedy continuation by up to `length` tokens, or with `chat` the answer to the prompt.

    With `base`, the adapter is switched off: what the model said before it was trained.
    """
    if chat:
        turn = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=not chat)
    was_training, ends = peft_model.training, end_tokens(tokenizer, chat)
    peft_model.eval()
    with peft_model.disable_adapter() if base else contextlib.nullcontext():
        tokens = peft_model.generate(
            **inputs.to(peft_model.device), max_new_tokens=length, do_sample=False,
            eos_token_id=ends, pad_token_id=ends[0],
        )  # fmt: skip
    peft_model.train(was_training)
    return tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def end_tokens(tokenizer: Any, chat: bool) -> list[int]:
    """The tokens that end a text after this training: EOS, or what closes a turn."""
    ends = {tokenizer.eos_token_id}
    if chat:
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        labels = tokenize(tokenizer, turns)[1]
        ends.add(int(labels[labels != IGNORE][-1]))
    return sorted(ends)


# ------------------------------------------------------------------------------------------
# Files and checkpoints
# ------------------------------------------------------------------------------------------

ARTIFACTS = (
    "run.json", "metrics.jsonl", "loss_curve.png", "tiny_transformer.pt", "adapter", "merged",
    "tensorboard", "checkpoints",
)  # fmt: skip


def write_file(path: Path, write: Callable[[Any], None]) -> None:
    """Writes a file completely or not at all: beside it, flushed to the disk, renamed.

    `write` gets the open binary file. Raises `WriteError`; the old content of `path` then stays.
    """
    beside = path.with_name(path.name + ".partial")
    try:
        with open(beside, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
        flush_folder(path.parent)
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        with contextlib.suppress(OSError):
            beside.unlink()
        raise WriteError(f"cannot write {path}: {reason_of(error)}") from None


def write_json(path: Path, content: dict) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    write_file(path, lambda file: file.write(text.encode("utf-8")))


def flush_folder(folder: Path) -> None:
    """Makes renames inside a folder survive a power cut, where the system can do that."""
    with contextlib.suppress(OSError):  # Windows opens no folders
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def counted(number: int, noun: str) -> str:
    """'1 rank', '2 ranks', '1,000 ranks'."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def reason_of(error: Exception) -> str:
    """What went wrong, in one line."""
    text = " ".join(str(error).split())[:300]
    return getattr(error, "strerror", None) or text or type(error).__name__


class Checksum:
    """A binary file that counts its bytes and their CRC-32 while it is written."""

    def __init__(self, file: Any) -> None:
        self.file, self.bytes, self.crc32 = file, 0, 0
        self.error: OSError | None = None  # PyTorch reports a full disk in words of its own

    def write(self, data: Any) -> int:
        """Writes bytes and returns how many; `torch.save` calls it. Raises `OSError`."""
        self.bytes, self.crc32 = self.bytes + len(data), zlib.crc32(data, self.crc32)
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self.file.flush()


def save_tensors(content: dict, file: Any) -> Checksum:
    """`torch.save` into an open file; returns its size and checksum. Raises `OSError`."""
    counted = Checksum(file)
    try:
        torch.save(content, counted)
    except RuntimeError as error:
        raise counted.error or error from None
    return counted


def checkpoints_in(folder: Path) -> list[tuple[Path, dict]]:
    """(path, manifest) of the checkpoints in a run folder, newest first; {} if it is unreadable."""
    found = []
    for path in sorted((folder / "checkpoints").glob("step-*"), reverse=True):
        content = b""
        with contextlib.suppress(OSError):
            content = (path / "manifest.json").read_bytes()
        found.append((path, read_manifest(content)))
    return found


def read_manifest(content: bytes) -> dict:
    """A checkpoint's manifest, or {} if it is none."""
    with contextlib.suppress(ValueError, TypeError, AttributeError, KeyError):
        manifest = json.loads(content)
        if manifest["files"]["state.pt"] and {"step", "val_loss"} <= manifest.keys():
            return manifest
    return {}


def damage(path: Path, manifest: dict) -> str | None:
    """What is wrong with a checkpoint, or None: sizes and checksums of its files are compared."""
    if not manifest:
        return "manifest.json is missing or damaged"
    for name, expected in manifest["files"].items():
        crc32 = size = 0
        try:
            with open(path / name, "rb") as file:
                while piece := file.read(CHUNK):
                    crc32, size = zlib.crc32(piece, crc32), size + len(piece)
        except OSError as error:
            return f"{name}: {reason_of(error)}"
        if [size, crc32] != expected:
            return f"{name} has {size} bytes and crc32 {crc32}, not {expected[0]} and {expected[1]}"
    return None


class CheckpointWriter:
    """Writes checkpoints beside the training, on rank 0, one at a time.

    A checkpoint is a folder `checkpoints/step-00000100` with `state.pt` and `manifest.json` (step,
    validation loss, sizes and CRC-32s). It is written under a name that begins with a dot, flushed
    and renamed, so that what is visible is complete. Only then the old ones go: `keep` newest stay,
    and the one with the best validation loss.
    """

    def __init__(self, folder: Path, settings: argparse.Namespace) -> None:
        self.folder, self.keep = folder, settings.keep
        self.mirror = Mirror(settings.mirror) if settings.mirror else None
        self.worker = ThreadPoolExecutor(1, initializer=step_aside)
        self.pending: Future | None = None
        for leftover in (folder / "checkpoints").glob(".*step-*"):  # of a killed save
            final = leftover.with_name(leftover.stem[1:])
            if leftover.suffix == ".old" and not final.exists():
                leftover.rename(final)  # killed while a new one took its place
            else:
                shutil.rmtree(leftover, ignore_errors=True)

    def save(self, state: dict, manifest: dict) -> None:
        """Hands over a copy of the state, which nobody may change until `wait` has returned."""
        self.wait()
        self.pending = self.worker.submit(self._write, state, manifest)

    def leave_behind(self, step: int) -> None:
        """Puts aside what is newer than the checkpoint that the run goes on from.

        It is damaged, or of a course that the run leaves; it goes when a new one is safe.
        """
        for path in (self.folder / "checkpoints").glob("step-*"):
            if path.name > f"step-{step:08d}":
                aside = path.with_name(f"left-{path.name}")
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)

    def check(self) -> None:
        """Raises the `WriteError` of a save that failed in the background."""
        if self.pending and self.pending.done():
            self.wait()

    def wait(self) -> None:
        pending, self.pending = self.pending, None
        if pending:
            pending.result()

    def _write(self, state: dict, manifest: dict) -> None:
        final = self.folder / "checkpoints" / f"step-{manifest['step']:08d}"

        def write(partial: Path) -> None:
            """The two files; the manifest second, because it holds the other's checksum."""

            def write_state(file: Any) -> None:
                """`state.pt`, whose size and checksum go into the manifest."""
                # The manifest holds a checksum already: the file need not compute another.
                torch.serialization.set_crc32_options(False)
                try:
                    counted = save_tensors(state, file)
                finally:
                    torch.serialization.set_crc32_options(True)
                manifest["files"] = {"state.pt": [counted.bytes, counted.crc32]}

            write_file(partial / "state.pt", write_state)
            write_json(partial / "manifest.json", manifest)

        write_folder(final, write)
        left = list(final.parent.glob("left-*"))
        for path in left + superseded(checkpoints_in(self.folder), self.keep, final.name):
            discard(path)
        if self.mirror:
            self.mirror.put_checkpoint(self.folder, final, self.keep)

    def close(self, results: bool) -> None:
        """Ends the background work; with `results`, the finished run's files are mirrored too."""
        self.wait()
        if results and self.mirror:
            self.worker.submit(self.mirror.put_results, self.folder).result()
        self.worker.shutdown()


def step_aside() -> None:
    """Lets the training go before the writer's thread, but not so far that it waits (Linux)."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def superseded(found: list[tuple[Path, dict]], keep: int, newest: str) -> list[Path]:
    """Of (path, manifest), newest first: all but the `keep` newest and the best.

    What is beyond `newest`, the one just written, is of a course that the run has left.
    """
    beyond = [path for path, _ in found if path.name > newest]
    found = [(path, manifest) for path, manifest in found if path.name <= newest]
    rated = [(m["val_loss"], path) for path, m in found if m and m["val_loss"] is not None]
    best = min(rated)[1] if rated else None
    return beyond + [path for path, _ in found[keep:] if path != best]


def discard(path: Path) -> None:
    """Removes a checkpoint: first its name, so that it is never visible in part."""
    dying = path.with_name(f".{path.name}.gone")  # not .old, which the next start puts back
    shutil.rmtree(dying, ignore_errors=True)
    path.rename(dying)
    shutil.rmtree(dying, ignore_errors=True)


class Mirror:
    """A copy of the run on any file system that fsspec knows.

    Object stores cannot rename, so a checkpoint there is complete when its manifest has come, which
    is sent last and deleted first. Raises `UserError` for a URL that cannot be used at all, and
    `WriteError` when a file did not get through in four tries.
    """

    def __init__(self, url: str) -> None:
        import fsspec

        try:
            self.fs, self.root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise UserError(f"{url}: {reason_of(error)}") from None
        self.url, self.root = url, self.root.rstrip("/")

    def put_checkpoint(self, folder: Path, path: Path, keep: int) -> None:
        """Copies the checkpoint `path` and the log so far; removes what `keep` does not keep."""
        for name in ("run.json", "metrics.jsonl"):
            self._put(folder / name, name)
        for file in ("state.pt", "manifest.json"):
            self._put(path / file, f"checkpoints/{path.name}/{file}")
        for old in superseded(self.checkpoints(), keep, path.name):
            place = f"{self.root}/checkpoints/{old}"
            for name in (f"{place}/manifest.json", place):  # it is complete until the manifest goes
                if self.fs.exists(name):
                    self._try(f"remove {old}", self.fs.rm, name, recursive=True)

    def put_results(self, folder: Path) -> None:
        """Copies all that a finished run wrote beside its checkpoints."""
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if path.is_file() and not name.startswith(("checkpoints/", ".")):
                self._put(path, name)

    def checkpoints(self) -> list[tuple[Path, dict]]:
        """(name, manifest) of the checkpoints there, newest first; {} if it is unreadable."""
        self.fs.invalidate_cache()
        folders, found = [], []
        with contextlib.suppress(FileNotFoundError):
            folders = self.fs.ls(f"{self.root}/checkpoints", detail=False)
        for path in sorted((folder.rstrip("/") for folder in folders), reverse=True):
            name, content = path.split("/")[-1], b""
            if name.startswith("step-"):
                with contextlib.suppress(FileNotFoundError):
                    content = self.fs.cat_file(f"{path}/manifest.json")
                found.append((Path(name), read_manifest(content)))
        return found

    def fetch(self, name: str, to: Path) -> None:
        """Copies one file of the run from there."""
        to.parent.mkdir(parents=True, exist_ok=True)
        self._try(f"read {name}", self.fs.get_file, f"{self.root}/{name}", str(to))

    def _put(self, path: Path, name: str) -> None:
        target = f"{self.root}/{name}"
        self._try("make a folder", self.fs.makedirs, target.rsplit("/", 1)[0], exist_ok=True)
        beside = f"{target}.partial" if "file" in self.fs.protocol else target
        self._try(f"write {name}", self.fs.put_file, str(path), beside)
        if beside != target:  # only object stores show nothing of a file before it is complete
            self._try(f"write {name}", os.replace, beside, target)

    def _try(self, what: str, function: Callable, *args: Any, **options: Any) -> None:
        for pause in (1, 2, 4, None):
            try:
                return function(*args, **options)
            except Exception as error:  # every file system has its own kinds
                if pause is None or isinstance(error, FileNotFoundError):
                    raise WriteError(f"{self.url}: cannot {what}: {reason_of(error)}") from None
                time.sleep(pause)


def run_and_checkpoint(source: str) -> tuple[str, str | None]:
    """Splits what --resume names into the run and, if it names one, a checkpoint of it."""
    parts = source.replace(os.sep, "/").rstrip("/").split("/")
    if len(parts) > 2 and parts[-2] == "checkpoints":
        return "/".join(parts[:-2]), parts[-1]
    return source, None


def saved_settings(source: str) -> dict:
    """The settings of the run that --resume names, from its run.json."""
    run, _ = run_and_checkpoint(source)
    try:
        if "://" in run:
            mirror = Mirror(run)
            content = json.loads(mirror.fs.cat_file(f"{mirror.root}/run.json"))
        else:
            content = json.loads((Path(run) / "run.json").read_text("utf-8"))
        saved = {k: v for k, v in content["settings"].items() if k in DEFAULTS}
        if not isinstance(saved.get("corpus_file") or "", str):
            raise ValueError("corpus_file is no path")
        flag_parser().parse_args(  # are they values that the command line would take?
            f"--{name.replace('_', '-')}={value}" for name, value in saved.items()
            if value is not None and not isinstance(value, bool)
        )  # fmt: skip
    except UserError as error:
        raise UserError(f"--resume {source}: {error}") from None
    except Exception as error:  # every file system has its own kinds
        raise UserError(f"--resume {source}: no run with a run.json: {reason_of(error)}") from None
    for name in ("resume", "overwrite", "output_dir", "dry_run", "generate", "cpu"):
        saved.pop(name, None)
    saved["corpus_file"] = Path(saved["corpus_file"]) if saved.get("corpus_file") else None
    return saved


def read_state(source: str) -> tuple[dict, str]:
    """The newest undamaged state of the run that --resume names, or the named one, and a note.

    The run's log so far comes with it, as "metrics". Raises `UserError` if there is none.
    """
    run, named = run_and_checkpoint(source)
    mirror = Mirror(run) if "://" in run else None
    notes = []
    with tempfile.TemporaryDirectory() as copies:
        folder = Path(copies) if mirror else Path(run)
        for path, manifest in mirror.checkpoints() if mirror else checkpoints_in(folder):
            if named and path.name != named:
                continue
            if mirror and manifest:
                path = folder / path.name
                with contextlib.suppress(WriteError):  # what is missing is damage, found below
                    mirror.fetch(f"checkpoints/{path.name}/state.pt", path / "state.pt")
                    mirror.fetch("metrics.jsonl", folder / "metrics.jsonl")
            problem = damage(path, manifest)
            if problem is None:
                # Plain tensors and plain types only: nothing in the file can run code.
                state = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
                with contextlib.suppress(FileNotFoundError):
                    state["metrics"] = (folder / "metrics.jsonl").read_text("utf-8")
                return state, "; ".join([*notes, f"continuing from {run}/checkpoints/{path.name}"])
            notes.append(f"{path.name} is damaged ({problem})")
    what = f"checkpoint {named}" if named else "complete checkpoint"
    raise UserError("; ".join([*notes, f"--resume {run}: no {what} there; see --save-every"]))


def after_restart(given: dict) -> dict:
    """What a restart by torchrun --max-restarts changes: the job goes on in its own folder."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" or "generate" in given:
        return {}
    folders = sorted(Path("runs").glob("*"), key=lambda path: path.stat().st_mtime, reverse=True)
    if "output_dir" in given:
        folders = [given["output_dir"]]
    elif given.get("resume") and "://" not in given["resume"]:
        folders = [Path(run_and_checkpoint(given["resume"])[0])]
    for folder in folders:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            if json.loads((folder / "run.json").read_text("utf-8"))["launch"] == launch_id():
                if any(manifest for _, manifest in checkpoints_in(folder)):
                    return {"resume": str(folder), "output_dir": folder}
                return {"output_dir": folder, "overwrite": True}
    return {}


def launch_id() -> str | None:
    """What the launcher's restarts of one job have in common."""
    job = os.environ.get("TORCHELASTIC_RUN_ID")
    return f"{job} of process {os.getppid()}" if job == "none" else job


def open_run_folder(launch: Launch, settings: argparse.Namespace) -> Path:
    """Claims the output folder on rank 0 and tells the others. Ranks meet.

    A lock on `.lock` keeps a second process out while this one runs; of two new runs that want one
    folder, one finds `run.json` already there. Raises `UserError` for a folder that holds a run
    (without --overwrite or --resume) or cannot be written.
    """
    name = f"{settings.model}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    folder, attempt, in_place = settings.output_dir or Path("runs") / name, 1, False
    if settings.resume:
        source = Path(run_and_checkpoint(settings.resume.removeprefix("file://"))[0])
        if not settings.output_dir and "://" not in settings.resume:
            folder = source
        in_place = folder.resolve() == source.resolve()
    with together(launch):
        while launch.rank == 0:
            try:
                folder.mkdir(parents=True, exist_ok=bool(settings.output_dir or in_place))
                launch.lock = lock_file(folder / ".lock")
                if settings.overwrite and not in_place:
                    for old in (folder / artifact for artifact in ARTIFACTS):
                        shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
                if not in_place and holds_a_run(folder):
                    raise FileExistsError
                open(folder / "run.json", "a" if in_place else "x", encoding="utf-8").close()
                break
            except FileExistsError:
                if settings.output_dir:
                    raise UserError(
                        f"--output-dir {folder} already holds a run or is no folder; "
                        "choose another, or give --overwrite"
                    ) from None
                attempt += 1  # two runs began in the same second
                folder = Path("runs") / f"{name}-{attempt}"
            except OSError as error:
                raise UserError(f"--output-dir {folder}: {reason_of(error)}") from None
    return from_rank_0(folder, launch)


def holds_a_run(folder: Path) -> bool:
    """Whether a new run would replace something there."""
    return any((folder / artifact).exists() for artifact in ARTIFACTS)


def lock_file(path: Path) -> Any:
    """An open file that no other process can lock; the system frees it when this one ends."""
    file = open(path, "a", encoding="utf-8")
    with contextlib.suppress(ImportError):  # Windows
        import fcntl

        try:  # not flock, which loader workers would inherit and hold when their rank was killed
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):  # else: a disk that knows no locks
                raise UserError(f"another process is training in {path.parent}") from None
    return file


def write_folder(path: Path, write: Callable[[Path], None]) -> None:
    """Writes a folder completely or not at all. Raises `WriteError`."""
    beside = path.with_name(f".{path.name}.partial")
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        write(beside)
        old = path.with_name(f".{path.name}.old")
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
            path.rename(old)
        beside.rename(path)
        flush_folder(path.parent)
        shutil.rmtree(old, ignore_errors=True)
    except WriteError:
        raise
    except Exception as error:  # safetensors has kinds of its own
        raise WriteError(f"cannot write {path}: {reason_of(error)}") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def save_tiny(model: TinyCausalTransformer, folder: Path) -> None:
    """Writes `tiny_transformer.pt`: {"config": shape settings, "model": state dict}, on the CPU."""
    state = {name: value.detach().cpu() for name, value in model.state_dict().items()}
    content = {"config": model.config, "model": state}
    write_file(folder / "tiny_transformer.pt", lambda file: save_tensors(content, file))


def save_qwen(
    peft_model: Any, tokenizer: Any, folder: Path, settings: argparse.Namespace, chat: bool
) -> None:
    """Writes `adapter/`, with the tokenizer beside it, and with --merge `merged/`.

    The adapter holds nothing but LoRA tensors. For the merged model W + (alpha / r) B A is formed
    in fp32 and then rounded; `peft_model` is used up by it.
    """

    def adapter(to: Path) -> None:
        """LoRA tensors in fp32, their config, the tokenizer."""
        peft_model.save_pretrained(to, save_embedding_layers=False)  # the default asks the hub
        tokenizer.save_pretrained(to)

    def merged(to: Path) -> None:
        """A plain model in the base's dtype, which ends its texts at the token that was trained."""
        dtype = peft_model.dtype
        plain = peft_model.to(torch.float32).merge_and_unload(safe_merge=True).to(dtype)
        old = plain.generation_config.eos_token_id
        ends = [] if old is None else old if isinstance(old, list) else [old]
        new = [end for end in end_tokens(tokenizer, chat) if end not in ends]
        plain.generation_config.eos_token_id = ends + new
        plain.save_pretrained(to)
        tokenizer.save_pretrained(to)

    write_folder(folder / "adapter", adapter)
    if settings.merge:
        write_folder(folder / "merged", merged)


def load_tiny(folder: Path) -> TinyCausalTransformer:
    """Reads `tiny_transformer.pt` of a run. Raises `UserError` if it is missing or damaged."""
    path = folder / "tiny_transformer.pt"
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        model = TinyCausalTransformer(**saved["config"])
        model.load_state_dict(saved["model"])
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: {folder} is not a finished tiny run") from None
    except Exception as error:  # torch raises many kinds for a damaged file
        raise UserError(f"{path} is damaged or not of this program: {reason_of(error)}") from None
    return model


# ------------------------------------------------------------------------------------------
# Log, metrics, picture
# ------------------------------------------------------------------------------------------


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this process had at once: of the GPU on CUDA, else resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        import psutil

        return psutil.Process().memory_info().peak_wset
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def tiny_bytes(parameters: int, settings: argparse.Namespace, launch: Launch) -> int:
    """Estimated peak memory of the tiny model's training per rank, beside PyTorch's own.

    Kept for the backward pass, in fp32 values a token: 16 · d_model a layer (8 for the
    feed-forward's two sides; q, k, v and the attention's output; the inputs of the two norms and
    what they return), 2 · d_model around the layers, and 3 · 258 at the loss (log-softmax, its
    gradient, the logits' gradient). Dropout keeps its masks, and the attention's scores with it.
    """
    s = settings
    layer = 16 * s.d_model
    if s.dropout:
        layer += 6 * s.d_model + 3 * s.heads * s.seq_len
    tokens = s.batch_size * s.seq_len
    kept = 4 * tokens * (s.layers * layer + 2 * s.d_model + 3 * VOCAB)
    return training_bytes(parameters, kept, settings, launch)


def qwen_bytes(model: Any, parameters: int, settings: argparse.Namespace, launch: Launch) -> int:
    """The same for LoRA: base weights, activations, and 256 rows of logits.

    Kept a token and layer, in the precision of the base: 8 · hidden + 2 · key-value width + 2 ·
    intermediate values, counted in transformers' Qwen2 layer. With --gradient-checkpointing hidden
    ones, and all of the last sixth and of one more, whose repeated gates take 4 · intermediate.
    """
    s, config = settings, model.config
    weights = sum(p.numel() * p.element_size() for p in model.parameters() if not p.requires_grad)
    width = 2 if s.precision in ("bf16", "fp16") else 4
    heads = config.num_attention_heads
    key_value_width = config.hidden_size // heads * getattr(config, "num_key_value_heads", heads)
    layer = 8 * config.hidden_size + 2 * key_value_width + 2 * config.intermediate_size
    layers, tokens = config.num_hidden_layers, s.batch_size * s.seq_len
    kept = layers * layer
    if s.gradient_checkpointing:
        whole = layers // 6 + 1  # the last sixth, and the layer that is computed again
        kept = layers * config.hidden_size + whole * layer + 4 * config.intermediate_size
    # Logits in fp32, and where the base has 16 bits, the product's own and the ones sent back too.
    head = (4 if width == 4 else 2 + 4 + 2) * FrozenHeadLoss.CHUNK * config.vocab_size
    return weights + head + training_bytes(parameters, width * tokens * kept, s, launch)


def training_bytes(parameters: int, kept: int, settings: argparse.Namespace, launch: Launch) -> int:
    """Trained weights and AdamW's two means, gradients, and what is `kept` for the backward pass.

    One process without accumulation frees activations while it makes gradients: only the larger of
    both counts. DDP's buckets and accumulated gradients are there all the time. On the CPU,
    the C library's heap loses about 0.3 of what is kept between its blocks (measured with glibc
    2.36: 0.24 to 0.39), and --save-every keeps a copy of the state on rank 0.
    """
    s, cpu = settings, launch.device.type == "cpu"
    apart = launch.world_size == 1 and s.grad_accum == 1
    gradients = 4 * parameters
    peak = 12 * parameters + (max(gradients, kept) if apart else gradients + kept)
    if cpu:
        peak += 3 * kept // 10
    return peak + (12 * parameters if cpu and s.save_every else 0)


def print_header(run: Run) -> None:
    """What will be trained on what, with every automatic choice and its reason."""
    launch, s, data, ranks = run.launch, run.settings, run.data, run.launch.world_size
    sequences = global_batch(launch, s)
    an_epoch = math.ceil(len(data.train) / sequences)
    launch.say(f"torch {torch.__version__}, Python {platform.python_version()}, {sys.platform}")
    rows = [(what, f"{chosen} ({reason})") for what, chosen, reason in launch.choices]
    rows += [
        ("corpus", f"{s.corpus_file or s.builtin}: {data.summary}"),
        ("split", f"{counted(len(data.train), 'window')} to train on, "
                  f"{len(data.validation):,} to validate"),
        ("batch", f"per rank {s.batch_size} × accumulation {s.grad_accum} × ranks {ranks} = "
                  f"{counted(sequences, 'sequence')} = {sequences * s.seq_len} tokens an update"),
        ("steps", f"{counted(run.updates, 'update')}, {an_epoch:,} an epoch"),
        *run.notes,
    ]  # fmt: skip
    if not len(data.validation) and (s.val_fraction or s.eval_every):
        why = f"none: --val-fraction {s.val_fraction:g} leaves nothing for it"
        rows.append(("validation", f"{why}; raise it, or give more text"))
    for what, text in rows:
        launch.say(f"{what:10} {text}")


@dataclasses.dataclass
class Progress:
    """How far a run has come: all that a checkpoint must know beside tensors."""

    step: int = 0  # completed updates
    epoch: int = 1
    samples: int = 0  # samples of the epoch that were trained on, over all ranks
    tokens: int = 0  # predicted tokens
    seconds: float = 0.0  # of training: without validation, sampling and saving
    skipped: int = 0  # updates that the fp16 scaler left out
    validated: int = 0  # the update after which the last validation was made
    val_loss: float | None = None  # of the last validation
    best: float | None = None  # validation loss
    best_step: int = 0


class RunLog:
    """Log lines, `metrics.jsonl`, TensorBoard and the picture; silent on ranks other than 0.

    The clock for tokens per second stands still during validation, sampling and saving: `mark` is
    when the training time that was not yet counted began.
    """

    def __init__(self, run: Run, folder: Path, progress: Progress, earlier: str) -> None:
        self.launch, self.settings, self.updates = run.launch, run.settings, run.updates
        self.folder, self.progress, self.active = folder, progress, run.launch.rank == 0
        self.mark = time.perf_counter()
        self.logged = (progress.tokens, progress.seconds)
        self.rows: list[dict] = []
        self.board, self.bar = None, None
        if self.active:
            path = folder / "metrics.jsonl"
            # A resumed run may have gone on past its checkpoint; those rows are made again.
            self.rows = rows_until(earlier, progress)
            text = "".join(json.dumps(row) + "\n" for row in self.rows)
            write_file(path, lambda file: file.write(text.encode("utf-8")))
            self.file = open(path, "a", encoding="utf-8")
            if self.settings.tensorboard:
                self.board = summary_writer()(str(folder / "tensorboard"))
            if sys.stderr and sys.stderr.isatty():  # None: closed, 2>&-
                from tqdm import tqdm

                self.bar = tqdm(
                    total=self.updates, initial=progress.step, unit="update", leave=False
                )  # fmt: skip

    def say(self, text: str) -> None:
        if self.active:
            with self.bar.external_write_mode() if self.bar else contextlib.nullcontext():
                self.launch.say(text)

    def restart_clock(self) -> None:
        self.mark = time.perf_counter()

    def update(self, rate: float, result: StepResult) -> None:
        """Takes note of one update; prints and writes every --log-every, the first and the last."""
        progress, now = self.progress, time.perf_counter()
        progress.seconds, self.mark = progress.seconds + now - self.mark, now
        progress.tokens += result.tokens
        progress.skipped += result.skipped
        if self.bar:
            self.bar.update()
        if progress.step % self.settings.log_every and progress.step not in (1, self.updates):
            return
        tokens, seconds = self.logged
        speed = (progress.tokens - tokens) / (progress.seconds - seconds)
        self.logged = (progress.tokens, progress.seconds)
        self._row({
            "step": progress.step, "epoch": progress.epoch, "loss": result.loss, "lr": rate,
            "grad_norm": result.grad_norm if math.isfinite(result.grad_norm) else None,
            "tokens": progress.tokens, "tokens_per_second": speed, "seconds": progress.seconds,
            "peak_memory_bytes": peak_memory_bytes(self.launch.device),
        })  # fmt: skip
        overflow = f"  fp16 overflows {progress.skipped}" if progress.skipped else ""
        self.say(
            f"step {progress.step:>6}/{self.updates}  epoch {progress.epoch}  "
            f"loss {result.loss:.4f}  lr {rate:.2e}  grad norm {result.grad_norm:.3f}  "
            f"{speed:,.0f} tokens/s{overflow}"
        )

    def validation(self, loss: float) -> bool:
        """Takes note of one validation; returns whether it is the best so far."""
        progress = self.progress
        progress.validated, progress.val_loss = progress.step, loss
        self._row({"step": progress.step, "val_loss": loss})
        better = progress.best is None or loss < progress.best
        if better:
            progress.best, progress.best_step = loss, progress.step
        self.say(
            f"step {progress.step:>6}/{self.updates}  validation loss {loss:.4f}"
            f"{' (best)' * better}"
        )
        return better

    def _row(self, row: dict) -> None:
        self.rows.append(row)
        if not self.active:
            return
        try:
            self.file.write(json.dumps(row) + "\n")
            self.file.flush()
        except OSError as error:
            raise WriteError(f"cannot write {self.file.name}: {reason_of(error)}") from None
        if self.board:
            for name in [n for n in row.keys() - {"step", "epoch"} if row[n] is not None]:
                self.board.add_scalar(name, row[name], row["step"])

    def close(self) -> None:
        """Closes the files and draws the picture."""
        if self.active:
            self.file.close()
            if self.bar:
                self.bar.close()
            if self.board:
                self.board.close()
            if self.rows:
                draw_loss_curve(self.rows, self.folder / "loss_curve.png")


def rows_until(earlier: str, progress: Progress) -> list[dict]:
    """The rows of a run's `metrics.jsonl` that belong to it up to `progress`."""
    rows = []
    for line in earlier.splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError):  # a killed run's last may be cut
            row = json.loads(line)
            if row["step"] <= (progress.validated if "val_loss" in row else progress.step):
                rows.append(row)
    return rows


def summary_writer() -> type:
    """TensorBoard's writer. Raises `UserError` where the package is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError(
            "--tensorboard needs the package tensorboard: pip install tensorboard"
        ) from None
    return SummaryWriter


def require_matplotlib() -> None:
    """Raises `UserError` where it is missing: before the work, for it is needed only after that."""
    if not importlib.util.find_spec("matplotlib"):
        raise UserError("matplotlib is missing, which draws the picture: pip install matplotlib")


def draw_loss_curve(rows: list[dict], path: Path) -> None:
    """Training and validation loss over updates as a PNG."""
    with warnings.catch_warnings():  # its font cache is opened without an encoding
        warnings.simplefilter("ignore", EncodingWarning)
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = FigureCanvasAgg(figure).figure.add_subplot()
    for key, label, style in (("loss", "training", "-"), ("val_loss", "validation", "o-")):
        points = [(row["step"], row[key]) for row in rows if key in row]
        if points:
            axes.plot(
                *zip(*points), style, label=f"{label}, last {points[-1][1]:.3f}", lw=1.5, ms=4
            )
    axes.set(xlabel="update", ylabel="loss (nats per token)", title="Loss of the global batch")
    axes.grid(alpha=0.3)
    axes.legend()
    write_file(path, lambda file: figure.savefig(file, format="png", dpi=120))


def write_run_file(run: Run, folder: Path) -> None:
    """Writes `run.json`: settings as resolved, versions, parameters, choices and reasons."""
    launch, settings = run.launch, run.settings
    counts = [(p.numel(), p.requires_grad) for p in run.model.parameters()]
    given = {name: value for name, value in vars(settings).items() if name in DEFAULTS}
    content = {
        "settings": {k: str(v.absolute()) if isinstance(v, Path) else v for k, v in given.items()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__,
                     "numpy": np.__version__, "platform": platform.platform()} | run.versions,
        "world_size": launch.world_size,
        "global_batch": global_batch(launch, settings),
        "updates": run.updates,
        "parameters": {"total": sum(n for n, _ in counts),
                       "trained": sum(n for n, trained in counts if trained)},
        "choices": [dict(zip(("what", "chosen", "reason"), c)) for c in launch.choices],
        "launch": launch_id(),
        "chat": run.data.chat,
    }  # fmt: skip
    write_json(folder / "run.json", content)


# ------------------------------------------------------------------------------------------
# The trainer
# ------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Run:
    """What is trained on what: everything that differs between the tiny model and Qwen."""

    launch: Launch
    settings: argparse.Namespace
    data: Data
    model: nn.Module  # forward(**batch) returns the mean loss
    collate: Callable[[Sequence], dict]
    sample: Callable[[], str]  # some generated text
    save: Callable[[Path], None]  # writes the trained weights
    notes: list[tuple[str, str]]  # rows of the header
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    frozen: str = ""  # checksum of the weights that must not change

    @property
    def updates(self) -> int:
        """By --max-steps and --epochs, whichever ends first."""
        s = self.settings
        an_epoch = math.ceil(len(self.data.train) / global_batch(self.launch, s))
        by_epochs = s.epochs * an_epoch if s.epochs else math.inf
        return int(min(s.max_steps or math.inf, by_epochs))


def build_tiny(launch: Launch, settings: argparse.Namespace) -> Run:
    """The tiny Transformer, equal on all ranks by its seed, and its data. Ranks meet."""
    s = settings
    with together(launch):
        data = build_data(s)
    torch.manual_seed(s.seed)
    model = TinyCausalTransformer(s.d_model, s.layers, s.heads, s.dropout, s.seq_len)
    count = sum(p.numel() for p in model.parameters())
    sent = (
        f"{4 * count / 1e6:.2f} MB all-reduced an update" if launch.world_size > 1 else "none sent"
    )
    return Run(
        launch, s, data, model.to(launch.device),
        collate=functools.partial(tiny_collator, seq_len=s.seq_len),
        sample=lambda: SAMPLE_PROMPT + generate(
            model, SAMPLE_PROMPT, min(SAMPLE_LENGTH, s.seq_len), s.seed
        ),
        save=functools.partial(save_tiny, model),
        notes=[
            ("model", f"tiny, {count:,} parameters, all trained, seed {s.seed}"),
            ("gradients", sent),
            ("memory", f"about {tiny_bytes(count, s, launch) / 1e6:.0f} MB a rank for model and "
                       "batch, beside PyTorch's own"),
        ],
    )  # fmt: skip


def build_qwen(launch: Launch, settings: argparse.Namespace) -> Run:
    """A pretrained causal model with LoRA adapters, and its data. Ranks meet.

    Rank 0 loads first, so that a download happens once; the others then find the files.
    """
    s = settings
    for turn in (launch.rank == 0, launch.rank != 0):
        with together(launch):
            if turn:
                base, tokenizer = load_base(s)
    with together(launch):
        data = build_data(s, tokenizer)
        torch.manual_seed(s.seed)
        peft_model = add_lora(base, s).to(launch.device)
    # from_pretrained leaves eval mode on, in which transformers checkpoints no gradients.
    model = CausalLMWithLoss(peft_model).train()
    count = sum(p.numel() for _, p in trained_parameters(model))
    total = sum(p.numel() for p in model.parameters())
    if not count:
        raise UserError("no parameter would be trained: see --lora-r and --lora-targets")
    frozen = frozen_checksum(model) if launch.rank == 0 else ""
    import peft
    import transformers

    return Run(
        launch, s, data, model,
        collate=qwen_collator(tokenizer, s),
        sample=lambda: qwen_answer(peft_model, tokenizer, SAMPLE_PROMPT, data.chat),
        save=lambda folder: save_qwen(peft_model, tokenizer, folder, s, data.chat),
        notes=[
            ("model", f"{s.base_model}, {count:,} of {total:,} parameters trained "
                      f"({count / total:.2%}), seed {s.seed}"),
            ("gradients", f"{4 * count / 1e6:.2f} MB all-reduced an update, if there are several "
                          f"ranks; full fine-tuning: {4 * (total - count) / 1e6:,.0f} MB"),
            ("memory", f"about {qwen_bytes(base, count, s, launch) / 1e6:,.0f} MB a rank for model "
                       "and batch, beside PyTorch's own; lower --batch-size first"),
            ("frozen", f"weights of crc32 {frozen}, compared at the end"),
        ],
        versions={"transformers": transformers.__version__, "peft": peft.__version__},
        frozen=frozen,
    )  # fmt: skip


def wrap_in_ddp(bare: nn.Module, launch: Launch, **options: Any) -> DistributedDataParallel:
    """The model in DDP's wrapper; `options` go to DDP. Ranks meet.

    DDP sends rank 0's weights to all, so that replicas begin equal, and from then on averages
    their gradients in every backward pass.
    """
    # Qwen's only buffers are constants (rotary frequencies): they are sent once, here, and not in
    # every forward pass, which is the default. (The flag's name before torch 2.13.)
    known = inspect.signature(DistributedDataParallel).parameters
    new_name = "forward_sync_buffers" in known
    return DistributedDataParallel(
        bare,
        device_ids=[launch.device.index] if launch.device.type == "cuda" else None,
        gradient_as_bucket_view=True,  # gradients live in the buckets: no copy
        **{"forward_sync_buffers" if new_name else "broadcast_buffers": False},
        **options,
    )


class Trainer:
    """The loop, and all that it holds: optimizer, loaders, log, checkpoints.

    `model` is `bare`, the model itself, in its DDP wrapper, or `bare` alone in a single process.
    """

    def __init__(self, run: Run, log: RunLog, **ddp_options: Any) -> None:
        self.run, self.log, self.progress = run, log, log.progress
        launch, s, data = run.launch, run.settings, run.data
        self.launch, self.settings = launch, s
        rank, ranks = launch.rank, launch.world_size
        self.model = self.bare = run.model
        torch.manual_seed(s.seed + 1 + rank)  # other dropout masks on every rank
        if s.compile:
            self.bare.compile()
        self.sampler = EpochSampler(len(data.train), s.seed)
        if ranks > 1:
            self.model = wrap_in_ddp(self.bare, launch, **ddp_options)  # ranks meet
            self.sampler = ShardSampler(len(data.train), s.seed, ranks, rank)
        forks = "fork" if s.num_workers and sys.platform == "linux" else None
        # A loader draws from its own generator: the default one belongs to dropout.
        options = {
            "batch_size": s.batch_size, "collate_fn": run.collate, "num_workers": s.num_workers,
            "persistent_workers": s.num_workers > 0, "worker_init_fn": ignore_signals,
            "generator": torch.Generator(), "pin_memory": launch.device.type == "cuda",
            "multiprocessing_context": forks,
        }  # fmt: skip
        self.loader = DataLoader(data.train, sampler=self.sampler, **options)
        # Validation is shared out without repeats: ranks may get different numbers of samples.
        share = range(rank, len(data.validation), ranks)
        self.val_loader = DataLoader(data.validation, sampler=share, **options)
        self.optimizer = build_optimizer(self.bare, s)
        self.scaler = torch.amp.GradScaler("cuda", enabled=s.precision == "fp16")
        self.writer = CheckpointWriter(log.folder, s) if launch.rank == 0 else None
        self.saved = 0  # the update after which the newest checkpoint was taken
        self.copy: dict = {}  # the tensors of that checkpoint

    def fit(self, stop: StopRequest) -> None:
        """Trains until all updates are done. Raises `Stopped` after saving when a signal came."""
        try:
            self._fit(stop)
        finally:
            for loader in (self.loader, self.val_loader):  # workers ignore the signals of an exit
                if self.settings.num_workers and loader._iterator is not None:
                    loader._iterator._shutdown_workers()

    def _fit(self, stop: StopRequest) -> None:
        s, log, progress = self.settings, self.log, self.progress
        log.restart_clock()
        if progress.step:  # after --resume: what a signal had cut short
            self._due_after_update(stop)
        while progress.step < log.updates:
            self.sampler.set_epoch(progress.epoch, progress.samples)
            for micro_batches in updates_of_epoch(self.loader, self.sampler, s):
                rate = learning_rate(progress.step, s, log.updates)
                for group in self.optimizer.param_groups:
                    group["lr"] = rate
                self.launch.where.step = progress.step + 1
                try:
                    result = training_step(
                        self.model, self.optimizer, self.scaler, micro_batches, self.launch, s,
                        stop.number,
                    )  # fmt: skip
                except Diverged as error:
                    raise Diverged(
                        f"update {progress.step + 1}: {error}; lower --lr or raise --warmup-steps"
                    ) from None
                progress.step += 1
                log.update(rate, result)
                progress.samples += min(
                    global_batch(self.launch, s), self.sampler.size - progress.samples
                )
                if progress.samples == self.sampler.size:  # where the next update begins
                    progress.epoch, progress.samples = progress.epoch + 1, 0
                self._due_after_update(stop, result.stop)
                if progress.step == log.updates:
                    break
                self.launch.where.enter("next batch")

    def _due_after_update(self, stop: StopRequest, stopped_by: int = 0) -> None:
        """Validation, sample and checkpoint, where this update calls for them; then the stop."""
        s, log, step = self.settings, self.log, self.progress.step
        last = step == log.updates

        def due(every: int) -> bool:
            return last or (every > 0 and step % every == 0)

        if last:
            self._require_finite_weights()
        better = False
        if due(s.eval_every) and self.progress.validated < step and len(self.run.data.validation):
            loss = evaluate(self.bare, self.val_loader, self.launch, s, stop)
            if loss is None:  # a signal came; it is made again after --resume
                self._save_and_stop(stop.number)
            if not math.isfinite(loss):
                raise Diverged(f"update {step}: the validation loss is {loss}; lower --lr")
            better = log.validation(loss)
            if better:
                self.saved = 0  # a checkpoint that was taken before does not know it
        if log.active and due(s.sample_every):
            self.launch.where.enter("sample")
            log.say(f"sample     {self.run.sample()!r}")
        if self.writer:
            self.writer.check()
        if stopped_by and not last:
            self._save_and_stop(stopped_by)
        if stopped_by or (s.save_every and (better or due(s.save_every))):
            self.save()
        log.restart_clock()

    def _save_and_stop(self, number: int) -> NoReturn:
        """Raises `Stopped` for the signal `number` when the state is safe. Ranks meet."""
        self.save()
        self.launch.where.enter(Watchdog.SAVING if self.writer else "save", meets=True)
        if self.writer:
            self.writer.wait()
        # Ranks meet, as at a barrier: the launcher may end one that saves when another leaves.
        agreed(number, self.launch)
        raise Stopped(
            f"{signal.Signals(number).name} after update {self.progress.step} of "
            f"{self.log.updates}; the state is saved, go on with --resume {self.log.folder}",
            number,
        )

    def _require_finite_weights(self) -> None:
        """A huge step can spoil the weights while its loss and gradient were still finite."""
        if not all(bool(p.isfinite().all()) for _, p in trained_parameters(self.bare)):
            raise Diverged(
                f"update {self.progress.step} left weights that are not finite; lower --lr"
            )

    def save(self) -> None:
        """Takes the state of this instant on all ranks and hands it to the writer. Ranks meet."""
        if self.saved == self.progress.step:
            return
        self.saved = self.progress.step
        self._require_finite_weights()
        self.launch.where.enter("random states", meets=True)
        random = gather(
            {"cpu": torch.get_rng_state(), **cuda_random_state(self.launch)}, self.launch
        )
        if not self.writer:
            return
        self.launch.where.enter(Watchdog.SAVING)
        self.writer.wait()  # the last copy is still being written
        self.launch.where.enter("copy of the state")
        progress = self.progress
        tensors = {
            "model": dict(trained_parameters(self.bare)),
            "optimizer": self.optimizer.state_dict(),
        }
        self.copy = copy_to_cpu(tensors, self.copy)
        state = {
            **self.copy,
            "scaler": self.scaler.state_dict(),
            "random": random,
            "progress": dataclasses.asdict(progress),
            "corpus": self.run.data.identity,
            "global_batch": global_batch(self.launch, self.settings),
        }
        val_loss = progress.val_loss if progress.validated == progress.step else None
        self.writer.save(state, {"format": 1, "step": progress.step, "val_loss": val_loss})

    def restore(self, state: dict) -> None:
        """Takes over a state from `read_state`; `progress` was taken over before. Ranks meet."""
        if self.writer:
            self.writer.leave_behind(self.progress.step)
        self.saved = self.progress.step
        with torch.no_grad():
            for name, parameter in trained_parameters(self.bare):
                parameter.copy_(state["model"][name])
        if self.launch.world_size > 1:
            # DDP arranges its buckets anew after the first backward pass, and the order of adding
            # up depends on them. An idle pass makes the next update the second one, as it was.
            micro_batch = self.loader.collate_fn([])
            (self.model(**inputs_of(micro_batch, self.launch.device)) * 0).backward()
            self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        if len(state["random"]) == self.launch.world_size:
            own_random = state["random"][self.launch.rank]
            torch.set_rng_state(own_random["cpu"])
            if "cuda" in own_random and self.launch.device.type == "cuda":
                torch.cuda.set_rng_state(own_random["cuda"], self.launch.device)


def copy_to_cpu(value: Any, into: Any = None) -> Any:
    """A copy on the CPU of all tensors in nested dicts and lists.

    `into` is an earlier copy whose memory is used again: new memory would cost as much as copying.
    """
    if isinstance(value, torch.Tensor):
        if isinstance(into, torch.Tensor) and into.shape == value.shape:
            return into.copy_(value.detach())
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        into = into if isinstance(into, dict) else {}
        return {key: copy_to_cpu(item, into.get(key)) for key, item in value.items()}
    return [copy_to_cpu(item) for item in value] if isinstance(value, list) else value


def cuda_random_state(launch: Launch) -> dict:
    on_cuda = launch.device.type == "cuda"
    return {"cuda": torch.cuda.get_rng_state(launch.device)} if on_cuda else {}


def global_batch(launch: Launch, settings: argparse.Namespace) -> int:
    """Sequences in one update, over all ranks and micro-batches."""
    return settings.batch_size * settings.grad_accum * launch.world_size


def resume_from(run: Run) -> dict:
    """Reads the checkpoint on rank 0 and sends it to all; run.json, every rank has read itself.

    Refuses another corpus, and a number of ranks that cannot keep the global batch; otherwise the
    batch per rank and the accumulation are set so that it is kept. Ranks meet.
    """
    launch, s, state = run.launch, run.settings, {}
    with together(launch):
        if launch.rank == 0:
            state, notes = read_state(s.resume)
            launch.say(f"{'resume':10} {notes}")
    state = from_rank_0(state, launch)
    if state["corpus"] != run.data.identity:
        raise UserError(
            f"the interrupted run's corpus has {state['corpus']}, this one {run.data.identity}"
        )
    own, saved = (
        {name: tuple(p.shape) for name, p in m}
        for m in (trained_parameters(run.model), state["model"].items())
    )
    if own != saved:
        different = sorted(name for name, _ in own.items() ^ saved.items())
        raise UserError(f"checkpoint and model differ in {different[0]}; was run.json changed?")
    ranks, wanted = launch.world_size, state["global_batch"]
    if global_batch(launch, s) != wanted and not s.batch_given and wanted % ranks == 0:
        per_rank = wanted // ranks
        s.batch_size = max(b for b in range(1, s.batch_size + 1) if per_rank % b == 0)
        s.grad_accum = per_rank // s.batch_size
        chosen = f"{s.batch_size} × accumulation {s.grad_accum}"
        launch.choose("batch", chosen, f"keeps the {counted(wanted, 'sequence')} an update")
    if global_batch(launch, s) != wanted:
        raise UserError(
            f"--resume: batch {s.batch_size} × accumulation {s.grad_accum} × ranks {ranks} = "
            f"{global_batch(launch, s)}, but the interrupted run had "
            f"{counted(wanted, 'sequence')} an update"
        )
    if state["progress"]["step"] > run.updates:
        raise UserError(
            f"--resume: the run is at update {state['progress']['step']}, beyond the last one, "
            f"{run.updates}, that --max-steps and --epochs allow; raise --max-steps"
        )
    return state


# ------------------------------------------------------------------------------------------
# The story
# ------------------------------------------------------------------------------------------


def continue_prompt(settings: argparse.Namespace) -> None:
    """--generate: what a finished run makes of the prompt; with LoRA, the base's answer too."""
    s, folder = settings, Path(run_and_checkpoint(settings.resume)[0])
    if s.model == "tiny":
        print(s.generate + generate(load_tiny(folder), s.generate, SAMPLE_LENGTH, s.seed))
        return
    if not (folder / "adapter" / "adapter_config.json").is_file():
        raise UserError(f"{folder} has no adapter/: it is not a finished qwen run")
    base, tokenizer = load_base(s)
    from peft import PeftModel

    model = PeftModel.from_pretrained(base, str(folder / "adapter"))
    chat = json.loads((folder / "run.json").read_text("utf-8")).get("chat", False)
    for who, is_base in (("base", True), ("adapted", False)):
        print(f"{who:8} {qwen_answer(model, tokenizer, s.generate, chat, is_base)}")


def same_digest_everywhere(bare: nn.Module, launch: Launch) -> str:
    """The digest of the trained weights, after a look at all ranks'. Ranks meet."""
    digests = gather(parameter_digest(bare), launch)
    if len(set(digests)) > 1:
        raise RunError(f"ranks ended with different weights: {digests}")
    return digests[0]


@record
def main(argv: Sequence[str] | None = None) -> None:
    """One run, from the launcher's environment to saved weights and teardown."""
    where = Where()
    print_on_any_terminal()
    with one_clear_ending(where):
        launch = read_launcher(where)
        settings = parse_settings(argv)
        if settings.generate is not None:
            return continue_prompt(settings) if launch.rank == 0 else None
        if settings.tensorboard:
            summary_writer()
        if settings.mirror:
            Mirror(settings.mirror)
        choose_device(launch, settings)
        set_up(launch)

        run = (build_tiny if settings.model == "tiny" else build_qwen)(launch, settings)
        state = resume_from(run) if settings.resume else None
        if settings.dry_run:
            print_header(run)
            out, replaces = settings.output_dir, settings.overwrite or settings.resume
            if out and not replaces and holds_a_run(out):
                raise UserError(f"--output-dir {out} already holds a run; give --overwrite")
            launch.say("dry run: settings and data are good; nothing was trained or written")
            return None
        require_matplotlib()
        folder = open_run_folder(launch, settings)
        print_header(run)
        if launch.rank == 0:
            write_run_file(run, folder)

        progress = Progress(**state["progress"]) if state else Progress()
        log = RunLog(run, folder, progress, state.get("metrics", "") if state else "")
        trainer = Trainer(run, log)
        if state:
            trainer.restore(state)
        with Watchdog(launch), StopRequest() as stop:
            trainer.fit(stop)

        digest = same_digest_everywhere(run.model, launch)
        log.close()
        if launch.rank == 0:
            if run.frozen and frozen_checksum(run.model) != run.frozen:
                raise RunError("the frozen weights have changed")
            run.save(folder)
            trainer.writer.close(results=True)
            print_ending(log, digest, run.frozen)
        if launch.world_size > 1:
            dist.barrier()  # ranks meet: nobody leaves before rank 0 has saved


def print_ending(log: RunLog, digest: str, frozen: str) -> None:
    """The last lines of a run, on rank 0."""
    progress, ranks = log.progress, log.launch.world_size
    speed = progress.tokens / max(progress.seconds, 1e-9)
    final = [row["val_loss"] for row in log.rows if "val_loss" in row]
    written = [name for name in ARTIFACTS if (log.folder / name).exists()]
    on_cuda = log.launch.device.type == "cuda"
    memory = "of the GPU's" if on_cuda else "the whole process, PyTorch's own included"
    lines = [
        f"done       {counted(log.updates, 'update')}, {counted(progress.tokens, 'token')}, "
        f"{speed:,.0f} tokens/s",
        f"memory     peak {peak_memory_bytes(log.launch.device) / 1e6:,.0f} MB on rank 0, {memory}",
        f"weights sha256 {digest}" + (f" (equal on all {ranks} ranks)" if ranks > 1 else ""),
        f"written to {log.folder}: {' '.join(written)}",
    ]
    if frozen:
        lines.insert(1, f"frozen     crc32 {frozen}, unchanged")
    if final:
        best = f"best {progress.best:.4f} at update {progress.best_step}"
        lines.insert(1, f"validation final {final[-1]:.4f}, {best}")
    log.launch.say("\n".join(lines))


if __name__ == "__main__":
    main()
