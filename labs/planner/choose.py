"""The choice: which ways to divide a run there are, and which of them is the fastest that fits."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
from collections.abc import Sequence

from labs.planner.memory import memory
from labs.planner.models import PlanError
from labs.planner.runs import CHECKPOINTING, Layout, Run
from labs.planner.time import step_seconds
from labs.shared.report import size_of


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A layout with the batch that suits it, and what comes of it."""

    layout: Layout
    run: Run
    memory: dict[str, int]
    step: dict[str, float]
    problem: str = ""  # "too big" for the GPU, or "large batch": more than --global-batch

    @property
    def update_tokens(self) -> int:
        return self.run.tokens * self.run.accum * self.layout.data

    @property
    def tokens_per_second(self) -> float:
        return self.update_tokens / self.step["total"]


def layouts(run: Run, args: argparse.Namespace) -> list[Layout]:
    """The sensible ways, simplest first; or those that the flags leave.

    Tensor ranks stay inside a node, whose links are fast; pipeline stages lie across nodes.
    """
    m, gpus, in_node = run.model, run.machine.gpus, run.machine.gpus_per_node
    tensors = [t for t in (1, 2, 4, 8) if not (in_node % t or m.heads % t or m.kv_heads % t)]
    pipelines = [p for p in (1, 2, 4, 8, 16, 32, 64) if not run.machine.nodes % p and p <= m.layers]
    if run.lora_r:  # little to exchange, and nothing to divide but the frozen weights
        tensors, pipelines = [1], [1]
    tensors = [args.tensor] if args.tensor else tensors
    pipelines = [args.pipeline] if args.pipeline else pipelines
    again = ["none"] if args.exact else list(CHECKPOINTING)
    again = [args.gradient_checkpointing] if args.gradient_checkpointing else again
    found = []
    for p, t in itertools.product(pipelines, tensors):
        if in_node % t or gpus % (t * p) or p > m.layers:
            continue
        data = gpus // (t * p)
        kinds = {"ddp": 1, "zero1": data, "fsdp": data, "zero2": data, "hsdp": in_node}
        if data < gpus:
            kinds = {"ddp": 1, "zero1": data, "fsdp": data}
        if run.lora_r:
            kinds = {"ddp": 1, "fsdp": data}
        chunks = [args.chunks] if args.chunks else sorted({1, round(m.layers / p)})
        for kind, shard in kinds.items():
            wanted = args.strategy in ("auto", kind) if data > 1 else kind == "ddp"
            if wanted and (kind != "hsdp" or 1 < in_node < gpus):
                kind = "fsdp" if kind == "hsdp" else kind
                found += [
                    Layout(kind, data, shard, t, p, c, how, args.sequence_parallel == "on")
                    for how in again
                    for c in (chunks if p > 1 else [1])
                ]
    if not found:
        raise PlanError(
            f"no way to divide {gpus} GPUs ({run.machine.nodes} × {in_node}) for --strategy "
            f"{args.strategy} --tensor {args.tensor or 'any'} --pipeline {args.pipeline or 'any'}; "
            "tensor ranks stay inside a node, and tensor × pipeline must divide the GPUs"
        )
    return found


def portions(run: Run, layout: Layout, args: argparse.Namespace) -> list[tuple[int, int]]:
    """(sequences of a micro-batch, micro-batches) of a rank that make up the global batch.

    Never more than was asked for, and at most a tenth less; none if each rank's one sequence is
    already more, or an interleaved pipeline has fewer micro-batches than stages.
    """
    least = layout.pipeline if layout.chunks > 1 else 1  # micro-batches that chunks overlap
    if args.batch_size and args.grad_accum:
        return [(args.batch_size, args.grad_accum)] if args.grad_accum >= least else []
    update = min(args.global_batch, args.tokens or math.inf)
    sequences = int(update / run.seq_len / layout.data)  # of a rank
    if args.batch_size:
        accum = sequences // args.batch_size
        return [(args.batch_size, accum)] if accum >= least else []
    found = []
    for power in range(sequences.bit_length()):
        accum = args.grad_accum or math.ceil(sequences / 2**power)
        batch = min(sequences // accum, 2**power) if args.grad_accum else sequences // accum
        enough = args.grad_accum or batch * accum >= 0.9 * sequences
        if batch and enough and accum >= least:
            found.append((batch, accum))
    return found


def assess(run: Run, layout: Layout, args: argparse.Namespace) -> Candidate:
    """The layout with the portions that make it fastest among those that fit.

    Of those within 1 %, the one with the largest micro-batch: larger products are no slower.
    """

    def candidate(batch: int, accum: int, problem: str = "") -> Candidate:
        there = dataclasses.replace(run, batch=batch, accum=accum)
        need = memory(there, layout)
        if not problem and need["total"] > run.machine.memory:
            problem = "too big"
        return Candidate(layout, there, need, step_seconds(there, layout), problem)

    seen = [candidate(batch, accum) for batch, accum in portions(run, layout, args)]
    if not seen:
        least = layout.pipeline if layout.chunks > 1 else 1
        return candidate(args.batch_size or 1, least, "large batch")
    possible = [one for one in seen if not one.problem]
    fastest = max((one.tokens_per_second for one in possible), default=0.0)
    good = [one for one in possible if one.tokens_per_second >= 0.99 * fastest]
    return max(good, key=lambda one: one.run.batch, default=seen[0])


def choose(run: Run, args: argparse.Namespace) -> tuple[Candidate, list[Candidate]]:
    """The fastest that is possible, and all that were looked at. A simpler one may be 2 % slower.

    Raises `PlanError` if none is: one is too large for the GPU, or for --global-batch.
    """
    seen = [assess(run, layout, args) for layout in layouts(run, args)]
    best: Candidate | None = None
    for one in seen:
        faster = best is None or one.tokens_per_second > 1.02 * best.tokens_per_second
        best = one if not one.problem and faster else best
    if best is None:
        raise PlanError(why_none(run, seen, args))
    return best, seen


def why_none(run: Run, seen: Sequence[Candidate], args: argparse.Namespace) -> str:
    """What keeps every layout from being possible, in one line."""
    large = [one for one in seen if one.problem == "too big"]
    if not large:
        least = min(seen, key=lambda one: one.update_tokens)
        return (
            f"--global-batch {args.global_batch:g} is too small: {least.layout.name} with "
            f"{least.run.batch} × {run.seq_len} tokens a rank makes {least.update_tokens:,} an "
            "update; raise it, lower --seq-len or --batch-size, or take fewer GPUs"
        )
    leanest = min(large, key=lambda one: one.memory["total"])
    return (
        f"nothing fits: the leanest, {leanest.layout.name}, needs "
        f"{size_of(leanest.memory['total'])} a GPU at {leanest.run.batch} × {run.seq_len} tokens, "
        f"and {run.machine.name} has {size_of(run.machine.memory)}; add --nodes, take a larger "
        "--gpu, or lower --seq-len or --batch-size"
    )
