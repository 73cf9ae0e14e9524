"""The same model and data under DDP, FSDP, tensor, pipeline and parameter-server training.

All of them one after the other on the CPU, with tables and a picture at the end:

    python -m labs.strategies --compare --cpu

One of them, on two processes (four for fsdp+tensor); `--help` lists the flags:

    python -m torch.distributed.run --standalone --nproc_per_node=2 \\
        -m labs.strategies --strategy fsdp --cpu

A sharded checkpoint, written in the background by two ranks, goes on in one process:

    python -m torch.distributed.run --standalone --nproc_per_node=2 \\
        -m labs.strategies --strategy fsdp --cpu --save runs/sharded
    python -m labs.strategies --strategy one --cpu --load runs/sharded

A worker that dies while the others go on (torchrun would end them, so the lab starts the ranks):

    python -m labs.strategies --strategy parameter-server --mode async --ranks 3 \\
        --kill-worker-after 5 --cpu

Each strategy is one small class in one order: how the batch is divided, how the model is divided,
what a step does, where ranks meet; they are the section "The strategies". The others count, save,
start ranks and compare. The engines are PyTorch's own. Rank 0 first trains the same model on the
same global batches alone, and the run fails if the strategy gives other numbers.

All strategies follow the gradient of `training_step` in llm_ddp_parallel_training.py (the
reference), that of the mean over all valid tokens of the global batch: G = (1/n) · Σ_r ∇S_r, with
S_r the summed loss of rank r's part. Here each rank reads the whole global batch before it takes
its part, so n is known beforehand. There is no gradient clipping: where ranks hold different
parameters its norm is one more meeting.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import dataclasses
import itertools
import json
import logging
import math
import multiprocessing.connection
import os
import pickle
import signal
import statistics
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.utils import parameters_to_vector
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if not __package__:  # started by its path: the project is in the folder above
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import llm_ddp_parallel_training as reference
from labs import common
from llm_ddp_parallel_training import RunError, UserError, counted, summed_loss, valid_targets

WATCHED_STEP = 3  # traffic and memory are counted there: DDP arranges its buckets until step 2
GRADIENT_LIMIT = 1e-5  # of the first step, relative to the largest value of the same tensor
LOSS_LIMIT = 1e-4  # nats per token, at every step
PATIENCE_S = 300  # after which --compare ends a strategy

# ------------------------------------------------------------------------------------------
# Settings
# ------------------------------------------------------------------------------------------

DEFAULTS = [  # of the reference's flags, where the lab differs: a model that keeps two ranks busy
    "--max-steps", "20", "--precision", "fp32", "--d-model", "128", "--layers", "4",
]  # fmt: skip
TAKEN = {  # the reference's flags that mean the same here
    "model", "device", "cpu", "seed", "threads", "corpus_file", "builtin", "corpus_format",
    "d_model", "layers", "heads", "seq_len", "base_model", "max_steps", "lr", "weight_decay",
    "precision",
}  # fmt: skip


def parse_options(argv: Sequence[str]) -> tuple[argparse.Namespace, argparse.Namespace, list[str]]:
    """The lab's own options, the reference's settings, and the flags that the latter came from."""
    flags = ", ".join(sorted(f"--{name.replace('_', '-')}" for name in TAKEN))
    parser = reference.OneLineParser(
        prog="python -m labs.strategies", allow_abbrev=False,
        description="The same model and data under several ways to divide the work.",
        epilog=f"These flags of llm_ddp_parallel_training.py mean the same here: {flags}; by "
        f"default {' '.join(DEFAULTS)}.",
    )  # fmt: skip
    number = reference.number
    # fmt: off
    what = parser.add_mutually_exclusive_group(required=True).add_argument
    what("--strategy", choices=tuple(STRATEGIES), help="one way, on the ranks of the launcher")
    what("--compare", action="store_true", help="all of them, one after the other, with tables")
    add = parser.add_argument
    add("--ranks", type=number(int, 1, 64),
        help="start this many ranks from here, instead of with python -m torch.distributed.run")
    add("--global-batch", type=number(int, 1), default=16,
        help="sequences in an update over all ranks, the same for every strategy (default: 16)")
    add("--schedule", choices=("gpipe", "1f1b"), default="1f1b",
        help="pipeline: 1f1b keeps fewer activations, the idle share is the same (default: 1f1b)")
    add("--micro-batches", type=number(int, 1), default=4,
        help="pipeline: raise it when ranks idle too long (default: 4)")
    add("--mode", choices=("sync", "async"), default="sync",
        help="parameter-server: sync waits for all workers and equals DDP (default: sync)")
    add("--kill-worker-after", type=number(int, 1), metavar="STEPS",
        help="parameter-server: the last worker kills itself; needs --ranks")
    add("--save", type=Path, metavar="FOLDER",
        help="fsdp: write a sharded checkpoint in the background after half of the steps")
    add("--load", type=Path, metavar="FOLDER",
        help="one, ddp, fsdp: go on from such a checkpoint, on any number of ranks")
    add("--report", type=Path, metavar="FILE",
        help="also write the results as JSON, replacing an old file")
    add("--output-dir", type=Path,
        help="--compare: for table and picture (default: runs/strategies-<date>-<time>)")
    add("--overwrite", action="store_true", help="--compare: replace what --output-dir holds")
    # fmt: on
    options, rest = parser.parse_known_args(argv)
    common.refuse_flags(rest, reference.DEFAULTS.keys() - TAKEN, "strategies")
    return options, reference.parse_settings(DEFAULTS + rest), rest


def check_options(o: argparse.Namespace, s: argparse.Namespace, ranks: int) -> None:
    """Refuses what cannot work, before anything is computed. Raises `UserError`."""
    name, least = o.strategy, STRATEGIES[o.strategy].least_ranks
    pipeline, server = name == "pipeline", name == "parameter-server"
    launch = f"python -m torch.distributed.run --standalone --nproc_per_node={least} -m"
    for refused, why in (
        (name == "one" and ranks > 1, "--strategy one is one process: launch with plain python"),
        (ranks < least, f"--strategy {name} needs {least} ranks or more, not {ranks}: launch with "
                        f"{launch} labs.strategies, or give --ranks {least}"),
        (name == "fsdp+tensor" and ranks % 2, f"--strategy {name}: {ranks} ranks are not even"),
        (s.max_steps <= WATCHED_STEP, f"--max-steps {s.max_steps}: give more than {WATCHED_STEP}"),
        (s.precision == "fp16" or (s.precision == "bf16" and "fsdp" not in name),
         f"--precision {s.precision}: only bf16, with --strategy fsdp or fsdp+tensor"),
        (pipeline and s.model != "tiny", "--strategy pipeline needs --model tiny"),
        (pipeline and s.layers < ranks, f"--layers {s.layers}: {ranks} stages need as many layers"),
        (pipeline and (o.global_batch % o.micro_batches or o.micro_batches < ranks),
         f"--micro-batches {o.micro_batches} should divide --global-batch {o.global_batch} and be "
         f"at least the {ranks} stages"),
        (o.kill_worker_after and not (server and o.ranks and ranks > 2),
         "--kill-worker-after needs --strategy parameter-server and --ranks 3"),
        (o.save and name != "fsdp", "--save needs --strategy fsdp"),
        (o.save and o.save.exists(), f"--save {o.save} is already there; name a new folder"),
        (o.output_dir or o.overwrite, "--output-dir and --overwrite need --compare"),
        (o.mode == "async" and not server, "--mode async needs --strategy parameter-server"),
        (o.load and name not in ("one", "ddp", "fsdp"), "--load needs --strategy one, ddp or fsdp"),
    ):  # fmt: skip
        if refused:
            raise UserError(why)
    common.require_writable("--report", o.report)


# ------------------------------------------------------------------------------------------
# The strategies
# ------------------------------------------------------------------------------------------


class Strategy:
    """One process: the whole batch, the whole model; what all others are measured against."""

    least_ranks = 1
    data_rank, data_ranks, data_group = 0, 1, None  # which part of the batch, of how many

    def __init__(self, run: reference.Run, options: argparse.Namespace) -> None:
        self.launch, self.settings, self.options = run.launch, run.settings, options
        self.model = self.divide_model(run.model)
        self.bare = getattr(self.model, "module", self.model)  # without the DDP wrapper
        self.optimizer = reference.build_optimizer(self.bare, self.settings)
        self.losses: list[float] = []  # of the global batch, by step after `done`
        self.done, self.shown, self.expected = 0, False, []  # expected: those of one process
        self.first_gradients: dict[str, torch.Tensor] = {}
        self.extra: dict[str, Any] = {}  # what only this strategy has to report

    def divide_batch(self, batch: dict) -> dict:
        """The global batch [B, T] → this rank's part: rows r, r + N, … as in the reference."""
        return {name: rows[self.data_rank :: self.data_ranks] for name, rows in batch.items()}

    def divide_model(self, model: nn.Module) -> nn.Module:
        """The whole model, equal on all ranks → this rank's share of it."""
        return model

    def forward_backward(self, part: dict, tokens: int) -> torch.Tensor:
        """Leaves G in the gradients, returns the part's loss; `tokens` is n of the global batch."""
        loss = self.model(**part) * (valid_targets(part["labels"]) / tokens)  # S_r / n
        # DDP and FSDP divide the sum over their N ranks by N; N times the loss undoes that.
        (loss * self.data_ranks).backward()
        return whole(loss.detach())

    def total_loss(self, loss: torch.Tensor) -> float:
        """The loss of the global batch from those of its parts."""
        if self.data_ranks > 1:
            dist.all_reduce(loss, group=self.data_group)  # ranks meet: 8 bytes
        return loss.item()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def record(self, loss: float) -> None:
        """Notes the loss of a step, and shows it beside that of one process."""
        self.losses.append(loss)
        at = len(self.losses)
        beside = f"   one process {self.expected[at - 1]:.6f}" if self.expected else ""
        if self.shown:
            self.launch.say(f"step {self.done + at:3}   loss {loss:.6f}{beside}")

    def gradients(self) -> dict[str, torch.Tensor]:
        """The whole gradient by the reference's names, on the CPU of rank 0 at least."""
        return as_reference({n: whole(p.grad).cpu() for n, p in self.bare.named_parameters()})

    def collect(self, report: dict) -> list[dict | None]:
        """The reports of all ranks, on rank 0 at least. Ranks meet."""
        return reference.gather(report, self.launch)


class DDP(Strategy):
    """The reference's way.

    Batch: divided by rows. Model: a replica on every rank. Step: forward and backward on the part.
    Ranks meet: in the backward pass, which all-reduces gradients bucket by bucket.
    """

    least_ranks = 2

    def divide_model(self, model: nn.Module) -> nn.Module:
        self.data_rank, self.data_ranks = self.launch.rank, self.launch.world_size
        return reference.wrap_in_ddp(model, self.launch)


class FSDP(Strategy):
    """DDP that keeps only its share of parameters, gradients and optimizer state.

    Batch: as in DDP. Model: every tensor is cut in N along its first dimension; each layer, and
    what is left at the root, is put together by an all-gather just before it is needed. Step: as
    in DDP. Ranks meet: all-gathers in forward and backward, and in place of DDP's all-reduce a
    reduce-scatter of each layer's gradients (Zhao et al. 2023, PyTorch FSDP).
    """

    least_ranks = 2

    def divide_model(self, model: nn.Module) -> nn.Module:
        self.data_rank, self.data_ranks = self.launch.rank, self.launch.world_size
        mesh = init_device_mesh(self.launch.device.type, (self.launch.world_size,))
        return shard_layers(model, mesh, self.settings.precision)


def shard_layers(model: nn.Module, mesh: Any, precision: str) -> nn.Module:
    """`fully_shard` for each layer and the root; bf16: for computing, gradients summed in fp32."""
    policy = MixedPrecisionPolicy()
    if precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


class TensorParallel(Strategy):
    """Every rank holds a slice of every matrix, and works on every sequence.

    Batch: not divided. Model: attention by heads, the feed-forward by columns and then rows
    (Shoeybi et al. 2019, Megatron-LM, section 3), embedding and head by the vocabulary. Step:
    logits stay divided, the loss is computed from the slices. Ranks meet: an all-reduce after
    attention and feed-forward, in forward and backward, and for the loss one of maxima, of sums
    and of targets' logits.
    """

    least_ranks = 2

    def __init__(self, run: reference.Run, options: argparse.Namespace) -> None:
        super().__init__(run, options)
        for group in self.optimizer.param_groups:  # one kernel for all refuses a mixture of
            group.update(fused=False, foreach=False)  # whole tensors (norms) and divided ones

    def divide_model(self, model: nn.Module) -> nn.Module:
        mesh = init_device_mesh(self.launch.device.type, (self.launch.world_size,))
        return split_matrices(model, mesh)

    def forward_backward(self, part: dict, tokens: int) -> torch.Tensor:
        with loss_parallel():  # cross_entropy of logits of which each rank has a slice [B·T, V/N]
            return super().forward_backward(part, tokens)


class SplitAttention(nn.Module):
    """The reference's attention with its fused `in_proj` taken apart, so that heads can be divided.

    Rows 0 … D−1 of `in_proj_weight` make the queries, head by head, the next D rows the keys, the
    last D the values. A slice of rows of the fused matrix would give one rank all queries and the
    other all values; a slice of each of the three gives it whole heads.
    """

    batch_first = True  # nn.TransformerEncoder asks for it

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        self.head_width, width = attention.head_dim, attention.embed_dim
        parts = attention.in_proj_weight.detach().chunk(3)  # 3 × (D, D)
        for name, part in zip(("q_proj", "k_proj", "v_proj"), parts):
            linear = nn.Linear(width, width, bias=False, device="meta")
            linear.weight = nn.Parameter(part.clone())
            setattr(self, name, linear)
        self.out_proj = attention.out_proj

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, T, D] → [B, T, D]; in between this rank's heads only."""
        query, key, value = (
            projection(hidden).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )  # (B, heads/N, T, D/heads) each
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out_proj(mixed.transpose(1, 2).flatten(2))  # (B, T, D/N) → (B, T, D)


class SplitLayer(nn.Module):
    """`CausalLayer` without dropout, around a `SplitAttention`."""

    def __init__(self, layer: reference.CausalLayer) -> None:
        super().__init__()
        self.norm1, self.norm2, self.activation = layer.norm1, layer.norm2, layer.activation
        self.self_attn = SplitAttention(layer.self_attn)
        self.linear1, self.linear2 = layer.linear1, layer.linear2

    def forward(self, src: torch.Tensor, **_: Any) -> torch.Tensor:
        """[B, T, D] → [B, T, D]"""
        hidden = src + self.self_attn(self.norm1(src))
        return hidden + self.linear2(self.activation(self.linear1(self.norm2(hidden))))


def split_matrices(model: nn.Module, mesh: Any) -> nn.Module:
    """Divides the matrices of a tiny or Qwen2 model over a mesh of one dimension.

    Column-wise, a rank computes a slice of the outputs and needs the whole input; row-wise, it
    takes a slice of the inputs, and an all-reduce adds up the outputs. One after the other need no
    meeting in between. `once` lets matrices that share an input add up its gradients before they
    are sent. Raises `UserError` when heads cannot be divided.
    """
    ranks, column, row = mesh.size(), ColwiseParallel, RowwiseParallel
    once = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
    if isinstance(model, reference.TinyCausalTransformer):
        causal, embedding, head = model, "token_emb", "lm_head"
        require_divisible(ranks, {"attention heads": model.config["heads"]})
        for index, layer in enumerate(model.encoder.layers):
            model.encoder.layers[index] = SplitLayer(layer)
        plan = {
            "self_attn": once, "self_attn.q_proj": column(), "self_attn.k_proj": column(),
            "self_attn.v_proj": column(), "self_attn.out_proj": row(),
            "linear1": column(), "linear2": row(),
        }  # fmt: skip
    else:
        causal, embedding, head = model.model, "model.embed_tokens", "lm_head"
        config, hidden = causal.config, {"hidden_states": Replicate()}
        require_divisible(ranks, {
            "attention heads": config.num_attention_heads,
            "key-value heads": config.num_key_value_heads,
            "feed-forward columns": config.intermediate_size,
        })  # fmt: skip
        plan = {
            "self_attn": PrepareModuleInput(
                input_kwarg_layouts=hidden, desired_input_kwarg_layouts=hidden
            ),
            "self_attn.q_proj": column(), "self_attn.k_proj": column(),  # biases go with them
            "self_attn.v_proj": column(), "self_attn.o_proj": row(),
            "mlp": once, "mlp.gate_proj": column(), "mlp.up_proj": column(),
            "mlp.down_proj": row(),
        }  # fmt: skip
    for layer in layers_of(model):
        parallelize_module(layer, mesh, plan)
    tied = causal.get_submodule(embedding).weight is causal.get_submodule(head).weight
    # A rank's slice of the embedding knows V/N tokens and gives zeros for those of the others.
    logits = column(output_layouts=Shard(-1), use_local_output=False)  # (B, T, V/N), a DTensor
    parallelize_module(causal, mesh, {embedding: row(input_layouts=Replicate()), head: logits})
    weight = causal.get_submodule(embedding).weight
    if tied:  # both were cut along the vocabulary: they can be one tensor again
        causal.get_submodule(head).weight = weight
    # The engine gives every rank the embedding's gradient for the whole vocabulary: keep a slice.
    weight.register_hook(lambda g: g.redistribute(placements=weight.placements).clone())
    return model


def require_divisible(ranks: int, counts: dict[str, int]) -> None:
    """Raises `UserError` unless every count can be divided evenly over the ranks."""
    if any(count % ranks for count in counts.values()):
        have = ", ".join(f"{name} ({count})" for name, count in counts.items())
        raise UserError(f"tensor parallelism over {ranks} ranks must divide evenly: {have}")


class FSDPTensor(TensorParallel):
    """Both at once: a mesh of N/2 × 2 ranks, as on machines with fast links inside.

    Batch: by the mesh's row. Model: each matrix cut by tensor parallelism over the row's two
    ranks, and each slice cut again by FSDP over the column. Step: as in tensor parallelism. Ranks
    meet: rows in every layer's all-reduces, columns in all-gathers and reduce-scatters.
    """

    least_ranks = 4

    def divide_model(self, model: nn.Module) -> nn.Module:
        shape, names = (self.launch.world_size // 2, 2), ("data", "tensor")
        mesh = init_device_mesh(self.launch.device.type, shape, mesh_dim_names=names)
        self.data_rank, self.data_ranks = mesh["data"].get_local_rank(), shape[0]
        self.data_group = mesh["data"].get_group()
        # PyTorch warns that a tensor cut twice takes two gathers to be put together; only the
        # comparison of the gradients does that.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        split_matrices(model, mesh["tensor"])
        return shard_layers(model, mesh["data"], self.settings.precision)


class Pipeline(Strategy):
    """Each rank holds some of the layers; micro-batches follow each other through the stages.

    Batch: not divided over ranks, but into micro-batches. Model: layers in N groups, the
    embeddings with the first, norm and head with the last. Step: GPipe runs all forward passes,
    then all backward passes; 1F1B alternates as soon as it can, so that a stage keeps N
    micro-batches at most (Narayanan et al. 2019, PipeDream; 2021, section 2.2). Ranks meet: each
    stage sends activations to the next one, and gradients back.
    """

    least_ranks = 2

    def divide_model(self, model: nn.Module) -> nn.Module:
        rank, ranks, device = self.launch.rank, self.launch.world_size, self.launch.device
        module = Stage(model, rank, ranks)
        self.stage = PipelineStage(module, rank, ranks, device)
        schedule = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[self.options.schedule]
        # The loss of a micro-batch is S_j / n: summed up they are exact, so nothing is averaged.
        self.schedule = schedule(
            self.stage, self.options.micro_batches, self.micro_loss, scale_grads=False
        )
        for work in ("forward_one_chunk", "backward_one_chunk"):
            setattr(self.stage, work, self.timed(getattr(self.stage, work)))
        self.idle: list[float] = []  # by step: the share of the time outside these two
        return module

    def timed(self, work: Callable) -> Callable:
        """`work`, whose seconds go into `busy`."""

        def run(*args: Any, **options: Any) -> Any:
            begin = self.now()
            result = work(*args, **options)
            self.busy += self.now() - begin
            return result

        return run

    def now(self) -> float:
        """Seconds, when all that was begun is done."""
        if self.launch.device.type == "cuda":
            torch.cuda.synchronize()  # kernels are only queued; waiting for them costs some time
        return time.perf_counter()

    def micro_loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """S_j / n of a micro-batch, on the last stage."""
        return summed_loss(logits, labels)[0] / self.tokens

    def forward_backward(self, part: dict, tokens: int) -> torch.Tensor:
        self.tokens, self.busy, losses = tokens, 0.0, []
        first, last = self.stage.is_first, self.stage.is_last
        begin = self.now()
        self.schedule.step(  # ranks meet: every activation and its gradient is sent and awaited
            *([part["input_ids"]] if first else []),
            **({"target": part["labels"], "losses": losses} if last else {}),
            return_outputs=False,
        )
        self.idle.append(1 - self.busy / (self.now() - begin))
        own = torch.zeros((), dtype=torch.float64, device=self.launch.device)
        return own + sum(loss.detach() for loss in losses)

    def total_loss(self, loss: torch.Tensor) -> float:
        dist.all_reduce(loss)  # ranks meet: only the last stage has anything to add
        return loss.item()

    def gradients(self) -> dict[str, torch.Tensor]:
        stages = reference.gather(super().gradients(), self.launch)  # ranks meet
        return dict(itertools.chain.from_iterable(stage.items() for stage in stages))

    def collect(self, report: dict) -> list[dict | None]:
        n, m = self.launch.world_size, self.options.micro_batches
        report["idle"] = statistics.mean(self.idle[WATCHED_STEP:] or [0.0])
        reports = super().collect(report)
        idle = statistics.mean(r["idle"] for r in reports)
        self.extra["bubble"] = {"measured": idle, "formula": (n - 1) / (m + n - 1)}
        return reports


class Stage(nn.Module):
    """One stage of a `TinyCausalTransformer`; its parameters keep their names in the model."""

    def __init__(self, model: reference.TinyCausalTransformer, index: int, stages: int) -> None:
        super().__init__()
        layers = model.encoder.layers
        cuts = [len(layers) * i // stages for i in range(stages + 1)]
        own = {str(i): layers[i] for i in range(cuts[index], cuts[index + 1])}
        self.encoder = nn.ModuleDict({"layers": nn.ModuleDict(own)})
        self.first, self.last = index == 0, index == stages - 1
        if self.first:
            self.token_emb, self.pos_emb = model.token_emb, model.pos_emb
        if self.last:
            self.norm, self.lm_head = model.norm, model.lm_head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """ids [b, T] or hidden [b, T, D] → hidden [b, T, D] or logits [b, T, V]."""
        if self.first:
            x = self.token_emb(x) + self.pos_emb.weight[: x.shape[1]]
        for layer in self.encoder["layers"].values():
            x = layer(x)
        return self.lm_head(self.norm(x)) if self.last else x


class ParameterServer(Strategy):
    """Rank 0 keeps the weights and the optimizer; the others compute gradients.

    Batch: the workers' ranks divide it as in DDP. Model: every worker has a copy, the server too.
    Step of a worker: forward and backward on its part, push the gradient, pull the weights. Ranks
    meet: each worker only its server. With --mode sync the server answers when all have pushed,
    which is DDP; with async it updates at every push and answers at once. By then others may have
    pushed: a gradient's staleness is the number of updates since its weights were pulled.

    Messages go through Gloo and main memory, on CUDA too: NCCL cannot run the threads' receives
    side by side, and a server of this kind lives on a host.
    """

    least_ranks = 2
    PUSH, LEAVE = 0.0, 1.0

    def divide_model(self, model: nn.Module) -> nn.Module:
        self.data_rank, self.data_ranks = self.launch.rank - 1, self.launch.world_size - 1
        self.group, self.sync = dist.new_group(backend="gloo"), self.options.mode == "sync"
        self.parameters, self.version, self.steps = list(model.parameters()), 0, 0
        return model

    def total_loss(self, loss: torch.Tensor) -> float:
        return loss.item()  # the server adds up

    def pieces(self, flat: torch.Tensor) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Each parameter with its part of a vector as long as all of them."""
        parts = flat.to(self.launch.device).split([p.numel() for p in self.parameters])
        return ((p, part.view_as(p)) for p, part in zip(self.parameters, parts))

    # A worker.

    def forward_backward(self, part: dict, tokens: int) -> torch.Tensor:
        loss = self.model(**part)  # S_r / n_r
        loss.backward()
        self.loss, self.tokens = loss.item(), valid_targets(part["labels"])
        return loss.detach()

    def update(self) -> None:
        """Pushes the gradient, pulls the weights: 4 · parameters bytes each way."""
        is_last = self.launch.rank == self.launch.world_size - 1
        if is_last and self.options.kill_worker_after == self.steps:
            os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))
        self.steps += 1
        gradient = parameters_to_vector([p.grad for p in self.parameters]).cpu()
        note = torch.tensor([self.PUSH, self.version, self.tokens, self.loss], dtype=torch.float64)
        dist.send(note, 0, self.group)
        dist.send(gradient, 0, self.group)
        dist.recv(note, 0, self.group)  # ranks meet: with --mode sync, all of them
        dist.recv(gradient, 0, self.group)
        self.version = int(note[1])
        with torch.no_grad():
            for parameter, weights in self.pieces(gradient):
                parameter.copy_(weights)
        self.optimizer.zero_grad(set_to_none=True)

    # The server.

    def serve(self) -> None:
        """Answers every worker, each in a thread of its own, until all have left or died."""
        self.turn = threading.Condition()  # held by the thread that uses what follows
        self.alive, self.arrived = set(range(1, self.launch.world_size)), set()
        self.sum = torch.zeros_like(parameters_to_vector(self.parameters).detach(), device="cpu")
        self.pushed = [torch.empty_like(self.sum) for _ in self.alive]
        self.loss, self.tokens, self.reports, self.sent = 0.0, 0, {}, [0, 0]
        self.staleness, self.lost = collections.Counter(), {}
        with ThreadPoolExecutor(len(self.alive)) as pool:
            for served in [pool.submit(self.serve_worker, rank) for rank in self.alive]:
                served.result()
        self.extra["staleness"] = dict(sorted(self.staleness.items()))
        self.extra["lost_workers"] = self.lost

    def serve_worker(self, worker: int) -> None:
        """Receives gradients and answers with weights, until the worker leaves or is lost."""
        note, gradient = torch.zeros(4, dtype=torch.float64), self.pushed[worker - 1]
        watch = Watch()
        try:
            while True:
                dist.recv(note, worker, self.group)
                if note[0] == self.LEAVE:
                    report: list = [None]
                    dist.recv_object_list(report, worker, self.group)
                    self.reports[worker] = report[0]
                    break
                dist.recv(gradient, worker, self.group)
                with self.turn:
                    self.push(worker, *note[1:].tolist(), gradient)
                    while worker in self.arrived:  # --mode sync: until the last one pushes
                        self.turn.wait()
                    note[1], weights = self.version, parameters_to_vector(self.parameters)
                with watch:
                    dist.send(note, worker, self.group)
                    dist.send(weights.detach().cpu(), worker, self.group)
        except RuntimeError as error:
            if "peer" not in str(error):  # Gloo's word when a connection breaks
                raise
            with self.turn:
                self.lost[worker], self.expected = self.version, []  # its share is missing
            self.launch.say(f"rank {worker} is gone after update {self.version}; the others go on")
        finally:
            with self.turn:
                self.alive.discard(worker)
                self.sent = [a + b for a, b in zip(self.sent, watch.traffic.get("send", (0, 0)))]
                self.update_when_complete()  # the others may have been waiting for this one

    def push(
        self, worker: int, version: float, tokens: float, loss: float, gradient: torch.Tensor
    ) -> None:
        """Adds n_r · ∇(S_r / n_r); divided by Σ n_r that is G of those who have pushed."""
        self.staleness[self.version - int(version)] += 1
        self.sum.add_(gradient, alpha=tokens)
        self.loss += loss * tokens
        self.tokens += tokens
        self.arrived.add(worker)
        self.update_when_complete()

    def update_when_complete(self) -> None:
        """One update from what has arrived: of everybody alive, or with --mode async of anybody."""
        if not self.arrived or (self.sync and not self.arrived >= self.alive):
            return
        for parameter, gradient in self.pieces(self.sum / max(self.tokens, 1)):
            parameter.grad = gradient
        if not self.version:
            self.first_gradients = {n: g.clone() for n, g in self.gradients().items()}
        self.optimizer.step()
        self.version += 1
        self.record(self.loss / max(self.tokens, 1))
        self.launch.where.enter("update", meets=True)
        self.loss, self.tokens = 0.0, 0
        self.sum.zero_()
        self.arrived.clear()
        self.turn.notify_all()

    def collect(self, report: dict) -> list[dict | None]:
        """A worker sends its report to the server: a meeting of all would wait for the dead."""
        if self.launch.rank == 0:
            sent = [n / self.settings.max_steps for n in self.sent]
            report |= {
                "traffic": {"send": sent},
                "gradients": nbytes([self.sum, self.sum, *self.pushed]),
            }
            return [report, *(self.reports.get(r) for r in range(1, self.launch.world_size))]
        dist.send(torch.tensor([self.LEAVE, 0, 0, 0], dtype=torch.float64), 0, self.group)
        dist.send_object_list([report], 0, self.group)
        return []


STRATEGIES: dict[str, type[Strategy]] = {
    "one": Strategy, "ddp": DDP, "fsdp": FSDP, "tensor": TensorParallel, "pipeline": Pipeline,
    "parameter-server": ParameterServer, "fsdp+tensor": FSDPTensor,
}  # fmt: skip


# ------------------------------------------------------------------------------------------
# Small functions of the strategies
# ------------------------------------------------------------------------------------------


class FullCausalLM(nn.Module):
    """A transformers causal model of which all weights are trained; returns the mean loss."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
        """int64 [B, T] each → mean cross-entropy in nats over labels[:, 1:].

        The attention mask is not needed: padding is on the right, and attention is causal.
        """
        logits = self.model(input_ids=input_ids, use_cache=False).logits  # (B, T, V)
        total, count = summed_loss(logits, labels)
        return total / count.clamp(min=1)


def layers_of(model: nn.Module) -> nn.ModuleList:
    """The Transformer layers of a tiny model or of a `FullCausalLM`."""
    tiny = isinstance(model, reference.TinyCausalTransformer)
    return model.encoder.layers if tiny else model.model.model.layers


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor of which ranks hold slices. Ranks meet, if they do."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(local(t).numel() * t.element_size() for t in tensors)


def state_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """All tensors that the optimizer keeps."""
    return itertools.chain.from_iterable(state.values() for state in optimizer.state.values())


def as_reference(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Puts the q, k and v that `SplitAttention` took apart together again, name and tensor."""
    found = {}
    for name, tensor in named.items():
        if "encoder" in name and ".q_proj." in name:
            parts = [named[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            found[name.replace("q_proj.weight", "in_proj_weight")] = torch.cat(parts)
        elif "encoder" not in name or (".k_proj." not in name and ".v_proj." not in name):
            found[name] = tensor
    return found


# ------------------------------------------------------------------------------------------
# Counting
# ------------------------------------------------------------------------------------------

COLLECTIVES = {  # PyTorch's operators, in place and functional, by what they are called
    "allreduce_": "all-reduce", "all_reduce": "all-reduce", "all_reduce_": "all-reduce",
    "_allgather_base_": "all-gather", "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter", "reduce_scatter_tensor": "reduce-scatter",
    "broadcast_": "broadcast", "send": "send",
}  # fmt: skip
NOT_SENT = {"recv_", "barrier", "wait_tensor", "_wrap_tensor_autograd"}  # the sender's, or empty


class Watch(TorchDispatchMode):
    """Sees every operator that this thread runs, to count what is sent and what memory appears.

    `traffic` maps a collective to [calls, bytes], the bytes of the largest tensor it reads or
    writes: the whole gradient for an all-reduce, the result for an all-gather, the input for a
    reduce-scatter. What travels on the wire depends on the algorithm (a ring of N ranks sends
    (N − 1)/N of it, an all-reduce twice that).

    `peak` is the most bytes alive at once that appeared in the step and are neither parameters,
    gradients nor optimizer state: activations, and what FSDP gathers. It is a count of tensors,
    so it does not depend on the allocator.

    PyTorch's CommDebugMode is a mode of the same kind. It counts the same calls of DDP (whose C++
    reducer runs PyTorch's operators too, inside the backward pass), FSDP and tensor parallelism,
    but no bytes, and neither `send` nor `recv`: it sees nothing of a pipeline or a parameter
    server. A mode belongs to a thread, so the server's threads have one each.
    """

    def __init__(self, known: Iterable[torch.Tensor] = (), parameters: Sequence = ()) -> None:
        super().__init__()
        self.traffic: dict[str, list[int]] = {}
        self.peak, self.parameters = 0, parameters
        self.known = weakref.WeakSet(local(t).untyped_storage() for t in known)
        self.alive: weakref.WeakSet = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if any(t not in (torch.Tensor, nn.Parameter) for t in types):
            return NotImplemented  # a DTensor first takes itself apart, into what is counted here
        result = func(*args, **(kwargs or {}))
        if getattr(func, "namespace", "") in ("c10d", "_c10d_functional"):
            name = func.overloadpacket.__name__
            if name not in NOT_SENT:
                sizes = [nbytes(tensors_in(value)) for value in (*args, result)]
                entry = self.traffic.setdefault(COLLECTIVES.get(name, name), [0, 0])
                entry[0] += 1
                entry[1] += max(sizes)
        elif self.parameters:
            for tensor in tensors_in((args, kwargs, result)):
                self.alive.add(tensor.untyped_storage())
            gradients = {id(local(p.grad).untyped_storage()) for p in self.parameters
                         if p.grad is not None}  # fmt: skip
            self.peak = max(self.peak, sum(
                storage.nbytes() for storage in self.alive
                if storage not in self.known and id(storage) not in gradients
            ))  # fmt: skip
        return result


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


# ------------------------------------------------------------------------------------------
# Sharded checkpoints
# ------------------------------------------------------------------------------------------


def training_state(strategy: Strategy, step: int) -> dict[str, torch.Tensor]:
    """Weights and optimizer state by name, tensors only; loading fills the same tensors."""
    state = {"step": torch.tensor(step)}
    for name, parameter in strategy.bare.named_parameters():
        state[f"model.{name}"] = parameter.detach()
        for key, value in strategy.optimizer.state[parameter].items():
            state[f"optimizer.{name}.{key}"] = value
    return state


class Saver:
    """Writes a sharded checkpoint beside the training: each rank copies, then writes its share."""

    def __init__(self, strategy: Strategy, folder: Path, after: int, config: dict) -> None:
        self.strategy, self.folder, self.after, self.config = strategy, folder, after, config
        # Its own group: the writing threads meet too, and must not mix with the training.
        self.group = dist.new_group(backend="gloo")
        self.future: Future | None = None
        self.meanwhile = 0  # steps that ended while it was written

    def after_step(self, step: int) -> None:
        """Begins to save when it is time; else looks whether that is still going on."""
        if step == self.after:
            begin = time.perf_counter()
            state = training_state(self.strategy, step)
            self.future = dcp.async_save(state, checkpoint_id=self.folder, process_group=self.group)
            self.copied = time.perf_counter() - begin
        elif self.future and not self.future.done():
            self.meanwhile += 1

    def finish(self) -> None:
        """Waits for the writing. Raises `RunError` if it failed."""
        try:
            self.future.result()
            if self.strategy.launch.rank == 0:
                content = {**self.config, "step": self.after}
                reference.write_json(self.folder / "config.json", content)
        except (Exception, dcp.CheckpointException) as error:  # of the disk or of another rank
            raise RunError(f"--save {self.folder}: {first_cause(error)}") from error
        self.strategy.launch.say(
            f"saved      {self.folder}, state of step {self.after}: copied in "
            f"{1e3 * self.copied:.0f} ms, {counted(self.meanwhile, 'step')} ended meanwhile"
        )


def load_sharded(strategy: Strategy, folder: Path, alone: bool) -> None:
    """Fills weights, optimizer state and number of steps from a sharded checkpoint.

    Each rank reads what it holds, from the files of however many ranks wrote them. `alone`: this
    process reads for itself, without the others.
    """
    for group in strategy.optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    strategy.update()  # creates the optimizer's state; all values come from the files
    state = training_state(strategy, 0)
    read_shards(state, folder, alone)
    strategy.done = int(state["step"])


def read_shards(state: dict[str, torch.Tensor], folder: Path, alone: bool) -> None:
    """Fills the tensors of `state`, or this rank's slices. Raises `UserError` for damaged files."""
    try:
        with warnings.catch_warnings():  # that one process is meant to read alone
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load(state, checkpoint_id=folder, no_dist=alone)
    except (Exception, dcp.CheckpointException) as error:  # the latter holds each rank's own
        raise UserError(f"--load {folder}: {first_cause(error)}") from None


def first_cause(error: BaseException) -> str:
    """What went wrong on the first rank where something did, in one line."""
    causes = [cause for cause, _ in getattr(error, "failures", {}).values()] or [error]
    return reference.reason_of(causes[0])


def reference_model(folder: Path) -> reference.TinyCausalTransformer:
    """The reference's model with the weights of a sharded checkpoint, in one process."""
    config = read_config(folder)
    if config.pop("model") != "tiny":
        raise UserError(f"{folder} holds no tiny model")
    del config["step"]
    model = reference.TinyCausalTransformer(**config)
    state = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    read_shards(state, folder, alone=True)
    return model


PLAIN = {  # what PyTorch's index of a sharded checkpoint, a pickle, may refer to
    "torch": {"Size", "float32", "int64"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "TensorProperties",
        "ChunkStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},  # Python 3.13
}  # fmt: skip


class PlainUnpickler(pickle.Unpickler):
    """Unpickles what is `PLAIN`, and refuses the rest."""

    def find_class(self, module: str, name: str) -> Any:
        """What the pickle calls `module.name`. Raises `UnpicklingError` for anything unknown."""
        if name not in PLAIN.get(module, ()):
            raise pickle.UnpicklingError(f"it refers to {module}.{name}")
        return super().find_class(module, name)


def read_config(folder: Path) -> dict:
    """The shape of the model of a sharded checkpoint, after a look at its index.

    PyTorch unpickles the index and every entry that is not a tensor, so both are looked at first.
    Raises `UserError` if there is no such checkpoint, or one that could run code.
    """
    try:
        with open(folder / ".metadata", "rb") as file:
            index = PlainUnpickler(file).load()
        odd = [n for n, e in index.state_dict_metadata.items() if not hasattr(e, "properties")]
        if odd:
            raise pickle.UnpicklingError(f"{odd[0]} is not a tensor")
        config = json.loads((folder / "config.json").read_text("utf-8"))
        return {**config, "step": int(config["step"])}
    except Exception as error:  # unpickling raises many kinds
        why = reference.reason_of(error)
        raise UserError(f"--load {folder} is no complete sharded checkpoint: {why}") from None


# ------------------------------------------------------------------------------------------
# One run
# ------------------------------------------------------------------------------------------


def build(launch: reference.Launch, settings: argparse.Namespace) -> reference.Run:
    """Model, equal on all ranks, and data. Of Qwen all weights are trained. Ranks meet."""
    if settings.model == "tiny":
        return reference.build_tiny(launch, settings)
    for turn in (launch.rank == 0, launch.rank != 0):  # a download happens once
        with reference.together(launch):
            if turn:
                base, tokenizer = reference.load_base(settings)
    with reference.together(launch):
        data = reference.build_data(settings, tokenizer)
    model = FullCausalLM(base.float()).train().to(launch.device)
    collate = reference.qwen_collator(tokenizer, settings)
    return reference.Run(launch, settings, data, model, collate, str, print, [])


def global_batches(run: reference.Run, size: int) -> Iterator[dict]:
    """The global batches of one epoch after another, whole, in the reference's order."""
    sampler = reference.EpochSampler(len(run.data.train), run.settings.seed)
    loader = torch.utils.data.DataLoader(
        run.data.train, size, sampler=sampler, collate_fn=run.collate, drop_last=True
    )
    for epoch in itertools.count(1):
        sampler.set_epoch(epoch)
        yield from loader


def train(strategy: Strategy, batches: Iterable[dict], saver: Saver | None = None) -> dict:
    """Trains from step `strategy.done` to the last one; returns what this rank measured.

    Bytes of parameters, gradients, optimizer (at the end), activations (the peak) and traffic of
    one step, and the median seconds of the steps after it, whose counting takes time.
    """
    launch, device, done = strategy.launch, strategy.launch.device, strategy.done
    parameters = list(strategy.bare.parameters())
    watch, seconds, gradients, peak = None, [], 0, 0
    for step, batch in zip(range(1, strategy.settings.max_steps + 1), batches):
        if step <= done:
            continue
        launch.where.step = step
        launch.where.enter("step", meets=True)
        number = step - done
        begin = time.perf_counter()
        part = reference.inputs_of(strategy.divide_batch(batch), device)
        with watch if number == WATCHED_STEP else contextlib.nullcontext():
            loss = strategy.forward_backward(part, valid_targets(batch["labels"]))
            gradients = nbytes(p.grad for p in parameters)
            peak = watch.peak if number == WATCHED_STEP else peak
            if number == 1:
                strategy.first_gradients = strategy.gradients()
            if number == WATCHED_STEP - 1:  # DDP's gradients stay where they are: in its buckets
                known = [*parameters, *(p.grad for p in parameters), *state_of(strategy.optimizer)]
                watch = Watch(known, parameters)
            strategy.update()
            strategy.record(strategy.total_loss(loss))
        seconds.append(time.perf_counter() - begin)
        if saver:
            saver.after_step(step)
    return {
        "parameters": nbytes(parameters), "gradients": gradients,
        "optimizer": nbytes(state_of(strategy.optimizer)),
        "activations": peak, "traffic": watch.traffic if watch else {},
        "seconds": statistics.median(seconds[WATCHED_STEP:] or [0.0]),  # a server has none
    }  # fmt: skip


def run_strategy(
    launch: reference.Launch, options: argparse.Namespace, settings: argparse.Namespace
) -> None:
    """One strategy on the ranks that were launched, beside one process. Ranks meet."""
    o, s, first = options, settings, launch.rank == 0
    saved = read_config(o.load) if o.load else {}
    reference.choose_device(launch, s)
    reference.set_up(launch)
    run = build(launch, s)
    config = {"model": s.model, **getattr(run.model, "config", {"base": s.base_model})}
    check_run(run, o, config, saved)
    alone = dataclasses.replace(run, model=copy.deepcopy(run.model) if first else None)
    strategy, baseline = STRATEGIES[o.strategy](run, o), None
    server = isinstance(strategy, ParameterServer)
    if o.global_batch < strategy.data_ranks:
        raise UserError(f"--global-batch {o.global_batch} for {strategy.data_ranks} parts")
    for what, chosen, why in launch.choices:
        launch.say(f"{what:10} {chosen} ({why})")

    with reference.Watchdog(launch):
        if first:
            baseline = train_alone(alone, o)
            strategy.expected = [] if server and o.mode == "async" else baseline.losses
        if o.load:
            load_sharded(strategy, o.load, alone=launch.world_size == 1)
        strategy.shown = True
        saver = Saver(strategy, o.save, s.max_steps // 2, config) if o.save else None
        batches = global_batches(run, o.global_batch)
        if server and first:
            strategy.serve()
            batches = ()
        measured = train(strategy, batches, saver)
        if saver:
            saver.finish()
        ranks = strategy.collect(measured)
    if first:
        report = {"strategy": o.strategy, "losses": strategy.losses, "ranks": ranks}
        report |= strategy.extra
        report |= differences(strategy, baseline) if strategy.expected else {}
        print_report(report, launch)
        if o.report:
            reference.write_json(o.report, report)
        if s.precision == "fp32":
            require_equal(report)


def check_run(run: reference.Run, o: argparse.Namespace, config: dict, saved: dict) -> None:
    """Refuses what model, data and backend make impossible. Raises `UserError`.

    `config` is the shape of the model, `saved` that of the checkpoint to go on from, if any.
    """
    launch, steps, samples = run.launch, run.settings.max_steps, len(run.data.train)
    gloo = launch.world_size > 1 and dist.get_backend() == "gloo"
    changed = ", ".join(
        f"{what} was {saved.get(what)} there and is {here} here"
        for what, here in config.items() if saved and saved.get(what) != here
    )  # fmt: skip
    for refused, why in (
        (launch.device.type == "cuda" and gloo and o.strategy != "parameter-server",
         f"--strategy {o.strategy} on CUDA needs NCCL and a GPU per rank; use --cpu"),
        (samples < o.global_batch,
         f"--global-batch {o.global_batch} of {counted(samples, 'sample')}"),
        (changed, f"--load: {changed}"),
        (saved and saved["step"] >= steps,
         f"--max-steps {steps}: the checkpoint has {saved.get('step')} already"),
    ):  # fmt: skip
        if refused:
            raise UserError(why)


def train_alone(run: reference.Run, options: argparse.Namespace) -> Strategy:
    """One process on the same global batches, from the same checkpoint."""
    baseline = Strategy(run, options)
    if options.load:
        load_sharded(baseline, options.load, alone=True)
    train(baseline, global_batches(run, options.global_batch))
    return baseline


def differences(strategy: Strategy, baseline: Strategy) -> dict[str, float]:
    """How far a strategy is from one process: first gradients, relative; losses, in nats."""
    ours, theirs = strategy.first_gradients, baseline.first_gradients
    if ours.keys() != theirs.keys():
        raise RunError(f"gradients are missing: {sorted(ours.keys() ^ theirs.keys())}")
    relative = [float((ours[n] - g).abs().max() / g.abs().max()) for n, g in theirs.items()]
    losses = [abs(a - b) for a, b in zip(strategy.losses, baseline.losses, strict=True)]
    return {"gradient_difference": max(relative), "loss_difference": max(losses)}


def require_equal(report: dict) -> None:
    """Raises `RunError` unless gradients and losses are those of one process, within rounding."""
    gradient, loss = report.get("gradient_difference", 0), report.get("loss_difference", 0)
    if not (gradient <= GRADIENT_LIMIT and loss <= LOSS_LIMIT):  # NaN fails too
        raise RunError(
            f"{report['strategy']} differs from one process: gradients of the first step by "
            f"{gradient:.1e} (allowed {GRADIENT_LIMIT}), losses by {loss:.1e} ({LOSS_LIMIT})"
        )


def print_report(report: dict, launch: reference.Launch) -> None:
    """How near it came to one process, and what each rank held and sent."""
    if "loss_difference" in report:
        launch.say(
            "difference to one process: gradients of the first step "
            f"{report['gradient_difference']:.1e} of a tensor's largest value, losses "
            f"{report['loss_difference']:.1e}"
        )
    for rank, r in enumerate(report["ranks"]):
        held = "gone" if r is None else f"MB: {', '.join(f'{n} {r[n] / 1e6:.2f}' for n in MEMORY)}"
        sent = f"; sent a step: {traffic_text(r['traffic'])}" if r else ""
        pace = f"; {1e3 * r['seconds']:.0f} ms a step" if r and r["seconds"] else ""
        launch.say(f"rank {rank}     {held}{sent}{pace}")
    for note in notes_of(report):
        launch.say(note)


def notes_of(report: dict) -> list[str]:
    """What only a pipeline and a parameter server have to say."""
    notes = []
    if "bubble" in report:
        measured, formula = report["bubble"]["measured"], report["bubble"]["formula"]
        notes.append(f"idle {measured:.0%}, (N − 1) / (m + N − 1) = {formula:.0%}")
    if set(report.get("staleness", {})) - {0, "0"}:
        counts = ", ".join(f"{count} × {by}" for by, count in report["staleness"].items())
        notes.append(f"staleness of gradients, in updates: {counts}")
    return notes


def traffic_text(traffic: dict[str, Sequence[float]]) -> str:
    """'2 × all-reduce 3.41 MB, …', or 'nothing'."""
    parts = [message_text(*amount, name) for name, amount in traffic.items()]
    return ", ".join(parts) or "nothing"


def bytes_of(traffic: dict[str, Sequence[float]]) -> float:
    """What a rank sent in a step."""
    return sum(size for _, size in traffic.values())


def message_text(count: float, size: float, name: str = "") -> str:
    """'2 × all-reduce 3.41 MB': messages, and their bytes together."""
    return f"{count:.3g} × {name}{' ' * bool(name)}" + (
        f"{size / 1e6:.3g} MB" if size >= 1e4 else f"{size:.0f} B"
    )


# ------------------------------------------------------------------------------------------
# Starting ranks, and the comparison of all
# ------------------------------------------------------------------------------------------


def run_rank(argv: list[str], environment: dict[str, str], log: str | None) -> None:
    """What a process that `start_ranks` started does."""
    common.end_with_lab()
    os.environ.update(environment)
    if log:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
    main(argv, started=True)


def start_ranks(
    ranks: int, argv: list[str], log: Path | None = None, may_die: bool = False,
    patience: float = math.inf,
) -> list[int]:  # fmt: skip
    """Runs `main(argv)` in `ranks` processes; returns their exit statuses.

    When one fails, the others are ended, as torchrun does, unless they `may_die`; after `patience`
    seconds, all.
    """
    context, processes = common.process_context(ENGINES), []
    _store, environments = common.local_launch(ranks)  # kept until all have ended
    try:
        for environment in environments:
            arguments = (argv, environment, str(log) if log else None)
            process = context.Process(target=run_rank, args=arguments)
            process.start()
            processes.append(process)
        end = time.monotonic() + patience
        while any(p.exitcode is None for p in processes) and time.monotonic() < end:
            if not may_die and any(p.exitcode for p in processes):
                end = min(end, time.monotonic() + 2 * reference.PEER_LOSS_GRACE_S)
            multiprocessing.connection.wait(
                [p.sentinel for p in processes if p.exitcode is None], timeout=1
            )
    finally:
        for process in processes:
            if process.exitcode is None:
                process.kill()
            process.join()
    return [process.exitcode for process in processes]


ENGINES = [  # imports that take seconds
    "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
]  # fmt: skip
COMPARED = (  # what the table calls it, ranks, flags
    ("one process", 1, ["--strategy", "one"]),
    ("DDP", 2, ["--strategy", "ddp"]),
    ("FSDP", 2, ["--strategy", "fsdp"]),
    ("tensor", 2, ["--strategy", "tensor"]),
    ("pipeline, GPipe", 2, ["--strategy", "pipeline", "--schedule", "gpipe"]),
    ("pipeline, 1F1B", 2, ["--strategy", "pipeline", "--schedule", "1f1b"]),
    ("parameter server, sync", 3, ["--strategy", "parameter-server", "--mode", "sync"]),
    ("parameter server, async", 3, ["--strategy", "parameter-server", "--mode", "async"]),
    ("FSDP + tensor", 4, ["--strategy", "fsdp+tensor"]),
)
OUTPUTS = ("strategies.txt", "strategies.md", "strategies.png")
KINDS = ("log", "json")  # what each strategy printed and reported
MEMORY = ("parameters", "gradients", "optimizer", "activations")


def compare(options: argparse.Namespace, settings: argparse.Namespace, flags: list[str]) -> None:
    """Runs all strategies one after the other; writes table, picture and reports."""
    flags = [
        "--global-batch", str(options.global_batch),
        "--micro-batches", str(options.micro_batches), *flags,
    ]  # fmt: skip
    for name in ("ranks", "kill_worker_after", "save", "load", "report"):
        if getattr(options, name):
            raise UserError(f"--{name.replace('_', '-')} means nothing with --compare")
    for _, ranks, own in COMPARED:
        parsed = parse_options([*own, *flags])
        check_options(*parsed[:2], ranks)
    outputs = [*OUTPUTS, *(f"{slug(name)}.{kind}" for name, *_ in COMPARED for kind in KINDS)]
    folder = common.results_folder("strategies", outputs, options.output_dir, options.overwrite)
    gpus = torch.cuda.device_count() if settings.device in ("auto", "cuda") else 0
    reports = []
    for name, ranks, own in COMPARED:
        begin = time.monotonic()
        log, result = (folder / f"{slug(name)}.{kind}" for kind in KINDS)
        for old in (log, result):
            old.unlink(missing_ok=True)
        if 0 < gpus < ranks and "server" not in name:
            common.say(f"{name}: left out, it needs {ranks} GPUs; with --cpu it needs none")
            continue
        argv = [*own, "--report", str(result), *flags]
        statuses = start_ranks(ranks, argv, log, patience=PATIENCE_S)
        if any(statuses):
            print(log.read_text("utf-8", errors="replace"), file=sys.stderr)
            raise RunError(f"{name} failed with statuses {statuses}; see {log}")
        reports.append({"name": name, **json.loads(result.read_text("utf-8"))})
        common.say(f"{name}: {time.monotonic() - begin:.1f} s")
    table = as_tables(reports)
    for name in ("strategies.txt", "strategies.md"):  # aligned Markdown reads well as text
        reference.write_file(folder / name, lambda file: file.write(table.encode("utf-8")))
    draw(reports, folder / "strategies.png")
    common.say(f"\n{table}\nwritten to {folder}: {' '.join(OUTPUTS)}")


def slug(name: str) -> str:
    """The table's name of a strategy as a file name: 'pipeline, 1F1B' → 'pipeline-1f1b'."""
    return name.replace(",", "").replace(" + ", "-").replace(" ", "-").lower()


def as_tables(reports: list[dict]) -> str:
    """What was found, as Markdown that reads well as text and fits into 100 columns."""
    kinds = sorted({kind for r in reports for rank in r["ranks"] for kind in rank["traffic"]})
    steps = [["strategy", "ranks", "Δ gradient", "Δ loss", "ms a step"]]
    held = [["memory in MB", "ranks", *MEMORY]]
    sent = [["sent a step by the busiest rank", *kinds]]
    notes = []
    for report in reports:
        name, ranks = report["name"], report["ranks"]
        apart = [report.get(f"{of}_difference") for of in ("gradient", "loss")]
        apart = ["–" if x is None else f"{x:.0e}" for x in apart]
        slowest = 1e3 * max(rank["seconds"] for rank in ranks)
        steps.append([name, len(ranks), *apart, f"{slowest:.0f}"])
        shares: dict[tuple, list[str]] = {}  # the ranks that hold the same
        for number, rank in enumerate(ranks):
            share = tuple(f"{rank[part] / 1e6:.2f}" for part in MEMORY)
            shares.setdefault(share, []).append(str(number))
        for share, numbers in shares.items():
            held.append([name, "all" if len(shares) == 1 else ", ".join(numbers), *share])
        traffic = max((r["traffic"] for r in ranks), key=bytes_of)
        sent.append([name, *(message_text(*traffic[k]) if k in traffic else "–" for k in kinds)])
        notes += [f"- {name}: {note}\n" for note in notes_of(report)]
    return "\n".join([*map(as_table, (steps, held, sent)), "".join(notes)])


def as_table(rows: Sequence[Sequence[object]]) -> str:
    """Cells as Markdown, padded so that columns stand under each other."""
    rows = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    rows = [[cell.ljust(width) for cell, width in zip(row, widths)] for row in rows]
    rows.insert(1, ["-" * width for width in widths])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def draw(reports: list[dict], path: Path) -> None:
    """Three panels with a bar per rank: memory stacked, bytes sent by collective, time."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6), layout="constrained")
    memory, traffic, seconds = figure.subplots(1, 3, sharey=True, width_ratios=(5, 4, 3))
    ranks = [rank for report in reports for rank in report["ranks"]]
    counts = [len(report["ranks"]) for report in reports]
    places = [at - 0.45 + 0.9 * (i + 0.5) / n for at, n in enumerate(counts) for i in range(n)]
    heights = [0.8 / n for n in counts for _ in range(n)]

    def stack(axes: Any, title: str, unit: str, colors: str, parts: dict[str, list[float]]) -> None:
        """One panel; each part begins where the last one ended."""
        left = [0.0] * len(ranks)
        for color, (name, values) in zip(colormaps[colors].colors, parts.items()):
            axes.barh(places, values, heights, left=left, label=name, color=color)
            left = [a + b for a, b in zip(left, values)]
        axes.set(title=title, xlabel=unit, xlim=(0, 1.05 * max(left)))
        axes.grid(axis="x", alpha=0.3)

    held = {name: [r[name] / 1e6 for r in ranks] for name in MEMORY}
    stack(memory, "Memory, a bar per rank", "MB", "tab10", held)
    kinds = sorted({kind for rank in ranks for kind in rank["traffic"]})
    sent = {kind: [r["traffic"].get(kind, (0, 0))[1] / 1e6 for r in ranks] for kind in kinds}
    stack(traffic, "Sent in a step", "MB", "Set2", sent)
    times = {"step": [1e3 * r["seconds"] for r in ranks]}
    stack(seconds, "Time of a step", "ms", "Dark2", times)
    for axes in (memory, traffic):
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2)
    names = [f"{r['name']}\n{len(r['ranks'])} rank{'s' * (len(r['ranks']) > 1)}" for r in reports]
    memory.set_yticks(range(len(reports)), names)
    memory.invert_yaxis()
    reference.write_file(path, lambda file: figure.savefig(file, format="png", dpi=110))


@record
def main(argv: Sequence[str] | None = None, started: bool = False) -> None:
    """One strategy on these ranks, or with --ranks and --compare on ranks that are started."""
    where = reference.Where()
    reference.print_on_any_terminal()
    with reference.one_clear_ending(where):
        launch = reference.read_launcher(where)
        argv = list(sys.argv[1:] if argv is None else argv)
        options, settings, flags = parse_options(argv)
        if not started and (options.compare or options.ranks):
            common.refuse_launcher("strategies")
        if options.compare:
            reference.require_matplotlib()
            return compare(options, settings, flags)
        check_options(options, settings, options.ranks or launch.world_size)
        if options.ranks and not started:
            may_die = options.strategy == "parameter-server"
            statuses = start_ranks(options.ranks, argv, may_die=may_die)
            status = statuses[0] if may_die else next(filter(None, statuses), 0)
            sys.exit(status if status >= 0 else 128 - status)  # as shells say a signal's number
        run_strategy(launch, options, settings)
    return None


if __name__ == "__main__":
    main()
