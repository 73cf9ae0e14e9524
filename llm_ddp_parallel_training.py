"""PyTorch DistributedDataParallel from launch to saved weights, in one file.

Two processes on one CPU, nothing to download:

    python -m torch.distributed.run --standalone --nproc_per_node=2 \\
        llm_ddp_parallel_training.py --model tiny --cpu --batch-size 2 --max-steps 2

One process, no process group at all:

    python llm_ddp_parallel_training.py --model tiny --cpu --max-steps 2

Qwen2.5-0.5B-Instruct with LoRA, one process per GPU:

    python -m torch.distributed.run --standalone --nproc_per_node=2 \\
        llm_ddp_parallel_training.py --model qwen --batch-size 1 --seq-len 64 --max-steps 2

New to DDP? `labs/ddp_in_100_lines.py` is the same training loop in a hundred lines. This file adds:

    Part 1: DDP, reads straight through          beyond the hundred lines
        main               the story             one readable cause for every ending
        launch and group   who am I, where       one backend and precision for all ranks
        dataset, sampler   whose sample is it    going on inside an epoch
        tiny model         bytes in, bytes out   a causal Transformer
        training step      where gradients meet  fp16, non-finite numbers, wishes to stop
        validation         shared without DDP    nothing: it is as short there
        trainer            the loop              when to validate, to save and to stop
    Part 2: what serves a run: settings, endings, corpora, chats, Qwen with LoRA, checkpoints, log

"Ranks meet" marks the places where processes wait for each other. Of Part 2, Part 1 uses `Settings`
(the flags), `Run` (model, data and collate function), `RunLog` and `Checkpoints` (to which the
trainer reports), `state_of` a checkpoint, the errors, `reason_of` one, and `use_cores`.
"""

from __future__ import annotations

import argparse
import array
import bisect
import contextlib
import copy
import csv
import ctypes
import dataclasses
import datetime
import functools
import gc
import gzip
import hashlib
import importlib.util
import inspect
import io
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
import urllib.parse
import urllib.request
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import get_error_handler, record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

PAD, EOS, VOCAB = 256, 257, 258  # the tiny model's tokens after the 256 byte values
IGNORE = -100  # a label that the loss leaves out


@record
def main(argv: Sequence[str] | None = None) -> None:
    """One run, from the launcher's environment to saved weights."""
    with one_clear_ending() as watch:  # errors, signals, hung ranks; at the end, the teardown
        launch = read_launcher(watch)  # which of how many processes am I?
        settings = parse_settings(argv)  # flags; with --resume, those of the interrupted run
        if settings.generate is not None:
            return continue_prompt(settings) if launch.rank == 0 else None
        set_up(launch, settings)  # device, precision, threads. Ranks meet: the process group

        build = build_tiny if settings.model == "tiny" else build_qwen
        run = build(launch, settings)  # data and model, equal on all ranks
        state = fit_to_checkpoint(run)  # what --resume goes on from, or None. Ranks meet
        if settings.dry_run:
            return show_plan(run)

        folder, checkpoints = open_run_folder(run)  # ranks meet: rank 0 makes them
        log = RunLog(run, folder, state)  # prints and writes on rank 0
        trainer = Trainer(run, log, checkpoints)  # ranks meet: DDP
        if state:
            restore(trainer, state)  # ranks meet
        with stop_wishes(watch):  # from here on SIGTERM, SIGUSR1 and Ctrl-C save before they end
            try:
                trainer.fit()  # ranks meet, in every update
                finish(trainer)  # rank 0 saves the weights, the others wait for it
            finally:
                if checkpoints:  # whatever ended the run, what is being saved gets to the disk
                    checkpoints.wait()
        return None


# ==== Part 1: DDP =================================================================================

# ---- Launch and process group -------------------------------------------------------------------


@dataclasses.dataclass
class Watch:
    """What this rank is doing. A thread, `keep_watch`, ends a rank whose phase outlasts `timeout`;
    one that meets others a little later, so that the rank they wait for is named."""

    step: int = 0
    phase: str = "set-up"
    meets: bool = False  # this phase waits for other ranks
    patient: bool = True  # it may last as long as it likes, as saving does
    since: float = dataclasses.field(default_factory=time.monotonic)
    signal: int = 0  # the number of one that asked for the end of the run
    timeout: float = math.inf  # seconds after which a phase that is not patient counts as hung
    over: threading.Event = dataclasses.field(default_factory=threading.Event)

    def enter(self, phase: str, meets: bool = False, patient: bool = False) -> None:
        self.phase, self.meets, self.patient = phase, meets, patient
        self.since = time.monotonic()


@dataclasses.dataclass
class Launch:
    """Who this process is, and what it runs on."""

    rank: int = 0  # of all processes
    local_rank: int = 0  # of those on this machine
    world_size: int = 1
    local_world_size: int = 1
    device: torch.device = torch.device("cpu")
    choices: list[tuple[str, str, str]] = dataclasses.field(default_factory=list)  # what, and why
    watch: Watch = dataclasses.field(default_factory=Watch)

    def choose(self, what: str, chosen: Any, reason: str) -> None:
        self.choices.append((what, str(chosen), reason))

    def say(self, text: str) -> None:
        """Prints once for the whole job: rank 0 speaks, the others are silent."""
        if self.rank == 0:
            with contextlib.suppress(OSError):  # the reader left: `| head`; a full disk: `> log`
                print(text, flush=True)


def read_launcher(watch: Watch | None = None) -> Launch:
    """Reads RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE as torchrun sets them; none of them
    set: one process on its own. Raises `UserError` for values that make no sense."""

    def variable(name: str, default: int, low: int, below: int = 10**9) -> int:
        """A whole number, `low` up to but not `below`. Raises `UserError` for anything else."""
        text = os.environ.get(name, str(default)).strip()
        if not text.isdecimal() or len(text) > 9 or not low <= int(text) < below:
            raise UserError(
                f"environment variable {name}={text!r} should be a whole number of at least {low} "
                f"and below {below}; launch with python -m torch.distributed.run, or unset it"
            )
        return int(text)

    ranks = variable("WORLD_SIZE", 1, 1)
    rank = variable("RANK", 0, 0, ranks)
    local_ranks = variable("LOCAL_WORLD_SIZE", ranks, 1, ranks + 1)
    local_rank = variable("LOCAL_RANK", rank % local_ranks, 0, local_ranks)
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if ranks > 1 else ():
        if not os.environ.get(name):
            raise UserError(
                f"WORLD_SIZE={ranks} but {name} is not set; launch with python -m "
                "torch.distributed.run"
            )
    launch = Launch(rank, local_rank, ranks, local_ranks, watch=watch or Watch())
    timeout = variable("DDP_TIMEOUT_S", 600, 1)
    launch.watch.timeout = timeout if ranks > 1 else math.inf  # alone, nobody waits for it
    return launch


def set_up(launch: Launch, settings: Settings) -> None:
    """Chooses device, backend, precision and threads, each with its reason. Ranks meet."""
    choose_device(launch, settings.device)
    if launch.world_size > 1:
        abouts = join_group(launch)
        launch.choose("buckets", "25 MB of gradients a message", "PyTorch's default")
    else:
        abouts = [about_rank(launch)]
        launch.choose("backend", "none", "one process: no process group, no DDP")
    launch.watch.enter("data and model", patient=True)
    why = f"--precision {settings.precision}"
    if settings.precision == "auto":
        settings.precision, why = "fp32", f"default on {launch.device.type}"
        if launch.device.type == "cuda":  # one for all: DDP would average fp16 with bf16
            without = [rank for rank, about in enumerate(abouts) if not about["bf16"]]
            settings.precision = "fp16" if without else "bf16"
            why = f"no bf16 in hardware on rank {without[0]}" if without else "bf16 in hardware"
    elif settings.precision == "fp16" and launch.device.type != "cuda":
        raise UserError("--precision fp16 needs CUDA; a new run can use bf16 or fp32")
    launch.choose("precision", settings.precision, why)
    use_cores(launch, settings.threads)


def choose_device(launch: Launch, asked: str) -> None:
    """Sets `launch.device`: the one asked for, or the best that is here."""
    several, trouble = launch.world_size > 1, ""
    if asked == "mps" and several:
        raise UserError("--device mps trains in one process only; use --device cpu for several")
    if asked == "cpu" and not torch.cuda.is_initialized():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # optimizers ask for a GPU, and would wake it up
    if asked in ("auto", "cuda") and torch.cuda.device_count():
        device = torch.device("cuda", launch.local_rank % torch.cuda.device_count())
        try:
            torch.cuda.set_device(device)
            launch.device = device
        except Exception as error:  # an old driver, MIG: devices are counted, but none opens
            trouble = reason_of(error)
    elif asked in ("auto", "mps") and not several and torch.backends.mps.is_available():
        launch.device = torch.device("mps")
    if asked not in ("auto", launch.device.type):
        trouble = trouble or "PyTorch sees none here"
        raise UserError(f"--device {asked}: no usable GPU ({trouble}); use --device cpu")
    order = "cuda, cpu" if several else "cuda, mps, cpu"
    why = f"--device {asked}" if asked != "auto" else f"the first of {order} that is here"
    why += f"; no CUDA: {trouble}" if trouble else ""
    launch.choose("device", launch.device, why)


def join_group(launch: Launch) -> list[dict]:
    """Forms the process group; returns what every rank says of itself. Ranks meet."""
    launch.watch.enter("forming the process group", meets=True)
    # The watch finds what hangs; the group itself must outlast a download and a slow save.
    timeout = datetime.timedelta(seconds=max(launch.watch.timeout + 60, 7200))
    store, rank, ranks = next(dist.rendezvous("env://", timeout=timeout))
    # torchrun keeps its store over a restart, with the addresses of dead ranks in it.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"attempt/{attempt}", store)
    # A group has one backend, so all ranks choose it by the same facts, before they form it.
    store.set(f"about/{rank}", json.dumps(about_rank(launch)))
    abouts = [json.loads(store.get(f"about/{r}")) for r in range(ranks)]
    store.set(f"read/{rank}", "")
    if rank == 0:  # the store may live here, and go with it if what follows is an error
        store.wait([f"read/{r}" for r in range(ranks)])
    backend, why = choose_backend(abouts)
    launch.choose("backend", backend, why)
    device = launch.device if backend == "nccl" else None
    group = {"world_size": ranks, "rank": rank, "timeout": timeout, "device_id": device}
    dist.init_process_group(backend, store=store, **group)
    return abouts


def about_rank(launch: Launch) -> dict:
    """What the others must know of this rank: its host, its kind of device, and which GPU."""
    about = {"host": socket.gethostname(), "device": launch.device.type, "gpu": "", "bf16": False}
    if launch.device.type == "cuda":
        gpu = torch.cuda.get_device_properties(launch.device)
        about["gpu"] = str(getattr(gpu, "uuid", launch.device.index))
        about["bf16"] = torch.cuda.is_bf16_supported(including_emulation=False)
    return about


def choose_backend(abouts: list[dict]) -> tuple[str, str]:
    """(backend, reason) by what all ranks say of themselves, the same on each of them."""
    devices = {about["device"]: rank for rank, about in enumerate(abouts)}
    if len(devices) > 1:
        kinds = " and ".join(f"{kind} (rank {rank})" for kind, rank in devices.items())
        raise UserError(f"ranks run on {kinds}; give --device cpu, or repair the GPUs' driver")
    if "cuda" not in devices:
        return "gloo", f"{next(iter(devices))} run"
    if sys.platform == "win32":
        return "gloo", "NCCL is not built for Windows"
    if len({(about["host"], about["gpu"]) for about in abouts}) < len(abouts):
        return "gloo", "several ranks share a GPU, which NCCL refuses"
    return "nccl", "one CUDA device per rank"


def gather(value: Any, launch: Launch) -> list:
    """The values of all ranks, in rank order. Ranks meet."""
    values = [value] * launch.world_size
    if launch.world_size > 1:
        dist.all_gather_object(values, value)
    return values


def tear_down() -> None:
    """Leaves the process group. Ranks meet: this is for an ending that all of them share, since
    under NCCL it waits for all, also for one that will never come."""
    if dist.is_initialized():
        dist.barrier()
        # Gloo's threads drop the last tensors a moment after a collective has returned, and need
        # the interpreter for it: a group destroyed meanwhile hangs or aborts the process.
        time.sleep(0.2)
        dist.destroy_process_group()


# ---- Dataset and collator of the tiny model -----------------------------------------------------


class IndexedTextDataset(Dataset):
    """Non-empty texts; item `i` is `(record_id, text)`, the id being its position in the whole
    corpus, of which `ids` may pick a part. Raises `ValueError` for an empty text."""

    def __init__(self, texts: Sequence[str], ids: Any = None) -> None:
        for i, text in enumerate(texts if isinstance(texts, list | tuple) else ()):
            if not text:
                raise ValueError(f"text {i} is empty")
        self.texts, self.ids = texts, range(len(texts)) if ids is None else ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> tuple[int, str]:
        if not 0 <= index < len(self):
            raise IndexError(f"item {index} of {len(self)}")
        record_id = int(self.ids[index])
        return record_id, self.texts[record_id]


def encode(text: str) -> np.ndarray:
    """The UTF-8 bytes of a text and EOS as tokens, uint16 [bytes + 1]."""
    tokens = np.frombuffer(text.encode("utf-8") + b"\0", dtype=np.uint8).astype(np.uint16)
    tokens[-1] = EOS
    return tokens


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


# ---- Sampler ------------------------------------------------------------------------------------


class EpochSampler(Sampler[int]):
    """The order of an epoch for one process: a permutation fixed by (seed, epoch). `set_epoch` also
    says how many samples of it, counted over all ranks, were already trained on."""

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
    """The share of one rank in the order of an epoch. Unlike other `DistributedSampler`s it can
    start inside one, and repeats nothing: a rank that runs out first trains on padding that weighs
    nothing (see `updates_of_epoch`), so that every sample counts once an epoch."""

    def __init__(self, size: int, seed: int, num_replicas: int, rank: int) -> None:
        EpochSampler.__init__(self, size, seed)
        self.num_replicas, self.rank = num_replicas, rank


def updates_of_epoch(
    loader: DataLoader, sampler: EpochSampler, settings: Settings
) -> Iterator[list[dict]]:
    """Yields the micro-batches of one update after another, until the epoch ends. All ranks get the
    same number of updates and of micro-batches in each: what is left of the epoch is known to all
    of them, and a rank whose share ran out gets a row of padding."""
    ranks, batch = sampler.num_replicas, settings.batch_size
    left = sampler.size - sampler.start
    batches = iter(loader)
    empty = loader.collate_fn([])
    while left > 0:
        samples = min(left, batch * settings.grad_accum * ranks)  # of this update, over all ranks
        micro_batches = math.ceil(samples / (ranks * batch))
        yield [next(batches, empty) for _ in range(micro_batches)]
        left -= samples


# ---- The tiny model -----------------------------------------------------------------------------


class CausalLayer(nn.TransformerEncoderLayer):
    """PyTorch's pre-norm layer with its forward pass written out, always causal: the same numbers,
    easy to step through, and with fewer copies of tensors."""

    def forward(self, src: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """src [B, T, D] → [B, T, D]; the masks that the encoder passes are not looked at."""
        batch, length, width = src.shape
        heads, attention = self.self_attn.num_heads, self.self_attn
        qkv = F.linear(self.norm1(src), attention.in_proj_weight)  # (B, T, 3·D)
        qkv = qkv.view(batch, length, 3, heads, width // heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # (B, heads, T, D/heads) each
        dropout = attention.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, None, dropout, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(batch, length, width)  # (B, T, D)
        hidden = src + self.dropout1(attention.out_proj(mixed))
        fed = self.dropout(self.activation(self.linear1(self.norm2(hidden))))  # (B, T, 4·D)
        return hidden + self.dropout2(self.linear2(fed))


class TinyCausalTransformer(nn.Module):
    """A byte-level causal Transformer: embeddings, `nn.TransformerEncoder`, norm, head. Pre-norm
    layers with GELU and a feed-forward width of 4 · d_model (Radford et al. 2019, GPT-2). Shapes:
    ids [B, T] → embeddings [B, T, d_model] → logits [B, T, 258]."""

    def __init__(
        self,
        d_model: int = 64,
        layers: int = 1,
        heads: int = 4,
        dropout: float = 0.0,
        seq_len: int = 64,
    ) -> None:
        super().__init__()
        self.config = {"d_model": d_model, "layers": layers, "heads": heads}
        self.config |= {"dropout": dropout, "seq_len": seq_len}
        self.token_emb = nn.Embedding(VOCAB, d_model)
        self.pos_emb = nn.Embedding(seq_len, d_model)
        self.drop = nn.Dropout(dropout)
        # No biases: that of the keys shifts all scores of a query alike, so its gradient is zero
        # but for rounding noise, which AdamW would blow up into steps that differ between runs.
        options = {"batch_first": True, "norm_first": True, "bias": False}
        layer = CausalLayer(d_model, heads, 4 * d_model, dropout, "gelu", **options)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(d_model, bias=False)
        self.lm_head = nn.Linear(d_model, VOCAB, bias=False)
        # Positions begin as sinusoids (Vaswani et al. 2017, 3.5): neighbours are alike from the
        # first update on, instead of each having to be learned. Embeddings of standard deviation
        # 0.3 and matrices of 0.6 / √(inputs) lie between GPT-2's weights and PyTorch's defaults.
        # Measured: tests/benchmarks/README.md.
        for parameter in self.parameters():
            if parameter.ndim >= 2:
                nn.init.normal_(parameter, std=0.6 / math.sqrt(parameter.shape[1]))
        nn.init.normal_(self.token_emb.weight, std=0.3)
        places = torch.arange(seq_len)[:, None] / 1e4 ** (torch.arange(d_model) // 2 * 2 / d_model)
        waves = torch.where(torch.arange(d_model) % 2 == 0, places.sin(), places.cos())
        with torch.no_grad():
            self.pos_emb.weight.copy_(0.3 * math.sqrt(2) * waves)

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
        """Mean cross-entropy in nats of logits[:, :-1] against labels[:, 1:], −100 left out: a
        scalar of `sum_dtype`; without any label 0, with zero gradients."""
        total, count = summed_loss(self.logits(input_ids), labels)
        return total / count.clamp(min=1)


def summed_loss(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [B, T, V], labels int64 [B, T] → summed cross-entropy in nats, number of targets.
    Position t predicts label t + 1; −100 is left out. The sum has the type of `sum_dtype`."""
    # Shifting the labels instead of the logits spares a copy of the larger tensor.
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE).flatten()  # (B·T)
    logits = logits.flatten(0, 1).float()  # (B·T, V)
    losses = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none")
    return losses.sum(dtype=sum_dtype(logits.device)), (targets != IGNORE).sum()


def sum_dtype(device: torch.device) -> torch.dtype:
    """The type that sums of losses are kept in: float64, which only Metal GPUs lack."""
    return torch.float32 if device.type == "mps" else torch.float64


# ---- The training step --------------------------------------------------------------------------


@dataclasses.dataclass
class StepResult:
    """What one update did, over all ranks and micro-batches."""

    loss: float  # nats per token, mean over all valid tokens of the global batch
    learned: int  # valid targets in the global batch
    tokens: int  # those and the tokens that are only read, as the questions of a chat
    grad_norm: float  # L2 norm of the gradient of that loss, before clipping
    skipped: bool = False  # the fp16 scaler found an overflow, and left the weights alone
    stop: bool = False  # a signal asked any rank for the end of the run


def training_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    micro_batches: list[dict],
    launch: Launch,
    settings: Settings,
) -> StepResult:
    """One update from the micro-batches of this rank; `model` is DDP-wrapped or bare.

    The gradient to follow is that of the mean over all valid tokens of the global batch,

        G = (1/n) · Σ_r Σ_j ∇S_rj ,   n = Σ_r Σ_j n_rj ,

    where S_rj is the summed loss of micro-batch j on rank r and n_rj its number of valid tokens.
    The model returns the mean S_rj / n_rj (0 without a target, not NaN), and DDP divides the sum
    over N ranks by N. So each rank runs backward on (n_rj / c) · mean = S_rj / c, and DDP leaves

        g = (1/N) · Σ_r Σ_j ∇S_rj / c ,   hence   G = (c·N / n) · g .

    n is only known when all ranks have added up, after the backward pass. Any constant c gives the
    same G; the most targets of a rank in an update keeps g as large as G, which fp16 needs.
    Raises `Diverged`, on all ranks alike, for a loss or gradient that is not finite.
    """
    device, watch, ranks = launch.device, launch.watch, launch.world_size
    capacity = settings.batch_size * settings.grad_accum * (settings.seq_len - 1)  # c
    totals = torch.zeros(4, dtype=sum_dtype(device), device=device)  # S, n, tokens, stop wishes
    for j, batch in enumerate(micro_batches):
        last = j == len(micro_batches) - 1
        # DDP decides in the forward pass whether the backward pass will synchronize, so both are
        # inside no_sync: local gradients add up until the last micro-batch sends the sum.
        with contextlib.nullcontext() if last or ranks == 1 else model.no_sync():
            valid = valid_targets(batch["labels"])  # n_rj
            watch.enter("forward")
            with autocast(launch, settings):
                loss = model(**inputs_of(batch, device))
            watch.enter("backward", meets=last)  # ranks meet: DDP all-reduces bucket after bucket
            scaler.scale(loss * (valid / capacity)).backward()
        totals[0] += loss.detach() * valid
        totals[1] += valid
        totals[2] += batch.get("tokens", valid)  # Qwen's collator counts what is only read

    totals[3] = bool(watch.signal)
    watch.enter("sum of losses", meets=True)
    if ranks > 1:
        dist.all_reduce(totals)  # ranks meet: the only other message of a step, 32 bytes
    scaler.unscale_(optimizer)  # before anything looks at the size of a gradient
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
    norm = nn.utils.get_total_norm(gradients).to(totals.dtype)
    # The one place where a GPU is waited for.
    loss_sum, n, tokens, wishes, norm = torch.cat([totals, norm[None]]).tolist()

    watch.enter("optimizer")
    correction = capacity * ranks / max(n, 1)  # c·N / n: the gradients hold g, this makes it G
    result = StepResult(loss_sum / max(n, 1), int(n), int(tokens), norm * correction)
    result.stop = wishes > 0
    # Every rank sees the same averaged gradient and the same loss, so all come to one verdict.
    result.skipped = overflowed(result, scaler)
    if not result.skipped:
        shrink = min(1.0, settings.clip / (result.grad_norm + 1e-6)) if settings.clip else 1.0
        torch._foreach_mul_(gradients, correction * shrink)  # as clip_grads_with_norm_ does it
        scaler.step(optimizer)
    scaler.update()  # by what `unscale_` found
    optimizer.zero_grad(set_to_none=True)
    return result


def overflowed(result: StepResult, scaler: torch.amp.GradScaler) -> bool:
    """Whether fp16 gradients overflowed, which a smaller scale mends. Else raises `Diverged`."""
    finite = math.isfinite(result.grad_norm)
    if not math.isfinite(result.loss) or not (finite or scaler.is_enabled()):
        raise Diverged(f"the loss is {result.loss:.4f}, the gradient norm {result.grad_norm}")
    if not finite and scaler.get_scale() < 1:  # it begins at 65,536
        raise Diverged("fp16 gradients overflow even without a loss scale")
    return not finite


def autocast(launch: Launch, settings: Settings) -> contextlib.AbstractContextManager:
    """Runs matrix products in bf16 or fp16 where asked for; weights and loss stay fp32."""
    if settings.precision == "fp32":
        return contextlib.nullcontext()
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[settings.precision]
    return torch.autocast(launch.device.type, dtype=dtype)


def inputs_of(batch: dict, device: torch.device) -> dict:
    """What the model takes of a batch, on its device: "inputs" where the collator made them."""
    inputs = batch.get("inputs") or {name: batch[name] for name in ("input_ids", "labels")}
    return {name: tensor.to(device, non_blocking=True) for name, tensor in inputs.items()}


# ---- Validation ---------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Iterable[dict], launch: Launch, settings: Settings
) -> float:
    """Mean loss over the batches of all ranks in nats per token; each sample counts once. `model`
    is the bare module: the DDP wrapper would meet the other ranks in its forward pass, and they may
    have another number of batches. Sums come before the mean, so that the value depends neither on
    the number of ranks nor on the batch size. Ranks meet, once, at the end."""
    was_training = model.training
    totals = torch.zeros(2, dtype=sum_dtype(launch.device), device=launch.device)
    model.eval()
    for batch in batches:
        launch.watch.enter("validation")
        valid = valid_targets(batch["labels"])
        with autocast(launch, settings):
            totals[0] += model(**inputs_of(batch, launch.device)) * valid
        totals[1] += valid
    model.train(was_training)
    launch.watch.enter("sum of validation", meets=True)
    if launch.world_size > 1:
        dist.all_reduce(totals)  # ranks meet
    loss_sum, n = totals.tolist()
    return loss_sum / max(n, 1)


# ---- DDP and the trainer ------------------------------------------------------------------------


def wrap_in_ddp(bare: nn.Module, launch: Launch, **options: Any) -> DistributedDataParallel:
    """The model in DDP's wrapper; `options` go to DDP. Ranks meet: rank 0 sends its weights to all,
    so that replicas begin equal; from then on every backward pass averages their gradients."""
    # Qwen's only buffers are constants (rotary frequencies): they are sent once, here, and not in
    # every forward pass, which is the default. (The flag's name before torch 2.13.)
    known = inspect.signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options[name] = False
    devices = [launch.device.index] if launch.device.type == "cuda" else None
    # Gradients live in the buckets that are sent, so that none is copied.
    return DistributedDataParallel(bare, devices, gradient_as_bucket_view=True, **options)


def trained_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """(name, parameter) of all that is trained, in name order."""
    return sorted((n, p) for n, p in model.named_parameters() if p.requires_grad)


def build_optimizer(model: nn.Module, settings: Settings) -> torch.optim.AdamW:
    """AdamW over the trained parameters; weight decay on matrices only."""
    trained = [parameter for _, parameter in trained_parameters(model)]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    beta1 = 0.8 if settings.model == "tiny" else 0.9  # measured: tests/benchmarks/README.md
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(beta1, 0.95), fused=True)


def learning_rate(update: int, settings: Settings, updates: int) -> float:
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


def global_batch(launch: Launch, settings: Settings) -> int:
    """Sequences in one update, over all ranks and micro-batches."""
    return settings.batch_size * settings.grad_accum * launch.world_size


@dataclasses.dataclass
class Progress:
    """How far a run has come: all that a checkpoint must know beside tensors."""

    step: int = 0  # completed updates
    epoch: int = 1
    samples: int = 0  # samples of the epoch that were trained on, over all ranks
    tokens: int = 0  # tokens that were read and predicted
    learned: int = 0  # those of them that counted in the loss
    seconds: float = 0.0  # of training: without validation, sampling and saving
    skipped: int = 0  # updates that the fp16 scaler left out
    validated: int = 0  # the update after which the last validation was made
    best: float | None = None  # validation loss
    best_step: int = 0

    def advance(self, result: StepResult, global_batch: int, epoch_size: int) -> None:
        """Counts one update; after the last one of an epoch, the next epoch begins."""
        self.step += 1
        self.tokens += result.tokens
        self.learned += result.learned
        self.skipped += result.skipped
        self.samples = min(self.samples + global_batch, epoch_size)
        if self.samples == epoch_size:
            self.epoch, self.samples = self.epoch + 1, 0


class Trainer:
    """The loop, and all that it holds: optimizer, loaders, and whom it reports to. `model` is
    `bare`, the model itself, in DDP's wrapper if there are several ranks; `checkpoints` is None on
    all but rank 0."""

    def __init__(
        self, run: Run, log: RunLog, checkpoints: Checkpoints | None, **ddp_options: Any
    ) -> None:
        self.run, self.log, self.checkpoints = run, log, checkpoints
        self.progress = log.progress  # after --resume that of the checkpoint
        self.launch, self.settings = launch, s = run.launch, run.settings
        data, rank, ranks = run.data, launch.rank, launch.world_size
        torch.manual_seed(s.seed + 1 + rank)  # equal weights, but other dropout masks on every rank
        self.model = self.bare = run.model
        if s.compile:
            self.bare.compile()
        self.sampler = EpochSampler(len(data.train), s.seed)
        if ranks > 1:
            self.model = wrap_in_ddp(self.bare, launch, **ddp_options)  # ranks meet
            self.sampler = ShardSampler(len(data.train), s.seed, ranks, rank)
        options = {"batch_size": s.batch_size, "collate_fn": run.collate}
        options |= {"pin_memory": launch.device.type == "cuda"}
        options |= {"generator": torch.Generator()}  # its own: the default one belongs to dropout
        self.loader = DataLoader(data.train, sampler=self.sampler, **options)
        # Validation is shared out without repeats: ranks may get different numbers of samples.
        share = range(rank, len(data.validation), ranks)
        self.val_loader = DataLoader(data.validation, sampler=share, **options)
        self.optimizer = build_optimizer(self.bare, s)
        self.scaler = torch.amp.GradScaler("cuda", enabled=s.precision == "fp16")
        self.saved = 0  # the update after which the newest checkpoint was taken

    def fit(self) -> None:
        """Trains until all updates are done. Raises `Stopped` after saving when a signal came."""
        s, log, progress, watch = self.settings, self.log, self.progress, self.launch.watch
        updates, size = self.run.updates, self.sampler.size
        log.restart_clock()
        if progress.step:  # after --resume: a validation that a signal had cut short
            self.after_update()
        while progress.step < updates:
            self.sampler.set_epoch(progress.epoch, progress.samples)
            for micro_batches in updates_of_epoch(self.loader, self.sampler, s):
                rate = learning_rate(progress.step, s, updates)
                for group in self.optimizer.param_groups:
                    group["lr"] = rate
                watch.step = progress.step + 1
                result = training_step(
                    self.model, self.optimizer, self.scaler, micro_batches, self.launch, s
                )
                epoch = progress.epoch
                progress.advance(result, global_batch(self.launch, s), size)
                log.update(epoch, rate, result)
                self.after_update(result.stop)
                if progress.step == updates:
                    break
                watch.enter("next batch")

    def after_update(self, stop: bool = False) -> None:
        """Validation, sample and checkpoint, where this update calls for them; then the stop."""
        s, progress, step = self.settings, self.progress, self.progress.step
        last = step == self.run.updates
        better = False

        def due(every: int) -> bool:
            return last or (every > 0 and step % every == 0)

        if due(s.eval_every) and progress.validated < step and len(self.run.data.validation):
            # A rank that a signal reaches leaves the rest out; the value then counts for nothing.
            go_on = itertools.takewhile(lambda _: not self.launch.watch.signal, self.val_loader)
            loss = evaluate(self.bare, go_on, self.launch, s)
            if any(gather(self.launch.watch.signal, self.launch)):  # ranks meet
                self.save_and_stop()  # after --resume the validation is made again
            if not math.isfinite(loss):
                raise Diverged(f"the validation loss is {loss}")
            better = self.log.validation(loss)  # on all ranks alike, as the loss is
            if better:
                self.saved = 0  # a checkpoint that was taken before does not know it
        if due(s.sample_every):
            self.require_sound_weights()  # ranks meet
            self.launch.watch.enter("sample", patient=True)
            if self.launch.rank == 0:
                self.launch.say(f"sample     {self.run.sample()}")
        if stop and not last:
            self.save_and_stop()
        if stop or (s.save_every and (better or due(s.save_every))):
            self.save()
        self.log.restart_clock()

    def save_and_stop(self) -> NoReturn:
        """Saves, and raises `Stopped` on all ranks when the state is safe. Ranks meet."""
        self.launch.watch.enter("stop", meets=True)
        number = max(gather(self.launch.watch.signal, self.launch))
        self.save()
        place = self.checkpoints.secure(self.log.folder) if self.checkpoints else ""
        place = gather(place, self.launch)[0]  # nobody leaves before rank 0 has saved
        name, step, updates = signal.Signals(number).name, self.progress.step, self.run.updates
        done = f"{name} after update {step} of {updates}; the state is saved"
        raise Stopped(f"{done}, go on with --resume {place}", number)

    def require_sound_weights(self) -> None:
        """Raises `Diverged` unless a forward pass with these weights gives a finite loss: a huge
        step can spoil them while its own loss and gradient were still finite. Ranks meet."""
        batch = self.run.collate([self.run.data.train[0]])
        loss = evaluate(self.bare, [batch], self.launch, self.settings)
        if not math.isfinite(loss):
            raise Diverged(f"the weights are spoiled, a forward pass gives a loss of {loss}")

    def save(self) -> None:
        """Takes the state of this instant on all ranks and hands it to rank 0. Ranks meet."""
        if self.saved == self.progress.step:
            return
        self.require_sound_weights()  # ranks meet
        self.launch.watch.enter("save", meets=True, patient=True)
        if self.checkpoints:
            self.checkpoints.wait()  # the last one may still be on its way to the disk
        state = state_of(self)  # ranks meet
        self.saved = self.progress.step
        if self.checkpoints:
            self.checkpoints.save(state)


# ==== Part 2: what serves a run ===================================================================

# ---- Settings ------------------------------------------------------------------------------------


def flag(default: Any, help: str, **spec: Any) -> Any:
    """A field of `Settings` that is a flag. `spec`: low, above and high of a number; choices,
    metavar, nargs, const as for argparse; group, where one begins; fixed: kept by --resume."""
    return dataclasses.field(default=default, metadata={"help": help, **spec})


# fmt: off
@dataclasses.dataclass
class Settings:
    """All that can be set. None: not given; `resolve` then decides by the other flags."""

    model: str = flag("tiny", "tiny: byte-level Transformer, no download; qwen: Qwen2.5 with LoRA",
        group="run", choices=("tiny", "qwen"), fixed=True)
    device: str = flag("auto", "auto: CUDA, else (one process only) a Mac's GPU, else the CPU",
        choices=("auto", "cpu", "cuda", "mps"))
    cpu: bool = flag(False, "the same as --device cpu")
    seed: int = flag(0, "fixes initial weights, split, order and dropout", low=0, fixed=True)
    threads: int | None = flag(None, "per rank (default: its share of the cores)", low=1, high=4096)
    output_dir: Path | None = flag(None, "where the run writes (default: runs/<model>-<time>)")
    overwrite: bool = flag(False, "replace the run that --output-dir holds")
    resume: str | None = flag(None, "go on from the newest checkpoint of a run (its folder, or the "
        "URL of --checkpoint-dir); flags not given keep their values. FILE: a new run from there. "
        "auto: from --output-dir if it has one, else begin", metavar="{auto,RUN,FILE,URL}")
    dry_run: bool = flag(False, "check settings and data, show a sample; train and write nothing")
    generate: str | None = flag(None, "continue this with the model of --resume", metavar="PROMPT")

    corpus_file: Path | None = flag(None, "your own text or records instead of --builtin: .txt, "
        ".jsonl, .json, .csv, .tsv, .parquet, also gzipped", group="data")
    builtin: str | None = flag(None, "lessons: a few dozen sentences; python-docs: the language "
        "reference of CPython, 460 KB (default: lessons)", choices=("lessons", "python-docs"),
        fixed=True)
    corpus_format: str | None = flag(None, "lines: a sample a line; document: one running text; "
        "jsonl: records of text, prompts or chats (default: by the file's name)",
        choices=("lines", "document", "jsonl"), fixed=True)
    val_fraction: float = flag(0.1, "held out for validation", low=0, high=0.9, fixed=True)
    pack: bool = flag(False, "fill every window with several samples: no padding, more tokens a "
        "second; with tiny joined by EOS, with qwen invisible to each other", fixed=True)
    overlong: str | None = flag(None, "samples longer than --seq-len: cut off, cut in pieces, or "
        "leave out (default: truncate; --pack and documents split)",
        choices=("truncate", "split", "drop"), fixed=True)
    seq_len: int | None = flag(None, "most tokens in a window; lower it last when memory runs out "
        "(default: 64 tiny, 256 qwen)", low=2, fixed=True)

    d_model: int = flag(64, "width of the model", group="tiny", low=1, fixed=True)
    layers: int = flag(1, "Transformer layers", low=1, fixed=True)
    heads: int = flag(4, "attention heads, a divisor of --d-model", low=1, fixed=True)
    dropout: float = flag(0.0, "raise it if validation rises", low=0, high=0.99, fixed=True)

    base_model: str = flag("Qwen/Qwen2.5-0.5B-Instruct", "a causal model of transformers: a hub "
        "id, or a local folder, which needs no network", group="qwen", metavar="ID_OR_DIR")
    lora_r: int = flag(8, "rank of the adapters", low=1, fixed=True)
    lora_alpha: float = flag(16, "their scale is alpha / r", above=0, fixed=True)
    lora_dropout: float = flag(0.05, "probability", low=0, high=0.99, fixed=True)
    lora_targets: str = flag("q_proj,v_proj", "Linear layers to adapt", metavar="NAMES", fixed=True)
    gradient_checkpointing: str | None = flag(None, "keep less and compute it again, when memory "
        "runs out at --batch-size 1; selective: keep matrix products and attention", nargs="?",
        const="full", choices=("full", "selective"))
    merge: bool = flag(False, "also write merged/, a plain model with the adapter merged in")

    batch_size: int = flag(8, "sequences per rank and micro-batch; lower this first when memory "
        "runs out, and raise --grad-accum by the same factor", group="optimization", low=1)
    grad_accum: int = flag(1, "micro-batches per update", low=1)
    epochs: int | None = flag(None, "passes over the corpus (default: by --max-steps)", low=1)
    max_steps: int | None = flag(None, "updates (default: 300, unless --epochs is given)", low=1)
    lr: float | None = flag(None, "peak learning rate; divide it by 3 when the loss jumps. tiny "
        "learns most with 0.64 / --d-model (default: 3e-4 tiny, 2e-4 qwen)", above=0, fixed=True)
    weight_decay: float = flag(0.01, "AdamW's decay, on matrices only", low=0, fixed=True)
    schedule: str = flag("constant", "of the rate after the warmup: level, or falling to 0",
        choices=("constant", "linear", "cosine"), fixed=True)
    warmup_steps: int = flag(0, "updates over which the rate rises from 0", low=0, fixed=True)
    clip: float = flag(1.0, "largest norm of the global gradient; 0: none", low=0, fixed=True)
    precision: str = flag("auto", "of the matrix products and a frozen base; trained weights stay "
        "fp32. auto: bf16 or fp16 on CUDA, what all cards have, else fp32",
        choices=("auto", "fp32", "bf16", "fp16"), fixed=True)
    compile: bool = flag(False, "torch.compile: slower start, faster steps", fixed=True)

    save_every: int = flag(0, "updates between two checkpoints, and one at every best validation; "
        "0: only when stopped by a signal", group="checkpoints", low=0)
    keep: int = flag(3, "newest ones kept, besides the best; lower it when the disk fills", low=1)
    checkpoint_dir: str | None = flag(None, "another folder for them, or a URL of fsspec such as "
        "s3://bucket/run, where the results then go as well", metavar="FOLDER_OR_URL")

    log_every: int = flag(10, "updates between two log lines", group="watching", low=1)
    eval_every: int = flag(0, "updates between two validations; 0: only at the end", low=0)
    sample_every: int = flag(0, "updates between two generated samples; 0: only at the end", low=0)
    tensorboard: bool = flag(False, "also write event files for TensorBoard")

    checkpoint: dict | None = None  # no flag: the state that --resume goes on from
    batch_given: bool = False  # no flag: whether the batch was asked for, and not just resumed
    # fmt: on

    def to_save(self) -> dict:
        """The flags as plain values, but for those that hold for one start only."""
        once = ("output_dir", "overwrite", "resume", "dry_run", "generate", "cpu")
        names = [f.name for f in dataclasses.fields(self) if f.metadata and f.name not in once]
        corpus = str(self.corpus_file) if self.corpus_file else None
        return {name: getattr(self, name) for name in names} | {"corpus_file": corpus}


def flag_parser(kind: type = Settings, **options: Any) -> argparse.ArgumentParser:
    """The command line of a dataclass of flags; a flag that is not given leaves no trace."""
    options |= {"allow_abbrev": False, "argument_default": argparse.SUPPRESS}
    group: Any = (parser := argparse.ArgumentParser(**options))
    # Without the block of usage: a wrong flag is one line.
    parser.error = lambda message: refuse(True, f"{message} (see --help)")  # type: ignore
    for field in dataclasses.fields(kind):
        spec, name = dict(field.metadata), field.type.split(" |")[0]
        if not spec:
            continue
        spec.pop("fixed", None)
        if "group" in spec:
            group = parser.add_argument_group(spec.pop("group"))
        bounds = {key: spec.pop(key) for key in ("low", "above", "high") if key in spec}
        if name == "bool":
            spec["action"] = "store_true"
        elif name in ("int", "float", "Path"):
            kinds = {"int": (int, "N"), "float": (float, "X"), "Path": (Path, "PATH")}
            spec["type"], metavar = kinds[name]
            spec.setdefault("metavar", metavar)
        if bounds:
            spec["type"] = number(spec["type"], **bounds)
        if field.default not in (None, False):
            spec["help"] += f" (default: {field.default})"
        group.add_argument(f"--{field.name.replace('_', '-')}", **spec)
    return parser


def number(kind: type, low: float = -math.inf, above: float = -math.inf, high: float = 2**31 - 1):
    """A converter for argparse: an int or float from `low` to `high`, or greater than `above`."""

    def convert(text: str) -> Any:
        """The number that a flag was given as; argparse makes a `UserError` of what it raises."""
        with contextlib.suppress(ValueError):
            if low <= (value := kind(text)) <= high and value > above:
                return value
        what = "a whole number" if kind is int else "a number"
        bounds = f"above {above}" if above > -math.inf else f"of at least {low}"
        raise argparse.ArgumentTypeError(f"{text!r} is not {what} {bounds} and at most {high}")

    return convert


def parse_settings(argv: Sequence[str] | None = None) -> Settings:
    """Reads the command line. With --resume, the state to go on from is read here as well, and
    flags not given keep its values. Raises `UserError` for unknown or contradictory flags."""
    parser = flag_parser(
        prog="llm_ddp_parallel_training.py",
        description="Train a language model on one or several processes with PyTorch DDP.",
        epilog="exit status: 0 done, 2 wrong input or settings, 3 diverged, 143, 130 and 138 "
        "stopped by SIGTERM, Ctrl-C and SIGUSR1 after saving, 1 anything else. Environment: "
        "DDP_TIMEOUT_S, seconds without progress after which a rank counts as hung (default: 600)",
    )
    given, state, saved = vars(parser.parse_args(argv)), None, {}
    for name in given.keys() & {"output_dir", "corpus_file", "resume", "base_model"}:
        with blaming(f"--{name.replace('_', '-')} {given[name]}"):
            Path(given[name], "run.json").exists()  # raises if it is too long, or out of reach
    if "generate" in given:
        refuse("resume" not in given, "--generate PROMPT needs --resume RUN, a finished run")
        saved = saved_settings(given["resume"])
    elif "resume" in given and (state := state_to_resume(given)):
        saved = state["settings"]
    fixed = {f.name: f.metadata.get("fixed") for f in dataclasses.fields(Settings) if f.metadata}
    saved = {name: value for name, value in saved.items() if name in fixed and value is not None}
    if saved and given.get("precision") == "auto":
        del given["precision"]
    for name in sorted(given.keys() & saved.keys()):
        refuse(
            fixed[name] and given[name] != saved[name] and "generate" not in given,
            f"--{name.replace('_', '-')} {given[name]} differs from the interrupted run's "
            f"{saved[name]}, which --resume continues; leave the flag out, or start a new run",
        )
    replaced = {"corpus_file": "builtin", "cpu": "device", "epochs": "max_steps"}
    for new, old in (*replaced.items(), ("max_steps", "epochs")):
        if new in given:
            saved.pop(old, None)
    batch_given = bool({"batch_size", "grad_accum"} & given.keys())
    settings = Settings(**saved | given, checkpoint=state, batch_given=batch_given)
    resolve(settings)
    return settings


def resolve(settings: Settings) -> None:
    """Refuses contradictions and fills in the defaults that depend on other flags."""
    s, qwen = settings, settings.model == "qwen"
    s.device = "cpu" if s.cpu and s.device == "auto" else s.device
    refuse(s.cpu and s.device != "cpu", f"--cpu contradicts --device {s.device}; give one of them")
    refuse(s.overwrite and s.resume, "--overwrite begins anew, --resume goes on; give one of them")
    refuse(s.corpus_file and s.builtin, "--corpus-file contradicts --builtin; give one of them")
    refuse(s.d_model % s.heads, f"--heads {s.heads} does not divide --d-model {s.d_model}")
    refuse(s.generate == "", "--generate needs a prompt of at least one character")
    refuse(re.search("[\ud800-\udfff]", s.generate or ""), "--generate needs a prompt in UTF-8")
    refuse(s.merge and not qwen, "--merge needs --model qwen")
    refuse(s.gradient_checkpointing and not qwen, "--gradient-checkpointing needs --model qwen")
    for package in ("tensorboard",) * s.tensorboard + ("matplotlib",):  # needed much later
        there = importlib.util.find_spec(package)
        refuse(not there, f"the package {package} is missing: pip install {package}")
    if s.checkpoint_dir and "://" not in s.checkpoint_dir:
        s.checkpoint_dir = str(Path(s.checkpoint_dir).expanduser().absolute())
    s.corpus_file = Path(s.corpus_file).absolute() if s.corpus_file else None
    s.builtin = s.builtin or (None if s.corpus_file else "lessons")
    refuse(s.builtin and s.corpus_format == "jsonl", "--corpus-format jsonl needs a --corpus-file")
    if s.corpus_format is None:
        s.corpus_format = "document" if s.builtin == "python-docs" else format_of(s.corpus_file)
    s.pack = s.pack or s.corpus_format == "document"
    contradiction = s.pack and s.overlong in ("truncate", "drop")
    refuse(contradiction, f"--overlong {s.overlong} contradicts packing, which always splits")
    s.overlong = s.overlong or ("split" if s.pack else "truncate")
    s.max_steps = 300 if s.epochs is None and s.max_steps is None else s.max_steps
    s.seq_len = s.seq_len or (256 if qwen else 64)
    s.lr = s.lr or (2e-4 if qwen else 3e-4)


# ---- Endings: errors, signals, hung ranks --------------------------------------------------------

PEER_LOSS_GRACE_S = 5  # how long a rank leaves the floor to the one that knows the cause
STOP_SIGNALS = [getattr(signal, n) for n in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, n)]


class RunError(Exception):
    """Ends the run with one line for the reader instead of a traceback, and with `status`."""

    status = 1
    by_all_ranks = False  # every rank raises it, so rank 0 prints it for all


class UserError(RunError):
    """The user's input or settings are wrong; nothing was trained or overwritten."""

    status = 2


class WriteError(RunError):
    """A file could not be written."""


class Diverged(RunError):
    """The loss or the gradient stopped being a finite number."""

    status, by_all_ranks = 3, True


class Stopped(RunError):
    """A signal asked the run to end; the state is saved."""

    by_all_ranks = True

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.status = 128 + number  # as shells do: 143 for SIGTERM, 130 for SIGINT


def refuse(wrong: Any, message: str) -> None:
    """Raises `UserError` if something is wrong."""
    if wrong:
        raise UserError(message)


@contextlib.contextmanager
def blaming(what: str, kind: type[RunError] = UserError) -> Iterator[None]:
    """Whatever goes wrong inside becomes a `UserError`, or one of that `kind`, that says `what` is
    to blame: every library and file system has its own errors."""
    try:
        yield
    except Exception as error:
        raise kind(f"{what}: {reason_of(error)}") from None


@contextlib.contextmanager
def one_clear_ending() -> Iterator[Watch]:
    """Turns every way out of the run into one readable cause and the right exit status.

    A `RunError` is one line; any other exception keeps its traceback. The launcher ends all ranks
    when the first one leaves, and names that one as the root cause. So a rank that merely lost a
    peer, or that another one speaks for, waits a moment before it leaves.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # closed, or a notebook's, which has no codec
            stream.reconfigure(errors="backslashreplace")  # cp1252 has no "�"
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        # PR_SET_PDEATHSIG: who kills the launcher outright does not leave its ranks behind.
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    watch, rank = Watch(), os.environ.get("RANK", "0").strip()
    leads = not rank.isdecimal() or int(rank) == 0  # its own variable may be what is wrong
    threading.Thread(target=keep_watch, args=(watch,), daemon=True).start()
    try:
        yield watch
        watch.enter("teardown", meets=True, patient=True)
        tear_down()
    except RunError as error:
        stopped, message = isinstance(error, Stopped), str(error)
        if not leads:  # if rank 0 found the same, the launcher ends all before this is over
            time.sleep(1 if stopped else PEER_LOSS_GRACE_S)
        if isinstance(error, Diverged):
            message = f"update {watch.step}: {message}; lower --lr or raise --warmup-steps"
        if leads or not error.by_all_ranks:
            speaker = "" if leads else f"rank {rank}: "
            say_error(f"{speaker}{'stopped' if stopped else 'error'}: {message}", message)
        if isinstance(error, UserError) or (leads and error.by_all_ranks):
            # With --max-restarts torchrun would repeat the same mistake.
            if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") not in ("0", ""):
                os.kill(os.getppid(), signal.SIGTERM)
        leave(error.status)
    except KeyboardInterrupt:
        if leads:
            say_error("interrupted")
        leave(128 + signal.SIGINT)
    except Exception as error:
        place, grouped = f"rank {rank}, update {watch.step}, {watch.phase}", dist.is_initialized()
        network = isinstance(error, dist.DistBackendError | dist.DistNetworkError)
        if network or (grouped and re.search(r"gloo.*(peer|closed|reset)", str(error), re.I)):
            time.sleep(PEER_LOSS_GRACE_S)
            why = "whose own message or the launcher's summary names the cause"
            say_error(f"{place}: lost contact with another rank, {why}")
        elif isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            message = f"{place}: out of memory; lower --batch-size first ({reason_of(error)})"
            say_error(f"error: {message}", message)
        else:
            say_error(f"{place}: failed")
            if not grouped:
                raise
            traceback.print_exc()
            get_error_handler().record_exception(error)
        leave(1)
    finally:
        watch.over.set()  # the thread ends


def say_error(text: str, for_launcher: str = "") -> None:
    """Prints to standard error, which may be closed; `for_launcher` becomes torchrun's summary."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(text, file=sys.stderr, flush=True)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and for_launcher:
        extra = {"timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": for_launcher, "extraInfo": extra}}, file)


def leave(status: int) -> NoReturn:
    """Ends this rank. Other ranks may be in a collective, where the group cannot be destroyed."""
    if not dist.is_initialized():
        sys.exit(status)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(status)


@contextlib.contextmanager
def stop_wishes(watch: Watch) -> Iterator[None]:
    """Makes SIGTERM, SIGINT and SIGUSR1 a wish, which the ranks fulfil together after an update. A
    second one ends the process on the spot, but not within a second: launchers repeat them."""
    first = math.inf

    def wish(number: int, _: Any) -> None:
        """Takes note. Python calls it between two of its lines, so never inside a collective."""
        nonlocal first
        if time.monotonic() - first > 1:
            os._exit(128 + number)
        if not watch.signal:
            watch.signal, first = number, time.monotonic()

    handlers = {number: signal.signal(number, wish) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def keep_watch(watch: Watch) -> None:
    """A thread's work: ends a rank whose phase outlasts the time-out, with its stack. One that
    waits for others leaves the floor to the one that they all wait for."""
    rank, main_thread = os.environ.get("RANK", "0"), threading.main_thread().ident
    while not watch.over.wait(1):
        waited = time.monotonic() - watch.since
        if not watch.patient and waited > watch.timeout + PEER_LOSS_GRACE_S * watch.meets:
            what = "waiting for another rank" if watch.meets else "no progress"
            what += f" for {waited:.0f} s, more than DDP_TIMEOUT_S allows"
            message = f"rank {rank}, update {watch.step}, {watch.phase}: {what}"
            stack = "".join(traceback.format_stack(sys._current_frames()[main_thread]))
            say_error(f"stack of rank {rank}:\n{stack}error: {message}", message)
            os._exit(1)


# ---- Corpora: files to samples -------------------------------------------------------------------

BLANKS = bytes(range(33))  # spaces and control bytes
BOM = b"\xef\xbb\xbf"  # the UTF-8 byte-order mark
TABLES = (".csv", ".tsv", ".parquet")
SHAPES = (
    '{"text"}, {"messages"}, {"prompt", "completion"}, {"conversations"} or '
    '{"instruction", "input", "output"}'
)
ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool")}
ROLES |= {"human": "user", "gpt": "assistant", "model": "assistant"}
ROLES |= {"function": "tool", "observation": "tool"}


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


def suffix_of(path: Path) -> str:
    """What kind of file it is by its name: ".jsonl" also for "chats.JSONL.gz"."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def format_of(path: Path | None) -> str:
    """--corpus-format by the file's name. Raises `UserError` for lines that look like records."""
    if path is None or suffix_of(path) in (".jsonl", ".json", *TABLES):
        return "jsonl" if path else "lines"
    text = read_file(path)[: 1 << 20].decode("utf-8", errors="ignore").lstrip("\ufeff \r\n\t")
    unquoted, kind = re.sub('"[^"]*"', "", text), ""
    lines = [line for line in unquoted.splitlines()[:20] if line]
    # Prose has a blank behind a comma, and not the same number of them in all lines.
    cells = {len(re.findall(r"\t|[,;](?=\S|$)", line)) for line in lines}
    if re.match(r'\[\s*[\[{"]|\{\s*"[^"\n]*"\s*:', text):
        kind = "JSON; call it .jsonl (a record a line) or .json"
    elif len(lines) > 1 and len(cells) == 1 and cells != {0}:
        kind = "a table; call it .csv or .tsv"
    refuse(kind, f"--corpus-file {path} looks like {kind}, or give --corpus-format lines")
    return "lines"


def read_file(path: Path) -> bytes | mmap.mmap:
    """A file's bytes. They are mapped, which costs each rank address space and not memory: the
    pages are shared by all ranks of a machine. Raises `UserError`."""
    refuse(path.exists() and not path.is_file(), f"--corpus-file {path} is not a regular file")
    with blaming(f"--corpus-file {path}"), open(path, "rb") as file:
        zipped = file.read(2) == b"\x1f\x8b"
        return spill(gzip.open(path)) if zipped else map_file(file)


def map_file(file: Any) -> bytes | mmap.mmap:
    size = os.fstat(file.fileno()).st_size
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""


def spill(pieces: Iterable[bytes]) -> bytes | mmap.mmap:
    """Pieces as one mapped file without a name, which goes when nobody holds it any more."""
    with tempfile.TemporaryFile() as file:
        file.writelines(pieces)
        file.flush()
        return map_file(file)


def records_of(path: Path) -> Iterator[Any]:
    """The records of a table, or of a .json file: an array, or objects one after another."""
    if suffix_of(path) == ".parquet":
        missing = not importlib.util.find_spec("datasets")
        refuse(missing, f"{path}: pip install datasets, which reads parquet; or write .jsonl")
        import datasets

        datasets.disable_progress_bars()
        datasets.logging.set_verbosity(50)
        with tempfile.TemporaryDirectory() as cache:
            options = {"cache_dir": cache, "keep_in_memory": True}
            yield from datasets.Dataset.from_parquet(str(path), **options)
        return
    raw = read_file(path)[:]
    Samples(raw, str(path))  # refuses what is not UTF-8
    text, gap, at = raw.decode("utf-8-sig"), re.compile(r"[\s,]*"), 0
    if suffix_of(path) != ".json":
        tab = ",\t"[suffix_of(path) == ".tsv"]
        yield from csv.DictReader(io.StringIO(text, newline=""), delimiter=tab)
        return
    while (at := gap.match(text, at).end()) < len(text):
        value, at = json.JSONDecoder().raw_decode(text, at)
        yield from value if isinstance(value, list) else [value]


def read_corpus(settings: Settings) -> bytes | mmap.mmap:
    """The corpus, one record a line for jsonl. Raises `UserError`."""
    path = settings.corpus_file
    if settings.builtin == "lessons":
        return LESSONS.encode("utf-8")
    if not path:  # the language reference of CPython
        missing = not importlib.util.find_spec("pydoc_data")
        refuse(missing, "--builtin python-docs: this Python carries no pydoc_data")
        from pydoc_data.topics import topics

        return "\n".join(topics[name] for name in sorted(topics)).encode("utf-8")
    if settings.corpus_format == "jsonl" and suffix_of(path) in (".json", *TABLES):
        try:
            return spill(json.dumps(r, default=str).encode() + b"\n" for r in records_of(path))
        except UserError:
            raise
        except Exception as error:  # of json, csv, or datasets
            raise UserError(f"{path}: {reason_of(error)}") from None
    raw = read_file(path)
    if settings.corpus_format == "document" and (raw.find(b"\r") >= 0 or raw[:3] == BOM):
        Samples(raw, str(path))  # names a bad byte by its place in the file
        raw.seek(len(BOM) * (raw[:3] == BOM))
        return spill(re.sub(rb"\r(\n|\Z)", b"\n", line) for line in iter(raw.readline, b""))
    return raw


class Samples(Sequence):
    """The samples of a corpus, a line each: `samples[i]` is a text, or with `parse` what it makes
    of the record there. Blank lines are left out, and counted in `blank`. Holds the offsets of
    first and last byte only (uint32 below 4 GiB: 8 bytes a sample); the text is cut out of the
    map when it is asked for. Raises `UserError` that names the line of a bad one."""

    closed = True  # by EOS; a part of a document is not

    def __init__(self, buffer: bytes | mmap.mmap, name: str = "", parse: Any = None) -> None:
        self.buffer, self.name, self.parse, self.blank = buffer, name, parse, 0
        offsets, at = "I" if len(buffer) < 2**32 else "Q", 0
        starts, ends = array.array(offsets), array.array(offsets)
        file = io.BytesIO(buffer) if isinstance(buffer, bytes) else buffer
        file.seek(0)
        for number, line in enumerate(iter(file.readline, b""), 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                utf16 = buffer[:2] in (b"\xff\xfe", b"\xfe\xff")
                hint = "the file looks like UTF-16; " if utf16 else ""
                raise UserError(
                    f"{name}, line {number}, byte offset {at + error.start}: byte "
                    f"0x{line[error.start]:02x} is not UTF-8; {hint}save it as UTF-8"
                ) from None
            text = line.removeprefix(BOM) if number == 1 else line
            if not text.strip(BLANKS):
                self.blank += bool(text)
            else:
                starts.append(at + len(line) - len(text))
                ends.append(at + len(line.removesuffix(b"\n").removesuffix(b"\r")))
            at += len(line)
        self.starts, self.ends = (np.frombuffer(x, dtype=offsets) for x in (starts, ends))
        self.parsed_sizes = None
        if parse:  # every record once, so that a bad one is found now and not after an hour
            sizes = np.array([self._parsed_size(i) for i in range(len(self))], np.int64)
            self.blank += int((sizes == 0).sum())
            self.starts, self.ends = self.starts[sizes > 0], self.ends[sizes > 0]
            self.parsed_sizes = sizes[sizes > 0]

    def part(self, begin: int, end: int) -> Samples:
        """A range of bytes, line feeds included, as the only sample."""
        part = copy.copy(self)
        part.starts, part.ends, part.closed = np.array([begin]), np.array([end]), False
        return part

    def _parsed_size(self, index: int) -> int:
        try:
            return len(text_of(self[index]).encode("utf-8"))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            surrogate = "a lone surrogate is no character"
            reason = surrogate if isinstance(error, UnicodeError) else reason_of(error)
            raise UserError(f"{self.where(index)}: {reason}") from None

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Any:
        raw = self.buffer[int(self.starts[index]) : int(self.ends[index])]
        if self.parse:
            return self.parse(json.loads(raw))
        return raw.decode("utf-8", errors="ignore")  # a document may be cut inside a character

    def where(self, index: int) -> str:
        """File and line of a sample."""
        line = self.buffer[: int(self.starts[index])].count(b"\n") + 1
        converted = self.parse and suffix_of(Path(self.name)) in (".json", *TABLES)
        return f"{self.name}, {'record' if converted else 'line'} {line}"

    def sizes(self, ids: Any) -> np.ndarray:
        """UTF-8 bytes of the samples `ids`, int64."""
        if self.parsed_sizes is not None:
            return self.parsed_sizes[ids]
        return self.ends[ids].astype(np.int64) - self.starts[ids]

    def tokens(self, index: int, begin: int, end: int) -> np.ndarray:
        """Tokens `begin` up to `end` of a sample, uint16: its bytes, then EOS."""
        if self.closed:
            return encode(self[index])[begin:end]
        start, stop = int(self.starts[index]), int(self.ends[index])
        raw = self.buffer[start + begin : min(start + end, stop)]
        return np.frombuffer(raw, dtype=np.uint8).astype(np.uint16)


def hold_out(size: int, fraction: float, seed: int) -> np.ndarray:
    """Sorted positions of the validation samples, int64: one at random out of each stretch.
    Exactly `round(size * fraction)`, but at least one sample is left for training."""
    count = min(round(size * fraction), max(size - 1, 0))
    edges = np.arange(count + 1) * size // max(count, 1)
    steps = np.random.default_rng([seed, 1]).random(count) * np.diff(edges)
    return edges[:-1] + steps.astype(np.int64)


class TokenWindows(Dataset):
    """Windows of `seq_len` byte tokens over samples; item `i` is `(i, tokens)`. Neighbours overlap
    by one token: a window of T tokens predicts T - 1 of them, so that every token of a stream, but
    for its first, is predicted exactly once. A stream is one sample, or with `joined` all of them,
    each closed by EOS, one after another."""

    def __init__(self, samples: Samples, ids: Any, seq_len: int, joined: bool = False) -> None:
        self.samples, self.ids, self.seq_len, self.joined = samples, ids, seq_len, joined
        sizes = samples.sizes(ids) + samples.closed
        self.ends = np.cumsum(sizes)  # of the samples, in tokens of the joined stream
        streams = self.ends[-1:] if joined else sizes
        self.windows_up_to = np.cumsum(-(-np.maximum(streams - 1, 0) // (seq_len - 1)))

    def __len__(self) -> int:
        return int(self.windows_up_to[-1]) if len(self.windows_up_to) else 0

    def __getitem__(self, index: int) -> tuple[int, np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        i = int(self.windows_up_to.searchsorted(index, side="right"))  # the stream
        window = index - (int(self.windows_up_to[i - 1]) if i else 0)
        begin, parts, wanted = window * (self.seq_len - 1), [], self.seq_len
        if self.joined:  # the sample in which the window begins
            i = int(self.ends.searchsorted(begin, side="right"))
            begin -= int(self.ends[i - 1]) if i else 0
        while wanted and i < len(self.ids):
            parts.append(self.samples.tokens(int(self.ids[i]), begin, begin + wanted))
            i, begin, wanted = i + 1, 0, (wanted - len(parts[-1])) * self.joined
        return index, np.concatenate(parts)


@dataclasses.dataclass
class Data:
    """Training and validation samples, what was done to get them, and how to recognize them."""

    train: Any
    validation: Any
    summary: str
    identity: str  # length and checksum of the text
    chat: bool = False  # some samples are conversations


def build_data(settings: Settings, tokenizer: Any = None, show_progress: bool = False) -> Data:
    """Reads the corpus and splits it, for the tiny model or for the one of a `tokenizer`. Every
    rank does and gets the same. Raises `UserError` for what cannot be trained on."""
    s, counts, name = settings, Counter(), str(settings.corpus_file or "built-in text")
    buffer = read_corpus(s)
    parse = read_record if tokenizer else lambda record: text_of(read_record(record))
    texts = Samples(buffer, name, parse if s.corpus_format == "jsonl" else None)
    summary = f"{counted(len(texts), 'sample')}, {counted(texts.blank, 'blank line')} skipped"
    if s.corpus_format == "document":
        cut = len(buffer) - round(len(buffer) * s.val_fraction)
        sources = [(texts.part(*edges), np.arange(edges[0] < edges[1]))
                   for edges in ((0, cut), (cut, len(buffer)))]
        summary = f"document of {len(buffer):,} bytes, the last {len(buffer) - cut:,} held out"
    else:
        refuse(not len(texts), f"{name}, {counted(len(buffer), 'byte')}: {summary}")
        kept = np.arange(len(texts), dtype=np.uint32)
        if not tokenizer:
            tokens = texts.sizes(slice(None)) + 1
            long = np.flatnonzero(tokens > s.seq_len)
            counts["overlong"] = len(long)
            counts["lost"] = int((tokens[long] - (s.overlong == "truncate") * s.seq_len).sum())
            kept = np.delete(kept, long) if s.overlong == "drop" else kept
        held_out = hold_out(len(kept), s.val_fraction, s.seed)
        sources = [(texts, np.delete(kept, held_out)), (texts, kept[held_out])]
        summary = summary.replace(", ", f", {len(held_out):,} held out, ", 1)
    if tokenizer:
        sets = [TokenizedSamples(*part, tokenizer, s, counts, show_progress) for part in sources]
    elif s.overlong == "split":  # documents are always split
        sets = [TokenWindows(*part, s.seq_len, joined=s.pack) for part in sources]
    else:
        sets = [IndexedTextDataset(*part) for part in sources]
    refuse(
        not len(sets[0]),
        f"{name}: nothing can be trained on in {summary}; longer than --seq-len {s.seq_len} (raise "
        f"it): {counts['overlong']}, no token to predict: {counts['unlabelled']}",
    )
    if counts["overlong"] and (tokenizer or not s.pack):
        done = {"truncate": "cut off", "drop": "left out", "split": "cut in pieces"}[s.overlong]
        summary += f"; {counts['overlong']:,} longer than {s.seq_len} tokens {done}"
        if s.overlong != "split":
            remedy = "; --overlong split keeps them" if not tokenizer else ""
            summary += f" ({counted(counts['lost'], 'token')} lost{remedy})"
    if counts["unlabelled"]:
        summary += f"; {counts['unlabelled']:,} without a token to predict left out"
    for note in (*ANSWERS_FOUND, TOOLS_IGNORED):
        summary += f"; {note}: {counted(counts[note], 'sample')}" if counts[note] else ""
    chat = any(counts[rule] for rule in ANSWERS_FOUND)
    return Data(*sets, summary, f"{len(buffer)} bytes, crc32 {zlib.crc32(buffer):08x}", chat)


def read_record(record: Any) -> str | dict:
    """A record in one of the `SHAPES` as a text, or as {"messages": …, "tools": …}. Raises
    `ValueError` that names what is wrong with it."""
    if not isinstance(record, dict):
        hint = "; an array of them goes into a .json file" if isinstance(record, list) else ""
        raise ValueError(f"{json.dumps(record)[:40]} is no record: one of {SHAPES}{hint}")
    keys = ", ".join(name + " (null)" * (record[name] is None) for name in record) or "no keys"
    record = {name: value for name, value in record.items() if value is not None}
    messages, system = record.get("messages"), record.get("system")
    if "text" in record:
        if not isinstance(record["text"], str):
            raise ValueError(f"text is {json.dumps(record['text'])[:40]}, not a string")
        return record["text"]
    if "messages" in record:
        system = None
    elif "conversations" in record:
        messages = record["conversations"]
    elif {"prompt", "completion"} <= record.keys():
        messages = as_messages(record["prompt"], "user")
        messages += as_messages(record["completion"], "assistant")
    elif {"instruction", "output"} <= record.keys():
        question = record["instruction"]
        question = f"{question}\n\n{record['input']}" if record.get("input") else question
        messages = as_messages(question, "user") + as_messages(record["output"], "assistant")
    else:
        raise ValueError(f"found {keys}; a record is one of {SHAPES}")
    if not isinstance(messages, list) or not messages:
        shown = json.dumps(messages)[:40]
        raise ValueError(f"messages: {shown} is not a list of at least one message")
    if system:
        messages = as_messages(system, "system") + messages
    tools = record.get("tools") or None
    try:
        tools = json.loads(tools) if isinstance(tools, str) else tools
    except ValueError:
        raise ValueError("tools is not JSON") from None
    messages = [read_message(message, i + 1) for i, message in enumerate(messages)]
    json.dumps([messages, tools], ensure_ascii=False).encode("utf-8")  # raises for lone surrogates
    return {"messages": messages, "tools": tools}


def as_messages(said: Any, role: str) -> list:
    """A list of messages: of this role, if it is none already."""
    return list(said) if isinstance(said, list) else [{"role": role, "content": said}]


def read_message(message: Any, number: int) -> dict:
    """A message, {"role", "content"} or {"from", "value"}, with text as content, and the arguments
    of its tool calls as objects."""
    given, message = message, copy.deepcopy(message) if isinstance(message, dict) else {}
    if "from" in message:
        message["role"], message["content"] = message.pop("from"), message.pop("value", None)
    message["role"] = ROLES.get(str(message.get("role")).lower())
    if not message["role"]:  # rendered, but never learned, it would pass for good data
        roles = f"role (or from) of {', '.join(ROLES)}, and content (or value)"
        raise ValueError(f"message {number}, {json.dumps(given)[:60]}, needs a {roles}")
    if message.get("weight") not in (None, 0, 1):  # a share would be taken for 1
        raise ValueError(f"message {number}: weight is {message['weight']!r}; it can be 0 or 1")
    calls, content = message.pop("tool_calls", None) or [], message.get("content")
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(f"message {number}: tool_calls is not a list of objects")
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in content]
        for part, text in zip(content, texts):
            if not isinstance(text, str):
                odd = json.dumps(part)[:40]
                raise ValueError(f"message {number}: only text parts can be read, not {odd}")
        content = "".join(texts)
    content = "" if content is None and calls else content  # templates join strings
    if not isinstance(content, str):
        raise ValueError(f"message {number}: content is {json.dumps(content)[:40]}, not a text")
    for call in calls:
        function = call.get("function", call)
        if not isinstance(function, dict):
            raise ValueError(f"message {number}: the function of a tool call is no object")
        if isinstance(function.get("arguments"), str):  # else a template would encode it twice
            with contextlib.suppress(ValueError):
                function["arguments"] = json.loads(function["arguments"])
    return message | {"content": content} | ({"tool_calls": calls} if calls else {})


def text_of(content: str | dict) -> str:
    """A sample as plain text: of a conversation, what is said, joined by line feeds."""
    if isinstance(content, str):
        return content
    texts = []
    for message in content["messages"]:
        calls = [json.dumps(call.get("function", call)) for call in message.get("tool_calls", ())]
        texts += [part for part in (message["content"], *calls) if part]
    return "\n".join(texts)


# ---- Chats: what of a conversation is learned ----------------------------------------------------

TOOLS_IGNORED = "tools that the chat template ignores"
MARKED, APPENDED, ONE_BY_ONE = ANSWERS_FOUND = (
    "answers marked by the chat template",
    "answers found as what the chat template appends",
    "one answer a sample, since the chat template renders it otherwise once the chat goes on",
)


def answers_of(tokenizer: Any, conversation: dict, counts: Counter) -> list[tuple[str, list]]:
    """A conversation as texts, each with the spans of characters in it that are to be learned.

    Some templates mark what the assistant says. Else an answer is what rendering the conversation
    *with* it adds to rendering it *without* it, generation prompt included. A template that
    rewrites what was said before, as those of reasoning models do, gives a text for each answer:
    the conversation up to it, as the model will be asked, and the answer. Raises `ValueError`.
    """
    if not tokenizer.chat_template:
        raise ValueError("chat data needs a tokenizer with a chat template: an -Instruct model")
    messages = conversation["messages"]
    said = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    whole = render(tokenizer, conversation, messages)
    if conversation["tools"]:
        bare = render(tokenizer, conversation | {"tools": None}, messages)
        counts[TOOLS_IGNORED] += bare == whole
    befores = [prompt_before(tokenizer, conversation, i) for i in said]
    afters = [render(tokenizer, conversation, messages[: i + 1]) for i in said]
    rule, texts = MARKED, [whole] * len(said)
    spans = marked_spans(tokenizer, conversation, whole)
    if not spans or len(spans) != len(said):
        rule, spans = APPENDED, [(len(b), len(a)) for b, a in zip(befores, afters)]
        if not all(a.startswith(b) and whole.startswith(a) for b, a in zip(befores, afters)):
            rule, texts = ONE_BY_ONE, []
            for i, before, after in zip(said, befores, afters):
                # Where an answer begins: two of them differ at once. The prompt may open it.
                two = ([*messages[:i], {"role": "assistant", "content": x}] for x in "xy")
                one, other = (render(tokenizer, conversation, messages) for messages in two)
                begin = next(at for at, pair in enumerate(zip(one, other)) if len({*pair}) > 1)
                rest, opened = after[begin:], before[begin:].strip()
                if opened and rest.startswith(opened):
                    rest = rest[len(opened) :].lstrip()
                texts.append(before + rest)
            spans = [(len(before), len(text)) for before, text in zip(befores, texts)]
    for k, i in enumerate(said):
        texts[k], end = closed(tokenizer, conversation, i, texts[k], *spans[k])
        spans[k] = (spans[k][0], end)
    found = [
        (text, [span])
        for i, text, span in zip(said, texts, spans)
        if messages[i].get("weight") != 0 and messages[i].get("train") is not False
    ]
    if rule != ONE_BY_ONE:  # one text; the last answer may have been given an ending
        found = [(max(texts, key=len, default=whole), [span for _, [span] in found])]
    counts[rule] += len(found) * bool(said)
    return found


def render(tokenizer: Any, conversation: dict, messages: list[dict], prompt: bool = False) -> str:
    """Messages in the tokenizer's chat template, with the tools of the conversation."""
    messages = [{k: v for k, v in m.items() if k not in ("weight", "train")} for m in messages]
    options = {"tools": conversation["tools"], "add_generation_prompt": prompt}
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except Exception as error:  # of the template language, for a role it does not know
        raise ValueError(f"the chat template refuses the record: {reason_of(error)}") from None


def prompt_before(tokenizer: Any, conversation: dict, i: int) -> str:
    """What the model sees when it is asked for message `i`."""
    messages = conversation["messages"]
    if i:
        return render(tokenizer, conversation, messages[:i], prompt=True)
    # Not all templates can render no message at all: look for what they put before an answer.
    text, user = render(tokenizer, conversation, messages[:1]), [{"role": "user", "content": "a"}]
    without = render(tokenizer, conversation, user)
    header = render(tokenizer, conversation, user, prompt=True)[len(without) :]
    if header and header in text:
        return text[: text.index(header) + len(header)]
    return text[: max(text.find(messages[0]["content"]), 0)]


def marked_spans(tokenizer: Any, conversation: dict, text: str) -> list[tuple[int, int]]:
    """The spans of characters inside {% generation %} of a template, none if it has no such."""
    if not re.search(r"{%-?\s*generation\s*-?%}", tokenizer.chat_template):
        return []
    options = {"tools": conversation["tools"], "return_assistant_tokens_mask": True}
    encoded = tokenizer.apply_chat_template(conversation["messages"], return_dict=True, **options)
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    offsets, edges = offsets["offset_mapping"], np.diff([0, *encoded["assistant_masks"], 0])
    begins, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    return [(offsets[a][0], offsets[b - 1][1]) for a, b in zip(begins, ends)]


def closed(tokenizer: Any, conversation: dict, i: int, text: str, begin: int, end: int):
    """(text, end) so that the answer `text[begin:end]` ends where generation will stop: behind its
    last special token. Without one, the token that opens the next turn closes it: it follows in the
    text, or the template is asked what would. Raises `ValueError` if there is none."""
    tokens = {t.content for t in tokenizer.added_tokens_decoder.values() if t.special}
    special = "|".join(map(re.escape, tokens | set(tokenizer.all_special_tokens)))
    if own := re.search(rf"({special})(?=\s*$)", text[begin:end]):
        return text, begin + own.end()
    asked = [*conversation["messages"][: i + 1], {"role": "user", "content": "a"}]
    said = render(tokenizer, conversation, asked[:-1])
    for rest in (text[end:], render(tokenizer, conversation, asked)[len(said) :]):
        if opening := re.match(rf"\s*({special})", rest):
            return max(text, text[:end] + opening.group(), key=len), end + opening.end()
    raise ValueError(
        "the chat template closes an answer with no special token, so that a model trained with it "
        "would never stop; use another template, or add the tokenizer's EOS behind an answer"
    )


def end_tokens(tokenizer: Any, chat: bool) -> list[int]:
    """The tokens that end a text after this training: EOS, or what closes a turn."""
    ends = {tokenizer.eos_token_id}
    if chat:
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        [[(ids, learned)]] = tokenize(tokenizer, [{"messages": turns, "tools": None}], Counter())
        ends.add([token for token, wanted in zip(ids, learned) if wanted][-1])
    return sorted(ends)


# ---- Samples of tokens, and the collator of Qwen -------------------------------------------------


def tokenize(
    tokenizer: Any, contents: Sequence, counts: Counter, where: Callable = "record {}".format
) -> list[list[tuple[list[int], list[bool]]]]:
    """For each text or conversation, its samples as (token ids [T], learned [T]). Of a text, every
    token is learned, and the EOS behind it; of a conversation, the answers."""
    rows: list[list] = [[] for _ in contents]
    texts = [(i, content) for i, content in enumerate(contents) if isinstance(content, str)]
    backend, eos = tokenizer.backend_tokenizer, tokenizer.eos_token_id  # faster than `tokenizer`
    for (i, _), encoded in zip(texts, backend.encode_batch_fast([text for _, text in texts])):
        ids = encoded.ids
        ids += [eos] * (ids[-1:] != [eos])
        rows[i].append((ids, [True] * len(ids)))
    chats = []
    for i, content in enumerate(contents):
        try:
            if not isinstance(content, str):
                chats += [(i, *found) for found in answers_of(tokenizer, content, counts)]
        except ValueError as error:
            raise UserError(f"{where(i)}: {error}") from None
    encoded = backend.encode_batch([text for _, text, _ in chats], add_special_tokens=False)
    for (i, text, spans), whole in zip(chats, encoded):
        ids, offsets = whole.ids, whole.offsets
        cuts = [0, *(first for first, _ in spans), len(text)]
        if any(a < cut < b for a, b in offsets for cut in cuts):
            # A token that lies across the begin of an answer is another one when it is asked.
            parts = [text[a:b] for a, b in itertools.pairwise(cuts)]
            parts = backend.encode_batch(parts, add_special_tokens=False)
            ids = [token for part in parts for token in part.ids]
            offsets = [(a + at, b + at) for part, at in zip(parts, cuts) for a, b in part.offsets]
        learned = [any(begin <= a < b <= end for begin, end in spans) for a, b in offsets]
        rows[i].append((ids, learned))
    return rows


def fit(ids: Sequence, learned: Sequence, settings: Settings, counts: Counter) -> list:
    """Cuts a sample to --seq-len: a list of none, one or several (ids, learned). Pieces overlap by
    one token, so that each token is predicted once; one that predicts nothing is left out."""
    length, overlong, pieces = settings.seq_len, settings.overlong, [(ids, learned)]
    if len(ids) > length:
        counts["overlong"] += 1
        counts["lost"] += len(ids) - length * (overlong == "truncate")
        starts = range({"truncate": 1, "drop": 0, "split": len(ids) - 1}[overlong])[:: length - 1]
        pieces = [(ids[i : i + length], learned[i : i + length]) for i in starts]
    kept = [piece for piece in pieces if True in piece[1][1:]]
    counts["unlabelled"] += len(pieces) - len(kept)
    return kept


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Packs samples into windows: for each window, the numbers of its samples. Best fit, longest
    first: each sample goes into the fullest window that still takes it."""
    windows: list[list[int]] = []
    rooms: list[tuple[int, int, int]] = []  # (tokens left, −when, window), sorted
    for when, i in enumerate(sorted(range(len(lengths)), key=lambda i: -lengths[i])):
        place = bisect.bisect_left(rooms, (lengths[i],))
        if place == len(rooms):
            windows.append([])
            rooms.append((capacity, 0, len(windows) - 1))
        room, _, window = rooms.pop(place)
        windows[window].append(i)
        if room > lengths[i]:
            bisect.insort(rooms, (room - lengths[i], -when, window))
    return windows


class TokenizedSamples(Dataset):
    """Samples as tokens; item `i` is `(record_id, pieces)`, a piece being (ids, learned): one, or
    with --pack as many as fill a window. All are held in memory, on every rank: 4 bytes a token, of
    which the highest bit says whether it is learned, and 12 a piece."""

    AT_ONCE, LEARNED = 1000, np.uint32(1 << 31)

    def __init__(
        self, samples: Samples, part: Any, tokenizer: Any, settings: Settings, counts: Counter, bar
    ) -> None:
        from tqdm import tqdm

        tokens, lengths, records = (array.array("I") for _ in range(3))
        begins = range(0, len(part), self.AT_ONCE)
        gc.freeze()  # so many lists bring many collections, which then skip what PyTorch holds
        for begin in tqdm(begins, "tokenizing", delay=2, disable=not bar):
            ids = [int(i) for i in part[begin : begin + self.AT_ONCE]]
            where = functools.partial(lambda ids, k: samples.where(ids[k]), ids)
            rows = tokenize(tokenizer, [samples[i] for i in ids], counts, where)
            samples_of = [(i, sample) for i, row in zip(ids, rows) for sample in row]
            pieces = [(i, *p) for i, sample in samples_of for p in fit(*sample, settings, counts)]
            if pieces:
                numbers, parts, learned = zip(*pieces)
                records.extend(numbers)
                lengths.extend(map(len, parts))
                marks = np.fromiter(itertools.chain(*learned), bool) * self.LEARNED
                values = np.fromiter(itertools.chain(*parts), np.uint32)
                tokens.frombytes((values | marks).tobytes())
        # Copies, since an array that has grown holds a reserve.
        self.tokens, self.records = np.array(tokens, np.uint32), np.array(records, np.uint32)
        self.edges = np.append(0, np.cumsum(lengths, dtype=np.int64))
        if len(tokens) < 2**32:
            self.edges = self.edges.astype(np.uint32)
        self.windows = best_fit(lengths, settings.seq_len) if settings.pack else range(len(records))

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[int, list]:
        window = np.atleast_1d(self.windows[index])
        pieces = [self.tokens[self.edges[i] : self.edges[i + 1]] for i in window]
        pieces = [(piece & ~self.LEARNED, piece >= self.LEARNED) for piece in pieces]
        return int(self.records[window[0]]), pieces


def qwen_collator(tokenizer: Any, settings: Settings) -> Callable:
    """The collate function of a causal model: a closure over its tokenizer."""
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    nothing = [([pad] * 2, [False] * 2)]
    flatten_up_to = 1024  # tokens: attention grows with the square of a row

    def collate_fn(items: Sequence[tuple[int, Any]]) -> dict:
        """(record_id, text, conversation or pieces) pairs as one batch, padded to its longest.

        Returns input_ids, labels (−100 at padding, which is told by length: PAD may be EOS), and
        attention_mask (1 at tokens), int64 [B, T]; record_ids int64 [B]; tokens, how many have one
        before them in their sample; inputs, what the model takes. No items give one row that
        predicts nothing.

        Of a padded batch that is not too long, inputs has all real tokens in one row, so that
        nothing is computed for padding. All is counted here, since asking a GPU would wait for it.
        """
        rows = []
        for _, content in items:
            if isinstance(content, str | dict):
                [samples] = tokenize(tokenizer, [content], Counter())
                content = [p for sample in samples for p in fit(*sample, settings, Counter())]
            rows.append(content or nothing)
        rows = rows or [nothing]
        shape = len(rows), max(sum(len(ids) for ids, _ in row) for row in rows)
        input_ids, labels = torch.full(shape, pad), torch.full(shape, IGNORE)
        positions, segments = torch.zeros(2, *shape, dtype=torch.int64)
        for row, pieces in enumerate(rows):
            at = 0
            for number, (ids, learned) in enumerate(pieces):
                here = slice(at, at + len(ids))
                input_ids[row, here] = torch.from_numpy(np.asarray(ids, np.int64))
                wanted = torch.as_tensor(learned)
                labels[row, here] = torch.where(wanted, input_ids[row, here], IGNORE)
                labels[row, at] = IGNORE  # nothing stands before it to predict it from
                positions[row, here] = torch.arange(len(ids))
                segments[row, here] = 1 + number + row * shape[1]  # 0: padding
                at += len(ids)
        targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE)  # position t predicts token t + 1
        inputs = {"input_ids": input_ids, "positions": positions, "segments": segments}
        real = segments > 0
        if not real.all() and real.sum() <= flatten_up_to:
            inputs = {name: tensor[real][None] for name, tensor in inputs.items()}  # (1, tokens)
            targets = targets[real]
        places = (targets.flatten() != IGNORE).nonzero()[:, 0]  # (learned,)
        batch = {"input_ids": input_ids, "labels": labels, "attention_mask": real.long()}
        batch["record_ids"] = torch.tensor([record_id for record_id, _ in items] or [-1])
        read = int(real.sum()) - sum(len(pieces) for pieces in rows)
        batch["tokens"] = read if items else 0
        batch["inputs"] = inputs | {"learned": places, "targets": targets.flatten()[places]}
        return batch

    return collate_fn


# ---- Qwen with LoRA ------------------------------------------------------------------------------


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
        weight, chunk = head.weight, FrozenHeadLoss.CHUNK
        total = torch.zeros((), dtype=sum_dtype(hidden.device), device=hidden.device)
        gradient = torch.empty(hidden.shape, dtype=torch.float32, device=hidden.device)
        buffer = weight.new_empty(min(chunk, len(hidden)), len(weight))
        with torch.autocast(hidden.device.type, enabled=False):
            for at in range(0, len(hidden), chunk):
                rows = hidden[at : at + chunk].to(weight.dtype)  # (C, D)
                target = targets[at : at + chunk, None]  # (C, 1)
                logits = torch.mm(rows, weight.t(), out=buffer[: len(rows)])  # (C, V)
                if head.bias is not None:
                    logits += head.bias
                logits = logits.float()  # fp32: no copy, all that follows is in place
                top = logits.amax(1, keepdim=True)
                chosen = logits.gather(1, target)
                normalizer = logits.sub_(top).exp_().sum(1, keepdim=True)
                total += (normalizer.log() + top - chosen).sum(dtype=total.dtype)
                p = logits.div_(normalizer).to(weight.dtype)  # at most 1: fp16 cannot overflow
                gradient[at : at + chunk] = torch.mm(p, weight).sub_(weight[target[:, 0]])
        ctx.save_for_backward(gradient)
        ctx.dtype = hidden.dtype
        return total

    @staticmethod
    def backward(ctx: Any, by_total: torch.Tensor):
        (gradient,) = ctx.saved_tensors
        return (gradient * by_total).to(ctx.dtype), None, None


class CausalLMWithLoss(nn.Module):
    """A PEFT model whose forward pass returns the mean loss of its batch: the module DDP wraps."""

    def __init__(self, peft_model: Any) -> None:
        super().__init__()
        self.model = peft_model

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        segments: torch.Tensor,
        learned: torch.Tensor,
        targets: torch.Tensor,
    ) -> torch.Tensor:
        """input_ids int64 [B, T] → mean cross-entropy in nats, 0 without any target. positions and
        segments [B, T]: a token sees the earlier ones of its own segment, counted from 0. learned
        int64 [n]: the places, in the flattened [B·T], whose next token counts; targets int64 [n]:
        these tokens."""
        # An explicit mask (B, 1, T, T): made by transformers, it would wait for the GPU, and where
        # there is none, PyTorch shares key heads in a way that keeps all T² scores on older GPUs.
        mask = (segments[:, None, :, None] == segments[:, None, None, :]).tril()
        causal = self.model.get_base_model()  # the adapters sit inside it
        output = causal.base_model(
            input_ids=input_ids, attention_mask=mask, position_ids=positions, use_cache=False
        )
        hidden = output.last_hidden_state.flatten(0, 1)  # (B·T, D)
        total = FrozenHeadLoss.apply(hidden[learned], causal.get_output_embeddings(), targets)
        return total / max(len(targets), 1)


def load_base(settings: Settings) -> tuple[Any, Any]:
    """The base model and its tokenizer, from a local folder or by id from the hub. Runs no code
    from there. Raises `UserError` for what keeps it from being a causal model to be used here."""
    import transformers
    from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE

    def require(good: Any, problem: str) -> None:
        remedy = "a folder that save_pretrained wrote needs no network: --base-model FOLDER"
        refuse(not good, f"--base-model {name}: {problem}; {remedy}")

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # PEFT asks transformers by a name that is on its way out.
    warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
    name, folder = settings.base_model, Path(settings.base_model).expanduser()
    offline = folder.is_dir()
    if offline:
        require((folder / "config.json").is_file(), "the folder has no config.json")
        # Checkpoints, run.json and adapter_config.json keep it: absolute.
        settings.base_model = name = str(folder.resolve())
    else:
        an_id = re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name)
        require(an_id and not ("/" in name and folder.parent.is_dir()), "no such folder")
        if not HF_HUB_OFFLINE and not urllib.request.getproxies():  # a proxy resolves names itself
            try:  # the hub's client would try again for a minute
                socket.getaddrinfo(urllib.parse.urlsplit(ENDPOINT).hostname, None)
            except OSError:
                offline = True
    options = {"local_files_only": offline, "trust_remote_code": False}
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **options)
        options |= {"dtype": dtype[settings.precision], "attn_implementation": "sdpa"}
        options |= {"output_loading_info": True}
        model, report = transformers.AutoModelForCausalLM.from_pretrained(name, **options)
    except Exception as error:  # of the hub, the disk, the parser: one line for any of them
        require(False, f"{type(error).__name__}: {reason_of(error)}")
    missing = ", ".join(sorted(report["missing_keys"])[:3])
    require(not missing, f"the files lack the weights {missing}")  # transformers invents them
    require(tokenizer("a")["input_ids"], "the folder has no tokenizer")  # or an empty one
    good = tokenizer.is_fast and tokenizer.eos_token_id is not None
    require(good, "it needs a fast tokenizer with an EOS token")
    rows, largest = model.get_input_embeddings().num_embeddings, max(tokenizer.get_vocab().values())
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    # On a GPU this is an assertion after which nothing works any more.
    require(largest < rows, f"its tokenizer has token {largest}, its embedding {rows} rows")
    window = getattr(model.config, "sliding_window", None) or math.inf
    require(settings.seq_len <= window, f"a token sees the last {window} only; lower --seq-len")
    with torch.no_grad():
        probe = torch.tensor([[1, 2], [1, 3]])
        logits = model(probe, use_cache=False).logits  # (2, 2, V)
        plain = model.get_output_embeddings()(model.base_model(probe, use_cache=False)[0])
    close = functools.partial(torch.allclose, rtol=1e-3, atol=1e-3)
    # What a causal model says of the first token cannot know the second.
    require(close(logits[0, 0], logits[1, 0]), f"{type(model).__name__} is not a causal model")
    require(close(logits, plain), "its logits are not the plain output of its head (soft caps?)")
    return model, tokenizer


def add_lora(model: Any, settings: Settings) -> Any:
    """Freezes the base and adds adapters in fp32 (Hu et al. 2021) to the Linear layers named."""
    from peft import LoraConfig, get_peft_model

    s, embeddings = settings, (model.get_output_embeddings(), model.get_input_embeddings())
    modules = [pair for pair in model.named_modules() if pair[1] not in embeddings]
    linear = {name.rpartition(".")[2] for name, m in modules if isinstance(m, nn.Linear)}
    targets = [name.strip() for name in s.lora_targets.split(",") if name.strip()]
    wrong = [name for name in targets if name not in linear]
    refuse(  # PEFT overlooks a wrong name beside a right one
        wrong or not targets,
        f"--lora-targets: no Linear layer is called {', '.join(wrong) or '(nothing)'}; this model "
        f"has {', '.join(sorted(linear))}",
    )
    if s.gradient_checkpointing:
        # Not reentrant: DDP then sees each gradient once, and frozen embeddings may come first.
        options: dict = {"use_reentrant": False}
        if s.gradient_checkpointing == "selective":
            options["context_fn"] = keep_products
        enable = getattr(model, "activation_checkpointing_enable", None)  # its newer name
        (enable or model.gradient_checkpointing_enable)(options)
    options = {"r": s.lora_r, "lora_alpha": s.lora_alpha, "lora_dropout": s.lora_dropout}
    config = LoraConfig(target_modules=targets, bias="none", task_type="CAUSAL_LM", **options)
    return get_peft_model(model, config, autocast_adapter_dtype=True)


def keep_products() -> tuple:
    """What selective checkpointing keeps: matrix products and attention; the rest is cheap."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
        """Called for every operator of a layer's forward pass."""
        name = operator.name()
        keep = name in ("aten::mm", "aten::addmm", "aten::bmm") or "scaled_dot_product" in name
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def frozen_checksum(model: nn.Module) -> str:
    """CRC-32 over the weights that are not trained, in name order."""
    crc32 = 0
    for _, parameter in sorted(model.named_parameters()):
        if not parameter.requires_grad:
            values = parameter.detach().cpu().contiguous().flatten().view(torch.uint8)
            crc32 = zlib.crc32(values.numpy(), crc32)
    return f"{crc32:08x}"


# ---- Runs: what is trained on what ---------------------------------------------------------------

SAMPLE_PROMPT, SAMPLE_LENGTH = "The ", 200  # tokens


def use_cores(launch: Launch, asked: int | None) -> None:
    """Gives each rank of a machine its share of the cores, and lets it keep freed memory."""
    affinity = getattr(os, "sched_getaffinity", None)  # the cores we may use; Linux only
    cores, ranks = len(affinity(0)) if affinity else os.cpu_count() or 1, launch.local_world_size
    threads = max(1, cores // ranks)
    why = f"{counted(cores, 'core')} / {counted(ranks, 'rank')} on this machine"
    # torchrun sets OMP_NUM_THREADS=1 for several processes when the user did not set it; a user's
    # own 1 looks the same, so use --threads 1.
    omp = os.environ.get("OMP_NUM_THREADS", "")
    by_torchrun = omp == "1" and ranks > 1 and "TORCHELASTIC_RUN_ID" in os.environ
    if asked:
        threads, why = asked, "--threads"
    elif omp.isdecimal() and int(omp) > 0 and not by_torchrun:
        threads, why = int(omp), "OMP_NUM_THREADS"
    torch.set_num_threads(threads)
    launch.choose("threads", f"{threads} per rank", why)
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if launch.device.type == "cpu" and hasattr(libc, "mallopt"):  # glibc; numbers from malloc.h
        libc.mallopt(-4, 0)  # M_MMAP_MAX
        libc.mallopt(-1, 2**30)  # M_TRIM_THRESHOLD
        launch.choose("allocator", "keeps freed memory", "the kernel would clear it every update")


@dataclasses.dataclass
class Run:
    """What is trained on what: everything that differs between the tiny model and Qwen."""

    launch: Launch
    settings: Settings
    data: Data
    model: nn.Module  # forward(**inputs) returns the mean loss
    collate: Callable[[Sequence], dict]
    sample: Callable[[], str]  # some generated text
    results: dict[str, Callable[[Path], None]]  # name of a file or folder, and what writes it
    show: Callable[[], list[tuple[str, bool]]]  # a training sample, as (text, learned?) parts
    notes: list[tuple[str, str]]  # rows of the header
    frozen: str = ""  # checksum of the weights that are not trained

    @property
    def updates(self) -> int:
        """By --max-steps and --epochs, whichever ends first."""
        s = self.settings
        an_epoch = math.ceil(len(self.data.train) / global_batch(self.launch, s))
        by_epochs = s.epochs * an_epoch if s.epochs else math.inf
        return int(min(s.max_steps or math.inf, by_epochs))


def build_tiny(launch: Launch, settings: Settings) -> Run:
    """The tiny Transformer, equal on all ranks by its seed, and its data."""
    s = settings
    data = build_data(s)
    torch.manual_seed(s.seed)
    model = TinyCausalTransformer(s.d_model, s.layers, s.heads, s.dropout, s.seq_len)
    count = sum(p.numel() for p in model.parameters())

    def sample() -> str:
        """What the model makes of SAMPLE_PROMPT, quoted."""
        length = min(SAMPLE_LENGTH, s.seq_len)
        return repr(SAMPLE_PROMPT + generate(model, SAMPLE_PROMPT, length, s.seed))

    def show() -> list[tuple[str, bool]]:
        """The first sample, cut to --seq-len; all of it is learned."""
        tokens = tiny_collator([data.train[0]], s.seq_len)["input_ids"][0]
        text = bytes(token for token in tokens.tolist() if token < PAD)
        return [(text.decode("utf-8", errors="replace"), True)]

    sent = f"{4 * count / 1e6:.2f} MB all-reduced an update"
    notes = [
        ("model", f"tiny, {count:,} parameters, all trained, seed {s.seed}"),
        ("gradients", sent if launch.world_size > 1 else "none sent"),
    ]
    collate = functools.partial(tiny_collator, seq_len=s.seq_len)
    results = {"tiny_transformer.pt": functools.partial(save_tiny, model)}
    return Run(launch, s, data, model.to(launch.device), collate, sample, results, show, notes)


def build_qwen(launch: Launch, settings: Settings) -> Run:
    """A pretrained causal model with LoRA adapters, and its data. Ranks meet: rank 0 loads first,
    so that a download happens once, and the others then find the files."""
    s = settings
    if launch.rank:
        dist.barrier()
    base, tokenizer = load_base(s)
    if launch.rank == 0 and launch.world_size > 1:
        dist.barrier()
    on_terminal = launch.rank == 0 and sys.stderr is not None and sys.stderr.isatty()
    data = build_data(s, tokenizer, show_progress=on_terminal)
    torch.manual_seed(s.seed)
    peft_model = add_lora(base, s).to(launch.device)
    # from_pretrained leaves eval mode on, in which transformers checkpoints no gradients.
    model = CausalLMWithLoss(peft_model).train()

    def sample() -> str:
        """The answer to a held-out question, without any chat a continuation of SAMPLE_PROMPT."""
        held_out = data.validation if len(data.validation) else data.train
        for _, [(ids, learned), *_] in (held_out[i] for i in range(len(held_out) * data.chat)):
            if not learned[0]:  # a question
                question = ids[: int(learned.argmax())]
                answer = qwen_answer(peft_model, tokenizer, question, chat=True)
                return f"{tokenizer.decode(question)[-SAMPLE_LENGTH:]!r} → {answer!r}"
        return repr(qwen_answer(peft_model, tokenizer, SAMPLE_PROMPT, chat=False))

    def show() -> list[tuple[str, bool]]:
        """The first window, in stretches that are learned or not."""
        parts = []
        for piece in data.train[0][1]:
            for learned, tokens in itertools.groupby(zip(*piece), key=lambda pair: pair[1]):
                parts.append((tokenizer.decode([int(i) for i, _ in tokens]), bool(learned)))
        return parts

    count = sum(p.numel() for _, p in trained_parameters(model))
    total, frozen = sum(p.numel() for p in model.parameters()), frozen_checksum(model)
    part = f"{count:,} of {total:,} parameters trained ({count / total:.2%})"
    full = f"full fine-tuning: {4 * (total - count) / 1e6:,.0f} MB"
    notes = [
        ("model", f"{s.base_model}, {part}, seed {s.seed}"),
        ("gradients", f"{4 * count / 1e6:.2f} MB all-reduced an update of several; {full}"),
        ("frozen", f"weights of crc32 {frozen}"),
    ]
    collate, results = qwen_collator(tokenizer, s), qwen_results(peft_model, tokenizer, data.chat)
    if not s.merge:
        del results["merged"]
    return Run(launch, s, data, model, collate, sample, results, show, notes, frozen)


@torch.no_grad()
def generate(
    model: TinyCausalTransformer, prompt: str, length: int, seed: int, temperature: float = 0.8
) -> str:
    """A continuation of the prompt by up to `length` bytes, sampled; it ends at EOS. Its random
    numbers are its own, so that it never changes the training."""
    random, tokens = torch.Generator().manual_seed(seed), list(prompt.encode("utf-8"))
    begin, was_training, device = len(tokens), model.training, model.lm_head.weight.device
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
    peft_model: Any, tokenizer: Any, prompt: Any, chat: bool, base: bool = False, length: int = 48
) -> str:
    """A greedy continuation by up to `length` tokens, with `chat` the answer to a question.
    `prompt`: a text, or token ids. `base`: without the adapter, as before the training."""
    if isinstance(prompt, str) and chat:
        turn = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    if isinstance(prompt, str):
        prompt = np.array(tokenizer(prompt, add_special_tokens=not chat)["input_ids"])
    ids = torch.from_numpy(prompt.astype(np.int64))[None].to(peft_model.device)
    was_training, ends = peft_model.training, end_tokens(tokenizer, chat)
    options = {"max_new_tokens": length, "eos_token_id": ends, "pad_token_id": ends[0]}
    options |= {"attention_mask": torch.ones_like(ids), "do_sample": False}
    peft_model.eval()
    with peft_model.disable_adapter() if base else contextlib.nullcontext():
        tokens = peft_model.generate(input_ids=ids, **options)
    peft_model.train(was_training)
    return tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True)


def continue_prompt(settings: Settings) -> None:
    """--generate: what a finished run makes of the prompt; with LoRA, the base's answer too."""
    s, folder = settings, Path(settings.resume)
    if s.model == "tiny":
        print(s.generate + generate(load_tiny(folder), s.generate, SAMPLE_LENGTH, s.seed))
        return
    there = (folder / "adapter" / "adapter_config.json").is_file()
    refuse(not there, f"{folder} has no adapter/: it is not a finished qwen run")
    base, tokenizer = load_base(s)
    about = json.loads((folder / "run.json").read_text("utf-8"))
    from peft import PeftModel

    model = PeftModel.from_pretrained(base, str(folder / "adapter"), is_trainable=True)
    require_same_base(about["frozen"], frozen_checksum(CausalLMWithLoss(model)), s)
    for who, is_base in (("base", True), ("adapted", False)):
        print(f"{who:8} {qwen_answer(model, tokenizer, s.generate, about['chat'], is_base)}")


def require_same_base(before: str, now: str, settings: Settings) -> None:
    """Raises `UserError` if the adapters were trained over other weights than these."""
    refuse(
        before != now,
        f"--base-model {settings.base_model} has other weights (crc32 {now}) than the model that "
        f"the run was trained over ({before}); name that one",
    )


# ---- Checkpoints ---------------------------------------------------------------------------------


class Checkpoints:
    """The checkpoints in a folder or at a URL of fsspec: files step-00000100.pt, all or nothing.

    They are written beside the training, one at a time, under another name, and then moved. Only
    then the old ones go: the `keep` newest stay, and the one with the best validation loss. A write
    that fails is a warning, and tried again with the next one.
    """

    def __init__(self, place: str | Path, keep: int = 1) -> None:
        import fsspec

        self.place, self.keep = str(place), keep
        with blaming(f"--checkpoint-dir {place}"):
            self.fs, root = fsspec.core.url_to_fs(self.place)
        self.local = "file" in self.fs.protocol
        self.root = os.path.realpath(root) if self.local else root.rstrip("/")
        self.worker, self.pending = ThreadPoolExecutor(1), None
        self.name = self.best_name = ""  # of the newest state, and of the best one so far
        self.content = memoryview(b"")  # of the newest state

    def names(self, pattern: str = r"step-\d+\.pt") -> list[str]:
        """What is there, newest first. Raises `UserError` for a place that cannot be reached."""
        paths: list[str] = []
        with blaming(f"--checkpoint-dir {self.place}"):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                self.fs.invalidate_cache()
                paths = patiently(self.fs.ls, self.root, detail=False)
        names = (path.rstrip("/").rpartition("/")[2] for path in paths)
        return sorted((name for name in names if re.fullmatch(pattern, name)), reverse=True)

    def newest(self, named: str | None = None) -> dict | None:
        """The newest undamaged state, or the named one; None if there is none at all. Raises
        `UserError` if all are damaged. Plain tensors and plain types only: nothing in a file can
        run code. Its parts carry CRC-32s, as in every zip file, that torch.load may not compare."""
        notes = []
        for name in [named] if named else self.names():
            try:
                with patiently(self.fs.open, f"{self.root}/{name}", "rb") as file:
                    if bad := zipfile.ZipFile(file).testzip():
                        raise ValueError(f"the checksum of {bad} is wrong")
                    file.seek(0)
                    state = torch.load(file, map_location="cpu", weights_only=True)
                if "global_batch" not in state:
                    raise ValueError("no checkpoint of this program")
                notes.append(f"going on from {self.place}/{name}")
                # A named one begins a new run: what lies in its place belongs to another.
                root = None if named else self.root
                return state | {"note": "; ".join(notes), "root": root}
            except Exception as error:  # zipfile, torch and every file system have their own kinds
                notes.append(f"{name} is damaged or not there ({reason_of(error)})")
        if self.names(r"step-\d+|manifest\.json"):
            notes.append(f"checkpoints in folders, as {self.place} has, are of an earlier version")
        refuse(notes, f"--resume: {'; '.join(notes)}; no complete checkpoint in {self.place}")
        return None

    def save(self, state: dict) -> None:
        """Takes the state of this instant as bytes, and hands them to the thread that writes."""
        self.wait()
        steps = state["progress"]["step"], state["progress"]["best_step"]
        self.name, self.best_name = (f"step-{step:08d}.pt" for step in steps)
        self.content = in_bytes(state)
        self.pending = self.worker.submit(self._write)

    def wait(self) -> BaseException | None:
        """Waits until the newest state is written. Returns what kept it from that."""
        return self.pending.exception() if self.pending else None

    def secure(self, folder: Path) -> str:
        """Sees to it that the newest state is somewhere. Returns what --resume may name for it.
        Raises `WriteError` if it can be written nowhere."""
        trouble = self.wait()
        if not trouble:
            return str(folder)
        return str(rescue(trouble, self.name, lambda to: to.write_bytes(self.content)))

    def _write(self) -> None:
        final = f"{self.root}/{self.name}"
        try:
            patiently(self.fs.makedirs, self.root, exist_ok=True)
            if self.local:
                write_whole(Path(final), lambda to: to.write_bytes(self.content))
            else:
                patiently(self.fs.pipe_file, f"{final}.partial", bytes(self.content))
                patiently(self.fs.mv, f"{final}.partial", final)
            # What is newer than this one is damaged, or of a course that the run has left.
            kept = [name for name in self.names() if name <= self.name][: self.keep]
            for name in self.names(r"step-\d+\.pt(\.partial)?"):
                if name not in (*kept, self.best_name):
                    patiently(self.fs.rm_file, f"{self.root}/{name}")
        except Exception as error:  # every file system has its own kinds
            problem = f"cannot write a checkpoint to {self.place}: {reason_of(error)}"
            say_error(f"warning: {problem}; the next one will be tried again")
            raise WriteError(problem) from None

    def close(self, folder: Path) -> None:
        """Ends the thread; at a URL, puts the finished run's files there as well."""
        self.wait()
        self.worker.shutdown()
        paths = sorted(folder.rglob("*")) if "://" in self.place else []  # a folder, then its files
        targets = [f"{self.root}/{path.relative_to(folder).as_posix()}" for path in paths]
        with blaming(f"the results are in {folder}, cannot write them to {self.place}", WriteError):
            patiently(self.fs.put, [str(path) for path in paths], targets)


def patiently(function: Callable, *args: Any, **options: Any) -> Any:
    """Calls what may fail now and then, as networks do, up to four times within seven seconds."""
    for pause in (1, 2, 4, None):
        try:
            return function(*args, **options)
        except Exception as error:  # every file system has its own kinds
            final = (FileNotFoundError, FileExistsError, NotADirectoryError, PermissionError)
            if pause is None or isinstance(error, final):
                raise
            time.sleep(pause)


def in_bytes(content: dict) -> memoryview:
    """What torch.save makes of it; written by ourselves, a full disk is called by its name."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getbuffer()


def state_to_resume(given: dict) -> dict | None:
    """The state that --resume names, None if that is "auto" and nothing is there yet. Fills in
    where the run goes on: in its own folder, unless a FILE is named or another folder."""
    source, name = str(given["resume"]).rstrip("/"), None
    if source == "auto":
        folder = given.get("output_dir")
        refuse(not folder, "--resume auto needs --output-dir, the folder that it looks into")
        place = given.get("checkpoint_dir") or f"{folder}/checkpoints"
    elif source.endswith(".pt"):
        place, _, name = source.rpartition("/")
    elif Path(source, "run.json").exists():
        given.setdefault("output_dir", Path(source))
        place = saved_settings(source).get("checkpoint_dir") or f"{source}/checkpoints"
    else:
        place = source
        given.setdefault("checkpoint_dir", source)
    state = Checkpoints(place or ".").newest(name)
    missing = not state and source != "auto"
    refuse(missing, f"--resume: no complete checkpoint in {place}; see --save-every")
    if name:  # a new run
        state["settings"]["checkpoint_dir"] = None
    return state


def saved_settings(folder: str) -> dict:
    """The settings of a run, from its run.json. Raises `UserError`."""
    with blaming(f"--resume {folder}: no run with a run.json"):
        saved = json.loads(Path(folder, "run.json").read_text("utf-8"))["settings"]
        values = {n: v for n, v in saved.items() if v is not None and not isinstance(v, bool)}
        # Are they what the command line would take?
        flag_parser().parse_args(f"--{n.replace('_', '-')}={v}" for n, v in values.items())
        return saved


def fit_to_checkpoint(run: Run) -> dict | None:
    """The state to go on from. Ranks meet. Refuses another corpus or base model, and a number of
    ranks that cannot keep the global batch; otherwise batch and accumulation are set to keep it."""
    launch, s, state = run.launch, run.settings, run.settings.checkpoint
    steps = gather(state["progress"]["step"] if state else None, launch)
    problem = f"--resume: ranks found checkpoints of updates {steps}"
    refuse(len(set(steps)) > 1, f"{problem}; name a place that all of them see")
    if not state:
        return None
    launch.say(f"{'resume':10} {state['note']}")
    before, now = state["corpus"], run.data.identity
    refuse(before != now, f"the interrupted run's corpus has {before}, this one {now}")
    require_same_base(state["frozen"], run.frozen, s)
    ranks, wanted = launch.world_size, state["global_batch"]
    before = counted(wanted, "sequence")
    if global_batch(launch, s) != wanted and not s.batch_given and wanted % ranks == 0:
        per_rank = wanted // ranks
        s.batch_size = max(b for b in range(1, s.batch_size + 1) if per_rank % b == 0)
        s.grad_accum = per_rank // s.batch_size
        chosen = f"{s.batch_size} × accumulation {s.grad_accum}"
        launch.choose("batch", chosen, f"keeps the {before} an update")
    now = global_batch(launch, s)
    product = f"batch {s.batch_size} × accumulation {s.grad_accum} × ranks {ranks} = {now}"
    refuse(now != wanted, f"--resume: {product}, but the interrupted run had {before} an update")
    limit = f"beyond the last one, {run.updates}, that --max-steps and --epochs allow"
    beyond = f"--resume: the run is at update {steps[0]}, {limit}; raise --max-steps"
    refuse(steps[0] > run.updates, beyond)
    return state


def state_of(trainer: Trainer) -> dict:
    """All that a run goes on from. Ranks meet."""
    run, launch = trainer.run, trainer.launch
    random = {"cpu": torch.get_rng_state()}
    if launch.device.type == "cuda":
        random["cuda"] = torch.cuda.get_rng_state(launch.device)
    return {
        "model": {name: p.detach() for name, p in trained_parameters(trainer.bare)},
        "optimizer": trainer.optimizer.state_dict(),
        "scaler": trainer.scaler.state_dict(),
        "random": gather(random, launch),
        "progress": dataclasses.asdict(trainer.progress),
        "metrics": trainer.log.rows,
        "settings": run.settings.to_save(),
        "corpus": run.data.identity,
        "global_batch": global_batch(launch, run.settings),
        "frozen": run.frozen,
    }


def restore(trainer: Trainer, state: dict) -> None:
    """Takes over the state of a checkpoint; the log has taken over its progress. Ranks meet."""
    launch = trainer.launch
    trainer.saved = trainer.progress.step
    with torch.no_grad():
        for name, parameter in trained_parameters(trainer.bare):
            parameter.copy_(state["model"][name])
    if launch.world_size > 1:
        # DDP arranges its buckets anew after the first backward pass, and the order of adding up
        # depends on them. An idle pass makes the next update the second one, as it was.
        with autocast(launch, trainer.settings):
            loss = trainer.model(**inputs_of(trainer.loader.collate_fn([]), launch.device))
        (loss * 0).backward()
        trainer.optimizer.zero_grad(set_to_none=True)
    trainer.optimizer.load_state_dict(state["optimizer"])
    trainer.scaler.load_state_dict(state["scaler"])
    if len(state["random"]) == launch.world_size:
        own_random = state["random"][launch.rank]
        torch.set_rng_state(own_random["cpu"])
        if "cuda" in own_random and launch.device.type == "cuda":
            torch.cuda.set_rng_state(own_random["cuda"], launch.device)


# ---- Files of a run ------------------------------------------------------------------------------

RESULTS = ("tiny_transformer.pt", "adapter", "merged")
ARTIFACTS = ("run.json", "metrics.jsonl", "loss_curve.png", *RESULTS, "tensorboard", "checkpoints")


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Writes a file or a folder completely or not at all: `write` gets a path beside it, which is
    flushed to the disk and then moved. Raises `WriteError`; the old content of `path` stays."""
    beside = path.with_name(path.name + ".partial")
    try:
        remove(beside)
        write(beside)
        if beside.is_dir():
            remove(path)  # a folder moves onto nothing else
        else:
            with open(beside, "rb+") as file:
                os.fsync(file.fileno())
        os.replace(beside, path)
    except Exception as error:  # safetensors has kinds of its own
        remove(beside)
        raise WriteError(f"cannot write {path}: {reason_of(error)}") from None


def write_json(path: Path, content: dict) -> None:
    """Writes an object as indented UTF-8. Raises `WriteError`."""
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    # A file name that is not UTF-8 has lone surrogates; as \udcfc they read back the same.
    write_whole(path, lambda to: to.write_bytes(text.encode("utf-8", "backslashreplace")))


def remove(path: Path) -> None:
    """Removes a file, a link, or a folder with all that it holds, if it is there."""
    folder = path.is_dir() and not path.is_symlink()
    shutil.rmtree(path) if folder else path.unlink(missing_ok=True)


def rescue(trouble: BaseException, name: str, write: Callable[[Path], Any]) -> Path:
    """Writes what could not be written to a temporary folder instead, and returns the path; raises
    `trouble` if that fails too."""
    path = Path(tempfile.mkdtemp(prefix="rescued-"), name)
    try:
        write_whole(path, write)
    except WriteError:
        raise trouble from None
    return path


def open_run_folder(run: Run) -> tuple[Path, Checkpoints | None]:
    """Makes the output folder and the place of checkpoints on rank 0. Ranks meet. Raises
    `UserError` if one of them holds another run, or cannot be written to."""
    s, folder, checkpoints = run.settings, None, None
    if run.launch.rank == 0:
        refuse_other_run(s)
        if s.checkpoint_dir:  # now, and not hours later at the first save
            checkpoints = Checkpoints(s.checkpoint_dir, s.keep)
            own = s.overwrite or (s.checkpoint and s.checkpoint["root"] == checkpoints.root)
            taken = not own and checkpoints.names()
            refuse(taken, f"--checkpoint-dir {s.checkpoint_dir} holds checkpoints of another run")
            with blaming(f"--checkpoint-dir {s.checkpoint_dir}"):
                checkpoints.fs.makedirs(checkpoints.root, exist_ok=True)
        with blaming(f"--output-dir {s.output_dir or 'runs'}"):
            folder = s.output_dir or new_folder(s.model)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "run.json").touch()  # can it be written to?
            for name in ARTIFACTS if s.overwrite else ():
                remove(folder / name)
            checkpoints = checkpoints or Checkpoints(folder / "checkpoints", s.keep)
            for name in checkpoints.names() if s.overwrite else ():
                checkpoints.fs.rm_file(f"{checkpoints.root}/{name}")
    return gather(folder, run.launch)[0], checkpoints


def new_folder(model: str) -> Path:
    """Makes runs/<model>-<date>-<time>, of a later second if another job has that one."""
    Path("runs").mkdir(exist_ok=True)
    now = datetime.datetime.now()
    while True:
        folder = Path(f"runs/{model}-{now:%Y%m%d-%H%M%S}")
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            now += datetime.timedelta(seconds=1)


def refuse_other_run(settings: Settings) -> None:
    """Raises `UserError` if --output-dir has a run that this one may not replace."""
    s, folder = settings, settings.output_dir
    if s.overwrite or not folder:
        return
    own = s.resume and Path(s.resume).resolve() == folder.resolve()
    if s.resume == "auto":  # without a checkpoint, an attempt that came to nothing may lie there
        own = s.checkpoint or not any((folder / name).exists() for name in RESULTS)
    taken = folder.is_file() or any((folder / name).exists() for name in ARTIFACTS)
    holds = f"--output-dir {folder} already holds a run or is no folder"
    refuse(taken and not own, f"{holds}; choose another, or give --overwrite")


def save_tiny(model: TinyCausalTransformer, path: Path) -> None:
    """`tiny_transformer.pt`: {"config": shape settings, "model": state dict}, on the CPU."""
    weights = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    path.write_bytes(in_bytes({"config": model.config, "model": weights}))


def load_tiny(folder: Path) -> TinyCausalTransformer:
    """Reads `tiny_transformer.pt` of a run. Raises `UserError` if it is missing or damaged."""
    path = folder / "tiny_transformer.pt"
    with blaming(f"{path} is not of a finished tiny run, or damaged"):
        saved = torch.load(path, map_location="cpu", weights_only=True)
        model = TinyCausalTransformer(**saved["config"])
        model.load_state_dict(saved["model"])
    return model


def qwen_results(peft_model: Any, tokenizer: Any, chat: bool) -> dict[str, Callable[[Path], None]]:
    """What writes `adapter/`, nothing but LoRA tensors in fp32, their config and the tokenizer, and
    `merged/`: W + (alpha / r) B A, formed in fp32 and then rounded to the base's type, with the
    token that was trained among those that end its texts. Merging uses `peft_model` up."""

    def adapter(to: Path) -> None:
        """Writes the folder that PEFT loads."""
        peft_model.save_pretrained(to, save_embedding_layers=False)  # the default asks the hub
        tokenizer.save_pretrained(to)

    @functools.cache
    def plain() -> Any:
        """The model with the adapter merged in; made once, as a rescue asks for it again."""
        dtype = peft_model.dtype
        return peft_model.to(torch.float32).merge_and_unload(safe_merge=True).to(dtype)

    def merged(to: Path) -> None:
        """Writes the folder that transformers loads, without PEFT."""
        old = plain().generation_config.eos_token_id
        ends = [] if old is None else old if isinstance(old, list) else [old]
        new = [end for end in end_tokens(tokenizer, chat) if end not in ends]
        plain().generation_config.eos_token_id = ends + new
        plain().save_pretrained(to)
        tokenizer.save_pretrained(to)

    return {"adapter": adapter, "merged": merged}


def parameter_digest(model: nn.Module) -> str:
    """sha256 of the trained parameters in name order."""
    return digest_of(trained_parameters(model))


def digest_of(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """sha256 of (name, tensor) pairs, in their order: each name, then its values' bytes."""
    digest = hashlib.sha256()
    for name, tensor in named:
        digest.update(name.encode("utf-8"))
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def finish(trainer: Trainer) -> None:
    """Compares the ranks' weights, saves them on rank 0, and sums the run up. Ranks meet."""
    run, log, launch = trainer.run, trainer.log, trainer.launch
    trainer.require_sound_weights()
    launch.watch.enter("results", meets=True, patient=True)
    digests = gather(parameter_digest(run.model), launch)
    if len(set(digests)) > 1:
        raise RunError(f"ranks ended with different weights: {digests}")
    if not trainer.checkpoints:
        return
    for name, write in run.results.items():
        try:
            write_whole(log.folder / name, write)
        except WriteError as error:  # the disk is full, say: nothing that was trained may be lost
            place = rescue(error, name, write)
            raise WriteError(f"{error}; the trained weights are in {place.parent}") from None
    try:
        log.close(digests[0])
    finally:
        trainer.checkpoints.close(log.folder)


def counted(number: int, noun: str) -> str:
    """'1 rank', '2 ranks', '1,000 ranks'."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def reason_of(error: BaseException) -> str:
    """What went wrong, in one line."""
    text = " ".join(str(error).split())[:300]
    return getattr(error, "strerror", None) or text or type(error).__name__


# ---- Log, metrics, picture -----------------------------------------------------------------------


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


def print_header(run: Run) -> None:
    """What will be trained on what, with every automatic choice and its reason."""
    launch, s, data, ranks = run.launch, run.settings, run.data, run.launch.world_size
    sequences = global_batch(launch, s)
    windows = f"{counted(len(data.train), 'window')} to train on, "
    windows += f"{len(data.validation):,} to validate"
    batch = f"per rank {s.batch_size} × accumulation {s.grad_accum} × ranks {ranks}"
    batch += f" = {counted(sequences, 'sequence')} = {sequences * s.seq_len} tokens an update"
    an_epoch = math.ceil(len(data.train) / sequences)
    rows = [(what, f"{chosen} ({reason})") for what, chosen, reason in launch.choices]
    rows += [("corpus", f"{s.corpus_file or s.builtin}: {data.summary}"), ("split", windows)]
    updates = f"{counted(run.updates, 'update')}, {an_epoch:,} an epoch"
    rows += [("batch", batch), ("steps", updates), *run.notes]
    if not len(data.validation) and (s.val_fraction or s.eval_every):
        why = f"none: --val-fraction {s.val_fraction:g} leaves nothing for it"
        rows.append(("validation", f"{why}; raise it, or give more text"))
    launch.say(f"torch {torch.__version__}, Python {platform.python_version()}, {sys.platform}")
    for what, text in rows:
        launch.say(f"{what:10} {text}")


def show_plan(run: Run) -> None:
    """--dry-run: the header, and one sample as the model will see it, its learned part marked."""
    say = run.launch.say
    print_header(run)
    refuse_other_run(run.settings)
    on, off = ("\033[32m", "\033[0m") if sys.stdout.isatty() else ("[[", "]]")
    text = "".join(f"{on}{part}{off}" if learned else part for part, learned in run.show())
    say(f"{'sample':10} what is learned stands in {on}{'green' if on != '[[' else ''}{off}")
    say(text)
    say(f"memory: python -m labs.planner {' '.join(sys.argv[1:])}".rstrip())
    say("dry run: settings and data are good; nothing was trained or written")


class RunLog:
    """Log lines, `metrics.jsonl`, TensorBoard and the picture; silent on ranks other than 0. The
    clock for tokens per second stands still during validation, sampling and saving: `mark` is when
    the training time that was not yet counted began."""

    def __init__(self, run: Run, folder: Path, state: dict | None = None) -> None:
        self.run, self.settings, self.folder = run, run.settings, folder
        self.progress = Progress(**state["progress"]) if state else Progress()
        self.rows: list[dict] = list(state["metrics"]) if state else []
        self.restart_clock()
        self.logged = dataclasses.replace(self.progress)
        self.board, self.warned = None, False
        if run.launch.rank:
            return
        print_header(run)
        write_run_file(run, folder / "run.json")
        self._write_rows()
        if self.settings.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(folder / "tensorboard"))

    def restart_clock(self) -> None:
        self.mark = time.perf_counter()

    def update(self, epoch: int, rate: float, result: StepResult) -> None:
        """Takes note of one update; prints and writes every --log-every, the first and the last."""
        progress, now, updates = self.progress, time.perf_counter(), self.run.updates
        progress.seconds, self.mark = progress.seconds + now - self.mark, now
        if progress.step % self.settings.log_every and progress.step not in (1, updates):
            return
        seconds = progress.seconds - self.logged.seconds
        speed = (progress.tokens - self.logged.tokens) / seconds
        learned_speed = (progress.learned - self.logged.learned) / seconds
        self.logged = dataclasses.replace(progress)
        norm = result.grad_norm
        row = {"step": progress.step, "epoch": epoch, "loss": result.loss, "lr": rate}
        row |= {"grad_norm": norm if math.isfinite(norm) else None}
        row |= {"tokens": progress.tokens, "tokens_per_second": speed}
        row |= {"learned_tokens": progress.learned, "learned_tokens_per_second": learned_speed}
        memory = peak_memory_bytes(self.run.launch.device)
        self._add(row | {"seconds": progress.seconds, "peak_memory_bytes": memory})
        learned = f" ({learned_speed:,.0f} learned)" if progress.learned < progress.tokens else ""
        overflow = f"  fp16 overflows {progress.skipped}" if progress.skipped else ""
        self.run.launch.say(
            f"step {progress.step:>6}/{updates}  epoch {epoch}  loss {result.loss:.4f}  "
            f"lr {rate:.2e}  grad norm {norm:.3f}  {speed:,.0f} tokens/s{learned}{overflow}"
        )

    def validation(self, loss: float) -> bool:
        """Takes note of one validation; returns whether it is the best so far."""
        progress = self.progress
        progress.validated = progress.step
        self._add({"step": progress.step, "val_loss": loss})
        better = progress.best is None or loss < progress.best
        if better:
            progress.best, progress.best_step = loss, progress.step
        text = f"step {progress.step:>6}/{self.run.updates}  validation loss {loss:.4f}"
        self.run.launch.say(text + " (best)" * better)
        return better

    def _add(self, row: dict) -> None:
        self.rows.append(row)
        if self.run.launch.rank:
            return
        path = self.folder / "metrics.jsonl"
        try:
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:  # training can go on; `close` writes all rows again
            if not self.warned:
                say_error(f"warning: cannot write {path}: {reason_of(error)}")
            self.warned = True
        for name in sorted(row.keys() - {"step", "epoch"}) if self.board else ():
            if row[name] is not None:
                self.board.add_scalar(name, row[name], row["step"])

    def _write_rows(self) -> None:
        text = "".join(json.dumps(row) + "\n" for row in self.rows)
        write_whole(self.folder / "metrics.jsonl", lambda to: to.write_text(text, "utf-8"))

    def close(self, digest: str) -> None:
        """Writes all rows, draws the picture, and prints the last lines of the run."""
        progress, launch, say = self.progress, self.run.launch, self.run.launch.say
        if self.board:
            self.board.close()
        self._write_rows()
        draw_loss_curve(self.rows, self.folder / "loss_curve.png")
        speed = progress.tokens / max(progress.seconds, 1e-9)
        updates, tokens = counted(progress.step, "update"), counted(progress.tokens, "token")
        say(f"done       {updates}, {tokens}, {speed:,.0f} tokens/s")
        if final := [row["val_loss"] for row in self.rows if "val_loss" in row]:
            best = f"best {progress.best:.4f} at update {progress.best_step}"
            say(f"validation final {final[-1]:.4f}, {best}")
        on_cuda = launch.device.type == "cuda"
        memory = "of the GPU's" if on_cuda else "the whole process, PyTorch's own included"
        peak = peak_memory_bytes(launch.device) / 1e6
        say(f"memory     peak {peak:,.0f} MB on rank 0, {memory}")
        ranks = launch.world_size
        say(f"weights sha256 {digest}" + (f" (equal on all {ranks} ranks)" if ranks > 1 else ""))
        written = [name for name in ARTIFACTS if (self.folder / name).exists()]
        say(f"written to {self.folder}: {' '.join(written)}")


def draw_loss_curve(rows: list[dict], path: Path) -> None:
    """Training and validation loss over updates as a PNG."""
    with warnings.catch_warnings():  # its font cache is opened without an encoding
        warnings.simplefilter("ignore", EncodingWarning)
        from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for key, label, style in (("loss", "training", "-"), ("val_loss", "validation", "o-")):
        if points := [(row["step"], row[key]) for row in rows if key in row]:
            last = f"{label}, last {points[-1][1]:.3f}"
            axes.plot(*zip(*points), style, label=last, lw=1.5, ms=4)
            axes.legend()
    axes.set(xlabel="update", ylabel="loss (nats per token)", title="Loss of the global batch")
    axes.grid(alpha=0.3)
    write_whole(path, lambda to: figure.savefig(to, format="png", dpi=120))


def write_run_file(run: Run, path: Path) -> None:
    """`run.json`: settings as resolved, versions, parameters, choices and reasons."""
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    for package in ("torch", "numpy", "transformers", "peft"):
        if package in sys.modules:
            versions[package] = sys.modules[package].__version__
    total = sum(p.numel() for p in run.model.parameters())
    trained = sum(p.numel() for _, p in trained_parameters(run.model))
    content = {
        "settings": run.settings.to_save(),
        "versions": versions,
        "world_size": run.launch.world_size,
        "global_batch": global_batch(run.launch, run.settings),
        "updates": run.updates,
        "parameters": {"total": total, "trained": trained},
        "choices": [dict(zip(("what", "chosen", "reason"), c)) for c in run.launch.choices],
        "chat": run.data.chat,
        "frozen": run.frozen,
    }
    write_json(path, content)


if __name__ == "__main__":
    main()
