"""Memory, time, scaling and checkpoints of a training run, before it is paid for.

The exercise: 13 billion parameters, 200 GB of text, 4 nodes of 8 A100:

    python -m labs.planner --params 13e9 --data 200GB --gpu a100-80gb --nodes 4 --gpus-per-node 8

Runs of llm_ddp_parallel_training.py (the reference) by its own flags; its `--dry-run` prints the
same estimate:

    python -m labs.planner --model tiny --d-model 256 --layers 4 --seq-len 256 --batch-size 16
    python -m labs.planner --model qwen --batch-size 4 --gradient-checkpointing --gpu t4-16gb

Other models by name, with LoRA or in full; for programs, and as a picture:

    python -m labs.planner --model llama-3.1-8b --tokens 10e9 --gpu h100-80gb --nodes 2
    python -m labs.planner --model qwen2.5-0.5b --lora-r 8 --gpu rtx-4090-24gb --json
    python -m labs.planner --params 13e9 --gpu a100-80gb --nodes 4 --picture memory.png

It needs Python alone: no torch, no GPU (matplotlib for the picture). Every figure that is an
assumption and not arithmetic has a flag. Read it in this order: machines and models, memory,
time of a step, scaling and faults, checkpoints, the choice, the report.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import os
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# ------------------------------------------------------------------------------------------
# Machines and models
# ------------------------------------------------------------------------------------------


class PlanError(Exception):
    """The question makes no sense; its text is the one line that the user sees."""


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Of the vendor's data sheet; both rates are peaks that no program reaches."""

    memory: float  # bytes; the few percent that a GB of 2^30 has more are left to CUDA and NCCL
    peak: float  # FLOP/s of dense 16-bit matrix products
    link: float  # bytes/s, each direction, to the other GPUs of the node (NVLink or PCIe)
    network: str  # what usually connects nodes of it


GPUS = {
    "v100-32gb": Gpu(32e9, 125e12, 150e9, "infiniband-edr"),
    "t4-16gb": Gpu(16e9, 65e12, 16e9, "ethernet-25g"),
    "a100-40gb": Gpu(40e9, 312e12, 300e9, "infiniband-hdr"),
    "a100-80gb": Gpu(80e9, 312e12, 300e9, "infiniband-hdr"),
    "h100-80gb": Gpu(80e9, 989e12, 450e9, "infiniband-ndr"),
    "h200-141gb": Gpu(141e9, 989e12, 450e9, "infiniband-ndr"),
    "b200-180gb": Gpu(180e9, 2250e12, 900e9, "infiniband-ndr"),
    "mi300x-192gb": Gpu(192e9, 1307e12, 448e9, "infiniband-ndr"),
    "l4-24gb": Gpu(24e9, 121e12, 32e9, "ethernet-100g"),
    "rtx-3090-24gb": Gpu(24e9, 71e12, 32e9, "ethernet-10g"),
    "rtx-4090-24gb": Gpu(24e9, 165e12, 32e9, "ethernet-10g"),
    # Two 2.8 GHz cores and Gloo over loopback, as measured there; memory is what the host has.
    "cpu": Gpu(math.inf, 190e9, 1e9, "ethernet-10g"),
}


@dataclasses.dataclass(frozen=True)
class Network:
    """Cards between nodes: nominal bytes/s each direction, and seconds that a message takes."""

    card: float
    latency: float
    cards_by_gpu: bool  # a card for every GPU, as in DGX machines; else one for the node


NETWORKS = {
    "infiniband-ndr": Network(50e9, 5e-6, True),  # 400 Gb/s
    "infiniband-hdr": Network(25e9, 5e-6, True),  # 200 Gb/s
    "infiniband-edr": Network(12.5e9, 5e-6, True),  # 100 Gb/s
    "infiniband-hdr-one-card": Network(25e9, 5e-6, False),
    "ethernet-100g": Network(12.5e9, 20e-6, False),
    "ethernet-25g": Network(3.125e9, 40e-6, False),
    "ethernet-10g": Network(1.25e9, 40e-6, False),
}
NODE_LATENCY = 3e-6  # seconds, NVLink or PCIe inside a node
REACHED = 0.8  # of a link's nominal rate; NCCL reaches about 235 of an A100's 300 GB/s in a node


@dataclasses.dataclass(frozen=True)
class Machine:
    """Equal nodes of equal GPUs."""

    name: str
    memory: float  # bytes a GPU
    peak: float  # FLOP/s a GPU
    share: float  # of the peak that the kernels reach while they compute
    nodes: int
    gpus_per_node: int
    link: float  # bytes/s that a GPU reaches inside its node
    network: str
    node_rate: float  # bytes/s that a node's cards reach together
    latency: float  # seconds between nodes

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    def of_size(self, gpus: int) -> Machine:
        """The same with another number of GPUs; fewer than a node are a part of one."""
        per_node = min(self.gpus_per_node, gpus)
        return dataclasses.replace(self, nodes=math.ceil(gpus / per_node), gpus_per_node=per_node)


@dataclasses.dataclass(frozen=True)
class Model:
    """The shape of a causal Transformer; `parameters` counts it exactly."""

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    gated: bool = True  # three feed-forward matrices (SwiGLU), else two
    tied: bool = False  # the head is the embedding
    positions: int = 0  # learned position embeddings
    qkv_bias: bool = False

    @property
    def kv_width(self) -> int:
        return self.width // self.heads * self.kv_heads

    @property
    def matrices(self) -> int:
        """Parameters of a layer that tensor parallelism divides."""
        attention = 2 * self.width * (self.width + self.kv_width)
        bias = self.width + 2 * self.kv_width if self.qkv_bias else 0
        return attention + bias + (3 if self.gated else 2) * self.width * self.ffn

    @property
    def norms(self) -> int:
        """Parameters of a layer that it does not divide."""
        return 2 * self.width

    def stage_layers(self, pipeline: int, stage: int) -> int:
        """Layers of a stage; the last ones get what is left over."""
        return self.layers * (stage + 1) // pipeline - self.layers * stage // pipeline

    def part(self, tensor: int = 1, pipeline: int = 1, stage: int = 0) -> int:
        """Parameters on one rank of a pipeline stage."""
        layers = self.stage_layers(pipeline, stage)
        divided, whole = layers * self.matrices, layers * self.norms
        if stage == 0:
            divided, whole = divided + self.vocab * self.width, whole + self.positions * self.width
        if stage == pipeline - 1:
            if not self.tied or pipeline > 1:
                divided += self.vocab * self.width
            whole += self.width
        return math.ceil(divided / tensor) + whole

    @property
    def parameters(self) -> int:
        return self.part()

    def lora(self, r: int, targets: Sequence[str]) -> int:
        """Parameters of adapters A [r, in] and B [out, r] on the layers named (Hu et al. 2021)."""
        h, kv, f = self.width, self.kv_width, self.ffn
        sizes = {
            "q_proj": h + h, "k_proj": h + kv, "v_proj": h + kv, "o_proj": h + h,
            "gate_proj": h + f, "up_proj": h + f, "down_proj": f + h,
        }  # fmt: skip
        unknown = [name for name in targets if name not in sizes]
        if unknown or not targets:
            raise PlanError(
                f"--lora-targets: unknown {', '.join(unknown) or '(nothing)'}; known: "
                + ", ".join(sizes)
            )
        return self.layers * r * sum(sizes[name] for name in set(targets))


MODELS = {  # shapes as in the models' public config files
    m.name: m
    for m in (
        Model("qwen2.5-0.5b", 24, 896, 14, 2, 4864, 151936, tied=True, qkv_bias=True),
        Model("qwen2.5-7b", 28, 3584, 28, 4, 18944, 152064, qkv_bias=True),
        Model("llama-2-7b", 32, 4096, 32, 32, 11008, 32000),
        Model("llama-2-13b", 40, 5120, 40, 40, 13824, 32000),
        Model("llama-2-70b", 80, 8192, 64, 8, 28672, 32000),
        Model("llama-3.1-8b", 32, 4096, 32, 8, 14336, 128256),
        Model("llama-3.1-70b", 80, 8192, 64, 8, 28672, 128256),
        Model("llama-3.1-405b", 126, 16384, 128, 8, 53248, 128256),
    )
}


def tiny_model(width: int, layers: int, heads: int, seq_len: int) -> Model:
    """The reference's `TinyCausalTransformer`."""
    return Model(
        "tiny", layers, width, heads, heads, 4 * width, 258, gated=False, positions=seq_len
    )


def model_of_size(parameters: float, vocab: int = 32000) -> Model:
    """A Llama-like shape for a number of parameters N.

    Width is 128 · layers, as in Llama 2 7B and 13B, and N ≈ 12 · layers · width² (Kaplan et al.
    2020, section 2.1) gives the layers; the feed-forward width then makes the count come out.
    """
    layers = (parameters / (12 * 128**2)) ** (1 / 3)
    layers = max(1, round(layers) if layers < 12 else 8 * round(layers / 8))
    width = 128 * layers
    without = Model("", layers, width, layers, layers, 0, vocab).parameters
    ffn = round((parameters - without) / (3 * layers * width))
    if ffn < width:
        raise PlanError(
            f"--params {parameters:g} is too few for a vocabulary of {vocab:,}; give --vocab, or "
            "a shape by --model tiny --d-model --layers"
        )
    return Model(f"{parameters / 1e9:g} billion", layers, width, layers, layers, ffn, vocab)


@dataclasses.dataclass(frozen=True)
class Run:
    """What is trained, in which portions, on what."""

    model: Model
    machine: Machine
    seq_len: int
    batch: int  # sequences of a micro-batch on one data-parallel rank
    accum: int = 1  # micro-batches an update
    mixed: bool = True  # 16-bit matrix products over fp32 weights
    lora_r: int = 0  # 0: all parameters are trained
    lora_targets: tuple[str, ...] = ("q_proj", "v_proj")
    dropout: bool = False
    saving: bool = False  # checkpoints during the run
    jitter: float = 0.02  # standard deviation of a GPU's step time, relative
    overlap: float = 0.8  # share of the time that communication could hide behind that it does
    read_rate: float = 1e9  # bytes/s of training data that a node can read

    @property
    def width(self) -> int:
        """Bytes of an activation, and of a frozen weight."""
        return 2 if self.mixed else 4

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.batch * self.seq_len

    @property
    def trained(self) -> int:
        m = self.model
        return m.lora(self.lora_r, self.lora_targets) if self.lora_r else m.parameters


# ------------------------------------------------------------------------------------------
# Memory
# ------------------------------------------------------------------------------------------

# What each way of data parallelism divides over the ranks that share a model.
DIVIDED = {
    "ddp": (),
    "zero1": ("optimizer",),  # ZeroRedundancyOptimizer
    "zero2": ("weights", "gradients", "optimizer"),  # fully_shard(reshard_after_forward=False)
    "fsdp": ("weights", "gradients", "optimizer"),  # fully_shard
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a run is divided: `data` replicas or shards × `tensor` × `pipeline` ranks."""

    kind: str
    data: int
    shard: int = 1  # ranks that share one copy of what `kind` divides; the rest are replicas
    tensor: int = 1
    pipeline: int = 1
    checkpointing: bool = False

    @property
    def gpus(self) -> int:
        return self.data * self.tensor * self.pipeline

    @property
    def name(self) -> str:
        hybrid = self.kind == "fsdp" and 1 < self.shard < self.data
        parts = [f"pipeline {self.pipeline}"] if self.pipeline > 1 else []
        parts += [f"tensor {self.tensor}"] if self.tensor > 1 else []
        if self.data > 1 or not parts:
            parts.append(("hsdp" if hybrid else self.kind) + f" {self.data}")
        return " × ".join(parts) + (" + checkpointing" if self.checkpointing else "")


def state_bytes(parameters: int, trained: int, run: Run, layout: Layout) -> dict[str, int]:
    """What a rank holds between two steps, of `parameters` of which `trained` are trained.

    Trained weights, their gradients and AdamW's two means are fp32: 4 + 4 + 8 bytes (Rajbhandari
    et al. 2020, ZeRO, section 3.1 has the same 16 in another order). Frozen weights have the
    precision of the matrix products. FSDP divides the first dimension; a remainder is padding.
    """
    divided = DIVIDED[layout.kind]

    def share(count: int, what: str) -> int:
        return math.ceil(count / layout.shard) if what in divided else count

    frozen = parameters if run.lora_r else 0
    return {
        "weights": 4 * share(trained, "weights") + run.width * share(frozen, "weights"),
        "gradients": 4 * share(trained, "gradients"),
        "optimizer": 8 * share(trained, "optimizer"),
    }


def copies_bytes(parameters: int, run: Run, layout: Layout) -> int:
    """Weights that exist a second time during a step, and buffers of the communication.

    ddp, zero1: autocast keeps a 16-bit copy of all trained weights until the backward pass; DDP's
    buckets are the gradients themselves (gradient_as_bucket_view). zero2 keeps all of them gathered
    from forward to backward. fsdp gathers layer by layer: two of them (one computes, the next
    arrives), embedding and head throughout, and one layer's whole gradient before it is scattered
    (Zhao et al. 2023, PyTorch FSDP, sections 3.2 and 3.3).
    """
    if layout.kind in ("ddp", "zero1") or layout.shard == 1:
        return 2 * parameters if run.mixed and not run.lora_r else 0
    if layout.kind == "zero2":
        return run.width * parameters
    m = run.model
    layer = (m.matrices + m.norms) // layout.tensor
    outside = parameters - layer * (m.layers // layout.pipeline)
    return run.width * (2 * layer + outside) + (0 if run.lora_r else 4 * layer)


def activation_bytes(run: Run, layout: Layout, stage: int = 0) -> tuple[int, int]:
    """(kept for the backward pass by the layers, needed around the loss), in bytes.

    Values a token and layer, attention without its score matrix (Dao et al. 2022): 4 · width for
    the inputs of the two norms and what they return, 2 · width + 2 · key-value width for q, k, v
    and the attention's output, and the feed-forward's 2 or (gated) 4 · ffn. For a plain Transformer
    of 16-bit values that is 32 bytes · width, the 34 of Korthikanti et al. 2022 (equation 1) less
    their dropout masks. Tensor ranks divide all but the first term (their equation 2). With
    checkpointing a layer keeps its input, and one layer has everything. A pipeline stage (1F1B)
    keeps as many micro-batches as there are stages from it to the end (Narayanan et al. 2021).

    Around the loss: the last norm's input and output, and three fp32 values a logit at once: the
    log-softmax, its gradient, and the logits' gradient.
    """
    m, tokens = run.model, run.tokens
    if run.lora_r:
        return lora_activation_bytes(run, layout)
    feed = (4 if m.gated else 2) * m.ffn
    layer = 4 * m.width + (2 * m.width + 2 * m.kv_width + feed) / layout.tensor
    if run.dropout:  # masks, and the attention's scores, which the fused kernel would not keep
        layer += (6 * m.width + 3 * m.heads * run.seq_len) / layout.tensor
    layers = m.stage_layers(layout.pipeline, stage)
    kept = layers * m.width + layer if layout.checkpointing else layers * layer
    in_flight = min(layout.pipeline - stage, run.accum)
    loss = 0
    if stage == layout.pipeline - 1:
        loss = run.width * 2 * m.width + 4 * 3 * m.vocab // layout.tensor
    return math.ceil(run.width * tokens * kept * in_flight), tokens * loss


def lora_activation_bytes(run: Run, layout: Layout) -> tuple[int, int]:
    """The same for LoRA as the reference trains it, whose loss never holds all logits.

    The figures are those of its `qwen_bytes`, counted in transformers' Qwen2 layer with adapters on
    two projections.
    """
    m = run.model
    layer = 8 * m.width + 2 * m.kv_width + 2 * m.ffn
    kept = m.layers * layer
    if layout.checkpointing:
        kept = m.layers * m.width + (m.layers // 6 + 1) * layer + 4 * m.ffn
    head = 4 if run.width == 4 else 2 + 4 + 2  # fp32, and between two products of 16 bits
    return run.width * run.tokens * kept, head * 256 * m.vocab


def on_the_host(run: Run, kept: int) -> tuple[int, int]:
    """(lost between blocks of the heap, a copy of the state for checkpoints) in CPU training.

    As in the reference's `training_bytes`: the C library's heap loses about 0.3 of what is kept
    between its blocks (measured with glibc 2.36: 0.24 to 0.39).
    """
    if run.machine.name != "cpu":
        return 0, 0
    return 3 * kept // 10, 12 * run.trained if run.saving else 0


def memory(run: Run, layout: Layout) -> dict[str, int]:
    """Peak bytes on the fullest rank, by what holds them; `total` is their sum.

    One process without accumulation never has all gradients and all activations at once: the
    backward pass frees the one while it makes the other. `reused` takes that off.
    """
    fullest: dict[str, int] = {"total": -1}
    for stage in range(layout.pipeline):
        own = run.model.part(layout.tensor, layout.pipeline, stage)
        trained = run.trained if run.lora_r else own
        parts = state_bytes(own, trained, run, layout)
        parts["copies"] = copies_bytes(own, run, layout)
        parts["activations"], parts["loss"] = activation_bytes(run, layout, stage)
        kept = parts["activations"] + (0 if run.lora_r else parts["loss"])
        alone = layout.gpus == 1 and run.accum == 1
        parts["reused"] = -min(parts["gradients"], kept) if alone else 0
        parts["heap"], parts["saving"] = on_the_host(run, kept)
        parts["total"] = sum(parts.values())
        fullest = max(fullest, parts, key=lambda parts: parts["total"])
    return fullest


def largest_batch(run: Run, layout: Layout, limit: int = 1 << 16) -> int:
    """The largest micro-batch, in sequences, that fits a GPU; 0 if not even one does."""

    def fits(batch: int) -> bool:
        return memory(dataclasses.replace(run, batch=batch), layout)["total"] <= run.machine.memory

    low, high = 0, 1
    while high <= limit and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return min(low, limit)


# ------------------------------------------------------------------------------------------
# Time of a step
# ------------------------------------------------------------------------------------------


def flops_per_token(run: Run, recompute: bool = False) -> float:
    """FLOPs of forward and backward for one token.

    6 per parameter in a matrix product: 2 forward, 4 backward (Kaplan et al. 2020, section 2.1); an
    embedding is looked up, not multiplied, unless it is the head as well. Attention adds
    12 · layers · width · seq_len (Chowdhery et al. 2022, PaLM, appendix B), half of it because a
    causal mask needs half of the scores. Frozen weights (LoRA) need no gradient: 4 of the 6.
    Checkpointing computes the forward pass twice: 2 more.
    """
    m = run.model
    products = m.layers * m.matrices + m.vocab * m.width
    attention = m.layers * m.width * run.seq_len  # scores and mixing, 2 each, half of them masked
    forward = 2 * products + 2 * attention
    backward = (2 if run.lora_r else 4) * products + 4 * attention
    if run.lora_r:
        forward, backward = forward + 2 * run.trained, backward + 4 * run.trained
    return forward * (2 if recompute else 1) + backward


def gather_seconds(
    size: float, ranks: int, machine: Machine, stride: int = 1, calls: int = 1
) -> float:
    """Seconds until each of `ranks` holds all `size` bytes, of which it had its share.

    A reduce-scatter takes as long, an all-reduce is one of each. `stride` is the distance between
    neighbours of the group, in ranks; groups that work at the same time share their nodes' cards.
    The better of two ways: one ring through all ranks, where each sends (n−1)/n of the bytes over
    the slowest link (Patarasuk and Yuan 2009); or a ring in each node and recursive doubling
    between nodes, log2(nodes) hops (Thakur et al. 2005). `calls`: into how many messages the bytes
    are divided; each pays the latency.
    """
    if ranks == 1:
        return 0.0
    inside = max(1, min(ranks, machine.gpus_per_node // stride))
    nodes = math.ceil(ranks / inside)
    in_node = (inside - 1) / inside * size / machine.link
    hops = calls * NODE_LATENCY * (inside - 1)
    if nodes == 1:
        return in_node + hops
    rate = machine.node_rate / min(stride, machine.gpus_per_node)  # this group's part of the cards
    ring = (ranks - 1) / ranks * size / min(machine.link, rate)
    ring += calls * (ranks - 1) * machine.latency
    between = (nodes - 1) / nodes * size / rate + calls * math.log2(nodes) * machine.latency
    return min(ring, in_node + hops + between)


def expected_slowest(count: int) -> float:
    """Expected largest of `count` standard normal values (Blom 1958)."""
    return statistics.NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def data_parallel_seconds(run: Run, layout: Layout, compute: float) -> tuple[float, float]:
    """(all, exposed) seconds of the communication among data-parallel ranks, in an update.

    `compute` is that of one micro-batch. DDP all-reduces gradients during the backward pass, two
    thirds of it, of the last micro-batch. ZeRO-1 sends the updated weights as well. FSDP gathers
    weights for forward and backward (zero2: once for both) and scatters gradients in every
    micro-batch; in a hybrid the replicas then all-reduce their shards. At least one piece, a bucket
    or a layer, stays exposed.
    """
    m, machine, stride = run.model, run.machine, layout.tensor
    own = m.part(layout.tensor, layout.pipeline)
    trained = run.trained if run.lora_r else own
    layers = max(1, m.layers // layout.pipeline)
    buckets = math.ceil(4 * trained / 25e6)  # DDP's default size

    def exposed(seconds: float, window: float, pieces: int) -> float:
        return max(seconds - run.overlap * window, seconds / pieces)

    sends = run.width * (own if not run.lora_r else own + trained)
    gradients = gather_seconds(4 * trained, layout.data, machine, stride, buckets)
    if layout.kind in ("ddp", "zero1"):
        total, after = 2 * gradients, gradients if layout.kind == "zero1" else 0.0
        return total + after, exposed(total, compute * 2 / 3, buckets) + after
    gather = gather_seconds(sends, layout.shard, machine, stride, layers)
    scatter = gather_seconds(4 * trained, layout.shard, machine, stride, layers)
    once = (1 if layout.kind == "zero2" else 2) * gather + scatter
    total, hidden = run.accum * once, run.accum * exposed(once, compute, layers)
    replicas = layout.data // layout.shard
    across = 2 * gather_seconds(
        4 * trained / layout.shard, replicas, machine, stride * layout.shard, layers
    )
    return total + across, hidden + exposed(across, compute * 2 / 3, layers) if across else hidden


def step_seconds(run: Run, layout: Layout) -> dict[str, float]:
    """Seconds of an update, by cause; `total` is their sum. `communication` includes the hidden.

    Ranks wait for the slowest: with relative deviation σ of a rank's time, n of them take
    1 + σ · E[largest of n] as long. A pipeline of p stages idles (p − 1) / m of the time with m
    micro-batches (Huang et al. 2019, GPipe, section 2.3). Tensor ranks all-reduce the activations
    twice in a layer's forward and twice in its backward pass (Shoeybi et al. 2019), in the open.
    """
    m, machine, t, p = run.model, run.machine, layout.tensor, layout.pipeline
    flops = flops_per_token(run, layout.checkpointing) * run.tokens / (t * p)
    compute = flops / (machine.peak * machine.share)  # of a micro-batch
    total, exposed = data_parallel_seconds(run, layout, compute)
    hidden_size = run.tokens * m.width * run.width
    calls = math.ceil(m.layers / p) * (6 if layout.checkpointing else 4)
    tensor = 2 * run.accum * gather_seconds(calls * hidden_size, t, machine, calls=calls)
    rate = min(machine.link, machine.node_rate / machine.gpus_per_node)
    pipeline = run.accum * 2 * hidden_size / rate / t if p > 1 else 0.0
    work = run.accum * compute
    parts = {
        "compute": work,
        "waiting for the slowest": work * run.jitter * expected_slowest(layout.gpus),
        "data-parallel communication": exposed,
        "tensor communication": tensor,
        "pipeline communication": pipeline,
        "pipeline bubble": compute * (p - 1),
    }
    read = layout.data / machine.nodes * run.accum * run.tokens * 4 / run.read_rate
    parts["input"] = max(0.0, read - sum(parts.values()))  # prefetched: only what is slower shows
    parts["total"] = sum(parts.values())
    parts["communication"] = total + tensor + pipeline
    return parts


# ------------------------------------------------------------------------------------------
# Scaling, stragglers, failures
# ------------------------------------------------------------------------------------------


def resized(layout: Layout, gpus: int) -> Layout:
    """The same way of dividing on another number of GPUs."""
    data = max(1, gpus // (layout.tensor * layout.pipeline))
    whole = layout.shard == layout.data
    shard = data if whole else min(layout.shard, data)
    return dataclasses.replace(layout, data=data, shard=shard)


def efficiency(run: Run, layout: Layout, gpus: int, strong: bool = False) -> float:
    """Tokens a second and GPU, as a share of what computing alone would give.

    Weak scaling keeps the batch of a GPU; strong scaling keeps the global one, so that each GPU has
    less to do between two exchanges; 0 if there are more ranks than sequences.
    """
    there = resized(layout, gpus)
    if strong:
        sequences = run.batch * run.accum * layout.data // there.data
        if not sequences:
            return 0.0
        batch = min(run.batch, sequences)
        run = dataclasses.replace(run, batch=batch, accum=max(1, round(sequences / batch)))
    parts = step_seconds(dataclasses.replace(run, machine=run.machine.of_size(gpus)), there)
    return parts["compute"] / parts["total"]


def fit_link(
    run: Run, layout: Layout, first: tuple[int, float], second: tuple[int, float]
) -> dict[str, float]:
    """Which link between nodes gives these two (GPUs, efficiency), weak scaling.

    Two figures fix two unknowns: the rate of a node and how much of the time hides communication.
    For each overlap the rate follows from the first figure (bisection); the overlap that comes
    nearest to the second is taken.
    """

    def at(rate: float, overlap: float, gpus: int) -> float:
        machine = dataclasses.replace(run.machine, node_rate=rate)
        return efficiency(dataclasses.replace(run, machine=machine, overlap=overlap), layout, gpus)

    best: dict[str, float] = {}
    for percent in range(101):
        overlap, low, high = percent / 100, 1e6, 1e13
        for _ in range(60):
            middle = math.sqrt(low * high)
            low, high = (
                (low, middle) if at(middle, overlap, first[0]) > first[1] else (middle, high)
            )
        found = {"overlap": overlap, "node_rate": high}
        found["first"], found["second"] = (at(high, overlap, n) for n, _ in (first, second))
        found["miss"] = abs(found["first"] - first[1]) + abs(found["second"] - second[1])
        best = found if not best or found["miss"] < best["miss"] else best
    return best


def simulate_stragglers(gpus: int, jitter: float, slow_share: float, slow_by: float) -> float:
    """Mean step time with stragglers, as a multiple of the step of an undisturbed GPU.

    Each step takes as long as its slowest rank: the largest of n normal values, drawn at once as
    the quantile of U^(1/n). Besides, each GPU is for a while (100 steps) slow by `slow_by`, with
    probability `slow_share`: a hot card, a bad link, a busy host.
    """
    chance, normal = random.Random(0), statistics.NormalDist()
    total, slow, steps = 0.0, 0, 2000
    for step in range(steps):
        if step % 100 == 0:
            slow = sum(chance.random() < slow_share for _ in range(gpus))
        slowest = jitter * largest_normal(gpus - slow, chance, normal)
        if slow:
            slowest = max(slowest, slow_by + jitter * largest_normal(slow, chance, normal))
        total += 1 + slowest
    return total / steps


def largest_normal(count: int, chance: random.Random, normal: statistics.NormalDist) -> float:
    """One draw of the largest of `count` standard normal values."""
    if count < 1:
        return -math.inf
    return normal.inv_cdf(min(max(chance.random(), 1e-12) ** (1 / count), 1 - 1e-15))


def simulate_failures(
    work: float, between: float, interval: float, blocking: float, restart: float
) -> dict[str, float]:
    """A run of `work` seconds with a failure every `between` seconds on average, all synchronous.

    Any failure stops all ranks; they go on `restart` seconds later from the last checkpoint, and a
    checkpoint stops the work for `blocking` seconds after every `interval` of it. Returns means
    over 20 runs: wall seconds, failures, lost seconds, and the share of useful time.
    """
    chance, repeats = random.Random(0), 20
    wall = failures = lost = done = 0.0
    for _ in range(repeats):
        left = work
        for _ in range(10_000):  # failures; who has more will not end
            until_failure = chance.expovariate(1 / between)
            to_the_end = left + blocking * (left // interval)
            if to_the_end <= until_failure:
                wall, left = wall + to_the_end, 0.0
                break
            saved = until_failure // (interval + blocking)
            left -= saved * interval
            failures, lost = failures + 1, lost + until_failure - saved * (interval + blocking)
            wall += until_failure + restart
        done += work - left
    return {
        "wall": wall / repeats, "failures": failures / repeats, "lost": lost / repeats,
        "useful": done / wall,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------
# Checkpoints
# ------------------------------------------------------------------------------------------


def young(blocking: float, between: float) -> float:
    """Seconds between checkpoints after Young 1974: √(2 · cost · mean time between failures)."""
    return math.sqrt(2 * blocking * between)


def daly(blocking: float, between: float) -> float:
    """The same after Daly 2006, equation 37: higher order, for costs that are not small."""
    if blocking >= 2 * between:
        return between
    ratio = blocking / (2 * between)
    return young(blocking, between) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - blocking


def useful_share(interval: float, blocking: float, between: float, restart: float) -> float:
    """Share of the wall time that is training, failures and checkpoints included.

    Daly 2006, equation 20, whose wall time is M · e^(R/M) · (e^((τ+δ)/M) − 1) · work / τ.
    """
    if (interval + blocking + restart) / between > 700:  # beyond what a float holds
        return 0.0
    growth = math.expm1((interval + blocking) / between)
    return interval / (between * math.exp(restart / between) * growth)


def checkpoints(run: Run, layout: Layout, step: float, args: argparse.Namespace) -> dict[str, Any]:
    """Sizes by kind in bytes, seconds to write, intervals and losses; `step` is an update's time.

    Blocking, the ranks wait for the write; in the background, for a copy to their hosts' memory.
    """
    machine, trained = run.machine, run.trained
    sizes = {
        "weights, 16 bit": 2 * run.model.parameters,
        "weights, fp32": 4 * run.model.parameters,
        "to resume (weights and AdamW, fp32)": 12 * trained,
    }
    if run.lora_r:
        sizes = {"adapter": 4 * trained, "to resume (adapter and AdamW, fp32)": 12 * trained}
    full = 12 * trained
    write = full / args.storage
    snapshot = full / layout.gpus / args.snapshot  # every rank copies its part to host memory
    between = args.mtbf * 3600 / machine.gpus
    ways = {}
    for name, blocking, least in (("blocking", write, 0.0), ("background", snapshot, write)):
        interval = max(daly(blocking, between), least)
        ways[name] = {
            "blocking_seconds": blocking,
            "young_seconds": young(blocking, between),
            "daly_seconds": daly(blocking, between),
            "interval_seconds": interval,  # never shorter than the write it must wait for
            "interval_updates": max(1, round(interval / step)),
            "loss_per_failure_seconds": interval / 2 + args.restart,
            "useful_share": useful_share(interval, blocking, between, args.restart),
        }
    return {
        "sizes": sizes, "write_seconds": write, "between_failures_seconds": between, "ways": ways,
        "kept": args.keep, "stored_bytes": (args.keep + 1) * full,  # and the best one
    }  # fmt: skip


# ------------------------------------------------------------------------------------------
# The choice
# ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A layout with the batch that suits it, and what comes of it."""

    layout: Layout
    run: Run
    memory: dict[str, int]
    step: dict[str, float]

    @property
    def fits(self) -> bool:
        return self.memory["total"] <= self.run.machine.memory

    @property
    def update_tokens(self) -> int:
        return self.run.tokens * self.run.accum * self.layout.data

    @property
    def tokens_per_second(self) -> float:
        return self.update_tokens / self.step["total"]


def layouts(run: Run, args: argparse.Namespace) -> list[Layout]:
    """The sensible ways, simplest first; or those that the flags leave.

    Tensor ranks stay inside a node, whose links are fast; pipeline stages lie across nodes. LoRA
    has little to exchange and nothing to divide but the frozen weights.
    """
    m, gpus, in_node = run.model, run.machine.gpus, run.machine.gpus_per_node
    widest = max(t for t in (1, 2, 4, 8) if not (in_node % t or m.heads % t or m.kv_heads % t))
    deepest = max(p for p in (1, 2, 4, 8, 16) if not run.machine.nodes % p and p <= m.layers)
    tensors = [args.tensor] if args.tensor else [1] if run.lora_r else sorted({1, widest})
    pipelines = [args.pipeline] if args.pipeline else [1] if run.lora_r else sorted({1, deepest})
    recompute = [True] if args.gradient_checkpointing else [False] if args.exact else [False, True]
    found = []
    for p, t in itertools.product(pipelines, tensors):
        if in_node % t or gpus % (t * p) or p > m.layers:
            continue
        data = gpus // (t * p)
        kinds = {"ddp": 1, "zero1": data, "fsdp": data, "zero2": data, "hsdp": in_node}
        if data < gpus or run.lora_r:
            kinds = {"ddp": 1, "fsdp": data}
        for kind, shard in kinds.items():
            wanted = args.strategy in ("auto", kind) if data > 1 else kind == "ddp"
            if wanted and (kind != "hsdp" or 1 < in_node < gpus):
                kind = "fsdp" if kind == "hsdp" else kind
                found += [Layout(kind, data, shard, t, p, again) for again in recompute]
    if not found:
        raise PlanError(
            f"no way to divide {gpus} GPUs ({run.machine.nodes} × {in_node}) for --strategy "
            f"{args.strategy} --tensor {args.tensor or 'any'} --pipeline {args.pipeline or 'any'}; "
            "tensor ranks stay inside a node, and tensor × pipeline must divide the GPUs"
        )
    return found


def assess(run: Run, layout: Layout, args: argparse.Namespace) -> Candidate:
    """The layout with its largest micro-batch, and as many of them as the global batch asks for."""
    update = min(args.global_batch, args.tokens or math.inf)
    sequences = update / run.seq_len / layout.data  # of a rank
    batch = args.batch_size
    if not batch:  # a pipeline of p stages wants 4 · p micro-batches, or it idles too long
        limit = max(1, int(sequences / (4 * layout.pipeline if layout.pipeline > 1 else 1)))
        several = dataclasses.replace(run, accum=4 * layout.pipeline)
        batch = 1 << max(0, largest_batch(several, layout, limit).bit_length() - 1)
    accum = args.grad_accum or max(1, round(sequences / batch))
    run = dataclasses.replace(run, batch=batch, accum=accum)
    return Candidate(layout, run, memory(run, layout), step_seconds(run, layout))


def choose(run: Run, args: argparse.Namespace) -> tuple[Candidate, list[Candidate]]:
    """The fastest that fits, and all that were looked at. A simpler one may be 2 % slower."""
    seen = [assess(run, layout, args) for layout in layouts(run, args)]
    best: Candidate | None = None
    for one in seen:
        faster = best is None or one.tokens_per_second > 1.02 * best.tokens_per_second
        best = one if one.fits and faster else best
    if best is None:
        leanest = min(seen, key=lambda one: one.memory["total"])
        raise PlanError(
            f"nothing fits: the leanest, {leanest.layout.name}, needs "
            f"{gb(leanest.memory['total'])} a GPU at {leanest.run.batch} × {run.seq_len} tokens, "
            f"and {run.machine.name} has {gb(run.machine.memory)}; add --nodes, take a larger "
            "--gpu, or lower --seq-len or --batch-size"
        )
    return best, seen


def reasons_for(best: Candidate) -> list[str]:
    """Why this one, in plain sentences."""
    run, layout, parts = best.run, best.layout, best.memory
    states = parts["weights"] + parts["gradients"] + parts["optimizer"]
    reasons = []
    if run.lora_r:
        reasons.append(
            f"LoRA trains {run.trained:,} parameters beside {run.model.parameters:,} frozen ones, "
            f"which need {run.width} bytes each, no gradient and no optimizer state."
        )
    if layout.kind == "ddp" and layout.tensor * layout.pipeline == 1:
        reasons.append(
            f"A whole replica fits: weights, gradients and AdamW's states are {gb(states)}, so "
            "nothing has to be divided but the data."
        )
    else:
        reasons.append(
            f"A replica's states alone are {gb(16 * run.trained)} (16 bytes a parameter), a GPU "
            f"has {gb(run.machine.memory)}; {layout.name} leaves {gb(states)} of them on each."
        )
    if layout.checkpointing:
        reasons.append(
            "Checkpointing computes the forward pass twice, a third more work, and leaves room for "
            f"micro-batches of {run.batch} × {run.seq_len} tokens."
        )
    if layout.data > 1:
        exposed = best.step["data-parallel communication"] / best.step["total"]
        reasons.append(
            f"Ranks exchange for {span(best.step['communication'])} an update, and {exposed:.1%} "
            "of the step is not hidden behind computing."
        )
    return reasons


def rejected(best: Candidate, seen: Sequence[Candidate]) -> list[str]:
    """The alternatives and why not, with and without checkpointing as one."""
    ways: dict[Layout, list[Candidate]] = {}
    for one in seen:
        ways.setdefault(dataclasses.replace(one.layout, checkpointing=False), []).append(one)
    lines = []
    for layout, same in ways.items():
        fitting = [one for one in same if one.fits]
        if best in same:
            continue
        if not fitting:
            least = gb(min(one.memory["total"] for one in same))
            lines.append(f"{layout.name}: needs {least} a GPU at its smallest.")
            continue
        one = max(fitting, key=lambda one: one.tokens_per_second)
        work = ("compute", "total", "communication")
        cause = max((name for name in one.step if name not in work), key=one.step.__getitem__)
        slower = 1 - one.tokens_per_second / best.tokens_per_second
        speed = f"{slower:.0%} slower" if slower > 0.005 else "no faster, and more to set up"
        reason = f"{cause} takes {one.step[cause] / one.step['total']:.0%} of its step"
        if one.layout.checkpointing and not best.layout.checkpointing:
            reason = "it fits only if layers are computed twice"
        lines.append(f"{one.layout.name}: {speed}; {reason}.")
    return lines


def launch_lines(best: Candidate) -> list[str]:
    """Commands that start the run: the reference, where it is the program, else what to write."""
    run, layout, machine = best.run, best.layout, best.run.machine
    start = "python"
    if machine.gpus > 1:
        start += f" -m torch.distributed.run --nproc_per_node={machine.gpus_per_node} " + (
            "--standalone" if machine.nodes == 1 else f"--nnodes={machine.nodes} "
            "--rdzv-backend=c10d --rdzv-endpoint=HOST:29500 --rdzv-id=job1"
        )  # fmt: skip
    if layout.kind == "ddp" and (run.lora_r or run.model.name == "tiny"):
        return [f"{start} llm_ddp_parallel_training.py {reference_flags(best)}"]
    return [
        f"{start} your_training.py" + ("   # on every node" if machine.nodes > 1 else ""),
        f"# in it, {counted(run.accum, 'micro-batch')} of {run.batch} × {run.seq_len} an update; "
        + engine_calls(layout),
        f"python -m labs.strategies {practice(layout)} --cpu   # the same on a laptop",
    ]


def reference_flags(best: Candidate) -> str:
    """The run in the flags of llm_ddp_parallel_training.py."""
    run, m = best.run, best.run.model
    flags = ["--model qwen" if run.lora_r else "--model tiny"]
    flags += ["--cpu"] if run.machine.name == "cpu" else []
    if run.lora_r:
        flags += [] if m.name == "qwen2.5-0.5b" else ["--base-model FOLDER"]
        flags += [f"--lora-r {run.lora_r} --lora-targets {','.join(run.lora_targets)}"]
        flags += ["--gradient-checkpointing"] if best.layout.checkpointing else []
    else:
        flags += [f"--d-model {m.width} --layers {m.layers} --heads {m.heads}"]
    flags += [f"--batch-size {run.batch} --grad-accum {run.accum} --seq-len {run.seq_len}"]
    return " ".join(flags)


def engine_calls(layout: Layout) -> str:
    """What a training script has to call of PyTorch for this layout."""
    calls = {
        "ddp": "DistributedDataParallel(model, gradient_as_bucket_view=True)",
        "zero1": "DistributedDataParallel(model), ZeroRedundancyOptimizer(..., AdamW)",
        "zero2": "fully_shard(layer, reshard_after_forward=False) for each layer and the model",
        "fsdp": "fully_shard(layer) for each layer, then fully_shard(model)",
    }[layout.kind]
    if layout.gpus == 1:
        calls = "the model as it is, one process"
    if 1 < layout.shard < layout.data:
        calls += f" on a mesh of {layout.data // layout.shard} × {layout.shard}"
    if layout.tensor > 1:
        calls = f"parallelize_module over {layout.tensor}, then {calls}"
    if layout.pipeline > 1:
        calls = f"{layout.pipeline} pipeline stages (1F1B), and in each {calls}"
    return calls + ("; checkpoint each layer" if layout.checkpointing else "")


def practice(layout: Layout) -> str:
    """The flags of `labs.strategies` that come nearest."""
    if layout.pipeline > 1:
        return "--strategy pipeline --ranks 2"
    if layout.kind == "ddp":
        return f"--strategy {'tensor' if layout.tensor > 1 else 'ddp'} --ranks 2"
    return "--strategy fsdp+tensor --ranks 4" if layout.tensor > 1 else "--strategy fsdp --ranks 2"


def make_plan(args: argparse.Namespace) -> dict[str, Any]:
    """Everything that is printed, as plain types."""
    best, seen = choose(read_run(args), args)
    run, layout, machine, m = best.run, best.layout, best.run.machine, best.run.model
    same = [one.layout for one in seen if one.layout.checkpointing == layout.checkpointing]
    useful = flops_per_token(run) * best.tokens_per_second / machine.gpus
    plan: dict[str, Any] = {
        "model": {**dataclasses.asdict(m), "parameters": m.parameters, "trained": run.trained},
        "machine": {**dataclasses.asdict(machine), "gpus": machine.gpus},
        "layout": {**dataclasses.asdict(layout), "name": layout.name},
        "batch": {
            "sequences": run.batch, "seq_len": run.seq_len, "accumulation": run.accum,
            "update_sequences": run.batch * run.accum * layout.data,
            "update_tokens": best.update_tokens, "largest": largest_batch(run, layout),
        },
        "memory": best.memory,
        "memory_by_layout": {one.name: memory(run, one) for one in same},
        # What DDP all-reduces in an update: fp32, every trained parameter once.
        "gradient_bytes": 4 * run.trained if machine.gpus > 1 else 0,
        "flops_per_token": flops_per_token(run),
        "step": best.step,
        "tokens_per_second": best.tokens_per_second,
        "share_of_peak": useful / machine.peak,  # of the whole step; recomputing does not count
        "checkpoints": checkpoints(run, layout, best.step["total"], args),
        "reasons": reasons_for(best), "rejected": rejected(best, seen),
        "launch": launch_lines(best),
    }  # fmt: skip
    if args.tokens or args.data:
        plan |= data_and_time(best, args)
    if machine.name != "cpu":
        plan["scaling"] = scaling(run, layout)
        plan["faults"] = [faults(run, layout, gpus, args) for gpus in (1024, 4096, 16384)]
    return plan


def data_and_time(best: Candidate, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """How the data is divided, and how long all of it takes.

    Tensor and pipeline ranks of a replica read the same; a node reads for the replicas on it.
    """
    tokens = args.tokens or args.data / args.bytes_per_token
    gpus, replicas = best.run.machine.gpus, best.layout.data
    readers = min(replicas, max(1, best.run.machine.gpus_per_node // best.layout.tensor))
    rank_bytes = tokens * args.bytes_per_token / replicas
    rate = best.tokens_per_second * args.bytes_per_token / replicas
    seconds = tokens * args.epochs / best.tokens_per_second
    hours = gpus * seconds / 3600
    return {
        "data": {
            "bytes": tokens * args.bytes_per_token, "bytes_per_token": args.bytes_per_token,
            "tokens": tokens, "epochs": args.epochs, "replicas": replicas,
            "rank_bytes": rank_bytes, "node_bytes": rank_bytes * readers,
            "rank_bytes_per_second": rate, "node_bytes_per_second": rate * readers,
            "tokens_per_parameter": tokens * args.epochs / best.run.model.parameters,
        },
        "time": {
            "updates": math.ceil(tokens * args.epochs / best.update_tokens), "seconds": seconds,
            "days": seconds / 86400, "gpu_hours": hours,
            "cost": hours * args.price if args.price else None,
        },
    }  # fmt: skip


def scaling(run: Run, layout: Layout) -> dict[str, Any]:
    """Efficiency by number of GPUs, by network, and the link that makes 90 % at 16 and 75 % at 128.

    The last two are for plain DDP that exchanges the gradients of an update at once.
    """
    ddp = Layout("ddp", run.machine.gpus)
    whole = dataclasses.replace(run, batch=run.batch * run.accum, accum=1)
    sizes = sorted({1, 8, 16, 32, 128, 1024, 4096, layout.gpus})
    networks, rates = {}, {}
    for name in NETWORKS:
        there = dataclasses.replace(whole, machine=on_network(run.machine, name))
        networks[name] = [efficiency(there, ddp, n) for n in (16, 128)]
        rates[name] = there.machine.node_rate
    fit = fit_link(whole, ddp, (16, 0.90), (128, 0.75))
    nearest = min(rates, key=lambda name: abs(math.log(rates[name] / fit["node_rate"])))
    return {
        "gpus": [
            {"gpus": n, "weak": efficiency(run, layout, n),
             "strong": efficiency(run, layout, n, strong=True)}
            for n in sizes if n >= layout.tensor * layout.pipeline
        ],
        "ddp_by_network": networks,
        "fit_90_at_16_75_at_128": {**fit, "nearest": nearest},
    }  # fmt: skip


def faults(run: Run, layout: Layout, gpus: int, args: argparse.Namespace) -> dict[str, float]:
    """Stragglers and failures in ten days of this run on `gpus` GPUs, simulated.

    Checkpoints are written in the background, as often as `checkpoints` says.
    """
    there = dataclasses.replace(run, machine=run.machine.of_size(gpus))
    saved = checkpoints(there, resized(layout, gpus), 1.0, args)
    way, between = saved["ways"]["background"], saved["between_failures_seconds"]
    seen = simulate_failures(
        10 * 86400.0, between, way["interval_seconds"], way["blocking_seconds"], args.restart
    )
    return {
        "gpus": gpus, "failures_per_day": 86400 / between,
        "interval_seconds": way["interval_seconds"],
        "slowdown": simulate_stragglers(gpus, args.jitter, args.slow_share, args.slow_by),
        "useful_share": seen["useful"], "lost_hours": seen["lost"] / 3600,
        "useful_share_formula": way["useful_share"],
    }  # fmt: skip


# ------------------------------------------------------------------------------------------
# Report and picture
# ------------------------------------------------------------------------------------------


def counted(number: int, noun: str) -> str:
    """'1 layer', '2 layers', '1,000 layers'."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{plural * (number != 1)}"


def gb(size: float) -> str:
    """Bytes in decimal units."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= scale:
            return f"{size / scale:,.1f} {unit}"
    return f"{size / 1e3:,.1f} KB"


def span(seconds: float) -> str:
    """Seconds in the largest unit that leaves a figure above 1."""
    for unit, scale in (("days", 86400), ("hours", 3600), ("min", 60), ("s", 1)):
        if seconds >= scale:
            return f"{seconds / scale:,.1f} {unit}"
    return f"{seconds * 1e3:.3g} ms"


def report(plan: dict[str, Any]) -> str:
    """The plan as text: what is asked, tables, and at the end what is recommended."""
    sections = [describe_run(plan), describe_memory(plan), describe_time(plan)]
    if "scaling" in plan:
        sections += [describe_scaling(plan["scaling"]), describe_faults(plan["faults"])]
    sections += [describe_checkpoints(plan), recommend(plan)]
    return "\n\n".join("\n".join(lines) for lines in sections)


def describe_run(plan: dict[str, Any]) -> list[str]:
    m, machine, batch = plan["model"], plan["machine"], plan["batch"]
    lora = "" if m["trained"] == m["parameters"] else f" and {m['trained']:,} trained in adapters"
    lines = [
        f"model      {m['name']}: {m['parameters']:,} parameters{lora}; "
        f"{counted(m['layers'], 'layer')}, {m['width']} wide, {counted(m['heads'], 'head')}, "
        f"vocabulary {m['vocab']:,}",
        f"machine    {machine['nodes']} × {machine['gpus_per_node']} {machine['name']}, "
        f"{machine['network']} between nodes",
        f"batch      per rank {batch['sequences']} × accumulation {batch['accumulation']} × ranks "
        f"{plan['layout']['data']} = {counted(batch['update_sequences'], 'sequence')} = "
        f"{batch['update_tokens']:,} tokens an update",
    ]
    if "data" in plan:
        d = plan["data"]
        lines += [
            f"data       {gb(d['bytes'])} at {d['bytes_per_token']:g} bytes a token = "
            f"{d['tokens'] / 1e9:.4g} billion tokens, epochs: {d['epochs']:g}",
            f"           an epoch: {gb(d['node_bytes'])} a node, {gb(d['rank_bytes'])} a "
            f"data-parallel rank, which reads {gb(d['rank_bytes_per_second'])}/s",
        ]
    return lines


def describe_memory(plan: dict[str, Any]) -> list[str]:
    rows, batch, has = plan["memory_by_layout"], plan["batch"], plan["machine"]["memory"]
    used = [part for part in plan["memory"] if any(one[part] for one in rows.values())]
    wide = max(map(len, rows)) + 2
    unit, scale = ("GB", 1e9) if plan["memory"]["total"] > 1e9 else ("MB", 1e6)
    lines = [
        f"memory of the fullest rank in {unit} at {batch['sequences']} × {batch['seq_len']} tokens",
        " " * wide + "".join(f"{name:>12}" for name in used),
    ]
    for name, one in rows.items():
        values = "".join(f"{one[part] / scale:>12.3f}" for part in used)
        lines.append(f"{name:{wide}}{values}" + ("" if one["total"] <= has else "  does not fit"))
    room = (
        ""
        if math.isinf(has)
        else f" of {gb(has)}; {counted(batch['largest'], 'sequence')} would fit"
    )
    return [*lines, f"{plan['layout']['name']}: {plan['memory']['total']:,} bytes{room}"]


def describe_time(plan: dict[str, Any]) -> list[str]:
    step, share = plan["step"], plan["machine"]["share"]
    lines = [
        f"an update takes {span(step['total'])}: {plan['tokens_per_second']:,.0f} tokens/s, "
        f"{plan['share_of_peak']:.1%} of the peak (kernels while they compute: {share:.0%})"
    ]
    for name, value in step.items():
        if name not in ("total", "communication") and value:
            lines.append(f"  {name:30}{span(value):>12}{value / step['total']:>9.1%}")
    if plan["gradient_bytes"]:
        plain = plan["layout"]["name"].startswith("ddp")
        what = "DDP all-reduces" if plain else "plain DDP would all-reduce"
        lines.append(f"  {what} {plan['gradient_bytes']:,} bytes of gradients an update")
    if "time" in plan:
        t = plan["time"]
        cost = f", cost {t['cost']:,.0f}" if t["cost"] else ""
        lines.append(
            f"all of it: {counted(t['updates'], 'update')}, {span(t['seconds'])}, "
            f"{t['gpu_hours']:,.0f} GPU-hours{cost}"
        )
    return lines


def describe_scaling(s: dict[str, Any]) -> list[str]:
    lines = [f"{'efficiency by number of GPUs':34}" + "".join(f"{r['gpus']:>8}" for r in s["gpus"])]
    for kind, what in (("weak", "same batch a GPU"), ("strong", "same global batch")):
        row = "".join(f"{one[kind]:>8.1%}" if one[kind] else f"{'–':>8}" for one in s["gpus"])
        lines.append(f"  {kind + ' scaling, ' + what:32}{row}")
    lines.append("plain DDP, if the model fitted, on 16 and 128 GPUs:")
    for name, (at_16, at_128) in s["ddp_by_network"].items():
        lines.append(f"  {name:32}{at_16:>8.1%}{at_128:>8.1%}")
    fit = s["fit_90_at_16_75_at_128"]
    text = "  90 % and 75 % come from" if fit["miss"] < 0.01 else "  nearest to 90 % and 75 % come"
    lines.append(
        f"{text} {gb(fit['node_rate'])}/s a node (compare {fit['nearest']}), {fit['overlap']:.0%} "
        f"of the possible overlap: {fit['first']:.1%}, {fit['second']:.1%}"
    )
    return lines


def describe_faults(rows: list[dict[str, Any]]) -> list[str]:
    titles = ("GPUs", "slowest rank", "failures/day", "saved every", "useful time", "(formula)")
    lines = ["stragglers and failures, simulated", "".join(f"{title:>14}" for title in titles)]
    for one in rows:
        every = span(one["interval_seconds"])
        lines.append(
            f"{one['gpus']:>14}{one['slowdown'] - 1:>14.1%}{one['failures_per_day']:>14.2f}"
            f"{every:>14}{one['useful_share']:>14.1%}{one['useful_share_formula']:>14.1%}"
        )
    return lines


def describe_checkpoints(plan: dict[str, Any]) -> list[str]:
    c = plan["checkpoints"]
    lines = [
        "checkpoints: " + ", ".join(f"{name} {gb(size)}" for name, size in c["sizes"].items()),
        f"  {c['kept']} kept and the best: {gb(c['stored_bytes'])}; a failure every "
        f"{span(c['between_failures_seconds'])}; a write takes {span(c['write_seconds'])}",
    ]
    for name, way in c["ways"].items():
        lines.append(
            f"  {name}: stops for {span(way['blocking_seconds'])} every "
            f"{span(way['interval_seconds'])} (Young {span(way['young_seconds'])}, Daly "
            f"{span(way['daly_seconds'])}), {counted(way['interval_updates'], 'update')}; "
            f"a failure costs {span(way['loss_per_failure_seconds'])}; "
            f"useful {way['useful_share']:.2%}"
        )
    return lines


def recommend(plan: dict[str, Any]) -> list[str]:
    lines = [f"recommended: {plan['layout']['name']}", *(f"  {line}" for line in plan["reasons"])]
    if "data" in plan and plan["model"]["trained"] == plan["model"]["parameters"]:
        per = plan["data"]["tokens_per_parameter"]
        verdict = "fewer than" if per < 18 else "about" if per < 25 else "more than"
        lines.append(
            f"  {per:.1f} tokens a parameter are {verdict} the 20 that balance size and data for a "
            "given compute (Hoffmann et al. 2022)."
        )
    way = plan["checkpoints"]["ways"]["background"]
    lines.append(
        f"  Save in the background every {counted(way['interval_updates'], 'update')} "
        f"({span(way['interval_seconds'])}); keep {plan['checkpoints']['kept']} and the best."
    )
    if plan["rejected"]:
        lines += ["not taken:", *(f"  {line}" for line in plan["rejected"])]
    return [*lines, "launch:", *(f"  {line}" for line in plan["launch"])]


def draw_memory(plan: dict[str, Any], path: Path) -> None:
    """Stacked bars of memory per layout, with the limit of the GPU; PNG, SVG or PDF by suffix."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PlanError("--picture needs matplotlib: pip install matplotlib") from None
    if path.is_dir() or not path.suffix:  # matplotlib would write to another name
        raise PlanError(f"--picture {str(path)!r}: give a file name that ends in .png")

    rows, batch, machine = plan["memory_by_layout"], plan["batch"], plan["machine"]
    figure = Figure(figsize=(10, 1.6 + 0.34 * len(rows)), layout="constrained")
    axes = figure.subplots()
    left = [0.0] * len(rows)
    for part in plan["memory"]:
        values = [one[part] / 1e9 for one in rows.values()]
        if part not in ("total", "reused") and any(values):
            axes.barh(list(rows), values, left=left, label=part)
            left = [a + b for a, b in zip(left, values)]
    if not math.isinf(machine["memory"]):
        label = f"{machine['name']}: {gb(machine['memory'])}"
        axes.axvline(machine["memory"] / 1e9, color="black", linestyle="--", label=label)
    axes.set_title(
        f"{plan['model']['name']} parameters on {machine['nodes']} × {machine['gpus_per_node']} "
        f"GPUs, micro-batches of {batch['sequences']} × {batch['seq_len']} tokens"
    )
    axes.set_xlabel("GB on the fullest rank")
    axes.invert_yaxis()
    axes.legend(loc="lower right")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise PlanError(f"--picture {path}: {error}") from None


# ------------------------------------------------------------------------------------------
# Command line
# ------------------------------------------------------------------------------------------

# The reference's flags that change neither memory nor time here: a command line can be pasted.
WITHOUT_EFFECT = (
    "--device --seed --threads --output-dir --resume --generate --corpus-file --builtin "
    "--corpus-format --val-fraction --overlong --num-workers --base-model --lora-alpha "
    "--lora-dropout --max-steps --lr --weight-decay --schedule --warmup-steps --clip --mirror "
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
    """The command line; a default of None depends on the model, see `read_run`."""
    parser = Parser(
        prog="python -m labs.planner", allow_abbrev=False, argument_default=None,
        description="Memory, time, scaling and checkpoints of a run, before it is paid for. "
        "Numbers may end in K, M, G, B or T, bytes in KB, MB, GB or TB.",
    )  # fmt: skip
    count, part, positive = number(int, 1), number(float, 0, 1), number(float, 1e-3)
    names = ("tiny", "qwen", *MODELS)
    ways = ("auto", "ddp", "zero1", "zero2", "fsdp", "hsdp")
    groups = {
        "model": (
            ("--model", names, None, "tiny, qwen: those of llm_ddp_parallel_training.py (tiny)"),
            ("--params", number(float, 1e5, 1e14), None, "of a Llama-like model: 13e9 or 13B"),
            ("--d-model", count, None, "width, as the next five instead of the model's own"),
            ("--layers", count, None, "layers"),
            ("--heads", count, None, "attention heads"),
            ("--kv-heads", count, None, "key-value heads"),
            ("--ffn", count, None, "feed-forward width"),
            ("--vocab", count, None, "vocabulary"),
            ("--seq-len", number(int, 2), None, "tokens (default: tiny 64, qwen 256, else 4096)"),
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
            ("--share", number(float, 1e-3, 1), None, "of it that kernels reach (default: 0.45)"),
        ),
        "run": (
            ("--data", number(float, 1), None, "bytes of training text"),
            ("--tokens", number(float, 1), None, "training tokens, instead of --data"),
            ("--bytes-per-token", number(float, 0.1, 100), None, "(default: 4, English; tiny 1)"),
            ("--epochs", positive, 1.0, "passes over the data"),
            ("--batch-size", count, None, "sequences a rank and micro-batch (default: what fits)"),
            ("--grad-accum", count, None, "micro-batches an update (default: by --global-batch)"),
            ("--global-batch", number(float, 1), 4e6, "tokens an update, as Llama 2"),
            ("--precision", ("auto", "fp32", "bf16", "fp16"), "auto", "of the matrix products"),
            ("--strategy", ways, None, "zero1: the optimizer is divided; zero2: and gradients; "
             "fsdp: and weights; hsdp: fsdp in a node, replicas across (default: the fastest "
             "that fits; tiny and qwen: ddp)"),
            ("--tensor", number(int, 1, 64), None, "ranks of a node that share every layer"),
            ("--pipeline", number(int, 1, 1024), None, "stages of layers"),
            ("--dropout", number(float, 0, 0.99), 0.0, "its masks take memory"),
            ("--save-every", number(int, 0), 0, "on the cpu, the copy it writes takes memory"),
            ("--gradient-checkpointing", bool, False, "only layouts that compute layers twice"),
        ),
        "assumptions": (
            ("--price", number(float, 0), None, "of a GPU-hour"),
            ("--overlap", part, 0.8, "reached share of the overlap of communication and compute"),
            ("--jitter", part, 0.02, "relative standard deviation of a GPU's step time"),
            ("--slow-share", part, 0.0002, "GPUs that are slow at a time, in the simulation"),
            ("--slow-by", number(float, 0, 100), 0.1, "by so much"),
            ("--mtbf", number(float, 1), 50_000.0, "hours between failures of one GPU; 419 in 54 "
             "days on 16,384 (Llama 3, section 3.3.4) are 50,700"),
            ("--restart", number(float, 0), 600.0, "seconds until the run goes on after a failure"),
            ("--storage", number(float, 1e3), 2e9, "bytes/s to checkpoints, all nodes together"),
            ("--snapshot", number(float, 1e3), 5e9, "bytes/s from a rank to its host's memory"),
            ("--keep", count, 3, "checkpoints kept besides the best"),
            ("--read-rate", number(float, 1), 1e9, "bytes/s of training data a node can read"),
        ),
        "output": (
            ("--json", bool, False, "the plan for programs"),
            ("--picture", Path, None, "also draw memory by layout, replacing an old file"),
        ),
    }  # fmt: skip
    for title, flags in groups.items():
        add = parser.add_argument_group(title).add_argument
        for flag, kind, default, text in flags:
            if kind is bool:
                add(flag, action="store_true", help=text)
            elif isinstance(kind, tuple):
                add(flag, choices=kind, default=default, help=text)
            else:
                shown = "" if default is None else f" (default: {default})"
                add(flag, type=kind, default=default, help=text + shown)
    for flag in WITHOUT_EFFECT:
        parser.add_argument(flag, help=argparse.SUPPRESS)
    for flag in SWITCHES_WITHOUT_EFFECT:
        parser.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    return parser


def on_network(machine: Machine, name: str) -> Machine:
    """The machine with another network between its nodes."""
    network = NETWORKS[name]
    cards = machine.gpus_per_node if network.cards_by_gpu else 1
    rate = REACHED * network.card * cards
    return dataclasses.replace(machine, network=name, node_rate=rate, latency=network.latency)


def read_model(args: argparse.Namespace) -> Model:
    """The model that the flags describe. Raises `PlanError` where they contradict each other."""
    if args.params and args.model:
        raise PlanError("--params contradicts --model; give one of them")
    if args.model == "tiny":
        model = tiny_model(args.d_model or 64, args.layers or 1, args.heads or 4, args.seq_len)
    elif args.params:
        model = model_of_size(args.params, args.vocab or 32000)
    else:
        model = MODELS["qwen2.5-0.5b" if args.model == "qwen" else args.model]
    given = {
        "width": args.d_model, "layers": args.layers, "heads": args.heads, "ffn": args.ffn,
        "vocab": args.vocab, "kv_heads": args.kv_heads,
    }  # fmt: skip
    if args.heads and model.kv_heads == model.heads:
        given["kv_heads"] = args.kv_heads or args.heads
    model = dataclasses.replace(model, **{k: v for k, v in given.items() if v})
    for what, count in (("heads", model.heads), ("key-value heads", model.kv_heads)):
        if args.tensor and count % args.tensor:
            raise PlanError(
                f"--tensor {args.tensor} does not divide the {count} {what} of the model; "
                "possible: " + ", ".join(str(t) for t in range(1, count + 1) if count % t == 0)
            )
    if model.width % model.heads:
        raise PlanError(f"--heads {model.heads} does not divide --d-model {model.width}")
    if model.heads % model.kv_heads:
        raise PlanError(f"--kv-heads {model.kv_heads} does not divide --heads {model.heads}")
    return model


def read_run(args: argparse.Namespace) -> Run:
    """The run that the flags describe, with a micro-batch of 1; fills in the defaults in `args`."""
    if not args.model and not args.params:
        args.model = "tiny"
    if args.data and args.tokens:
        raise PlanError("--data contradicts --tokens; give one of them")
    args.exact = args.model in ("tiny", "qwen")  # the reference's run as it is, not as it could be
    args.seq_len = args.seq_len or {"tiny": 64, "qwen": 256}.get(args.model, 4096)
    args.bytes_per_token = args.bytes_per_token or (1.0 if args.model == "tiny" else 4.0)
    if args.exact:
        args.batch_size, args.grad_accum = args.batch_size or 8, args.grad_accum or 1
        args.tensor, args.pipeline = args.tensor or 1, args.pipeline or 1
    args.strategy = args.strategy or ("ddp" if args.exact else "auto")
    args.lora_r = args.lora_r or (8 if args.model == "qwen" else 0)
    if args.model == "tiny" and (args.lora_r or args.gradient_checkpointing):
        raise PlanError("--lora-r and --gradient-checkpointing need another model than tiny")
    model = read_model(args)

    name = args.gpu or ("cpu" if args.exact else "a100-80gb")
    gpu = GPUS[name]
    machine = Machine(
        name, args.gpu_memory or gpu.memory, args.peak or gpu.peak,
        args.share or (1.0 if name == "cpu" else 0.45), args.nodes,
        args.gpus_per_node or (1 if args.exact else 8), REACHED * gpu.link, "", 0.0, 0.0,
    )  # fmt: skip
    mixed = args.precision in ("bf16", "fp16") or (args.precision == "auto" and name != "cpu")
    mixed = mixed and args.model != "tiny"  # whose activations the reference counts in fp32
    targets = tuple(part.strip() for part in args.lora_targets.split(",") if part.strip())
    if args.lora_r:
        model.lora(args.lora_r, targets)  # names wrong targets
    if args.strategy == "hsdp" and (args.nodes == 1 or machine.gpus_per_node == 1):
        raise PlanError(
            "--strategy hsdp divides a replica among the GPUs of a node and copies it across "
            "nodes: give more than one of both"
        )
    return Run(
        model, on_network(machine, args.network or gpu.network), args.seq_len, batch=1, mixed=mixed,
        lora_r=args.lora_r, lora_targets=targets, jitter=args.jitter, overlap=args.overlap,
        read_rate=args.read_rate, dropout=args.dropout > 0, saving=args.save_every > 0,
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the plan; returns the exit status, 2 for a question that makes no sense."""
    with contextlib.suppress(AttributeError):  # a notebook's stream has no codec
        sys.stdout.reconfigure(errors="backslashreplace")  # ASCII has no "×"
    try:
        args = flag_parser().parse_args(argv)
        plan = make_plan(args)
        if args.picture:
            draw_memory(plan, args.picture)
    except PlanError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.json and math.isinf(plan["machine"]["memory"]):
        plan["machine"]["memory"] = None  # JSON knows no infinity
    try:
        print(json.dumps(plan, indent=2) if args.json else report(plan), flush=True)
    except BrokenPipeError:  # the reader left: `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the end
    except OSError as error:
        print(f"error: cannot write the plan: {error.strerror}", file=sys.stderr)
        os._exit(1)  # nothing more can be flushed
    return 0


if __name__ == "__main__":
    sys.exit(main())
