"""Time of an update: FLOPs, communication, waiting, and how it scales with the GPUs."""

from __future__ import annotations

import dataclasses
import math

from labs.planner.faults import expected_slowest
from labs.planner.machines import NODE_LATENCY, Machine
from labs.planner.runs import Layout, Run


def forward_flops(run: Run) -> tuple[float, float]:
    """FLOPs a token in the forward pass: (of the layers, of the head).

    2 per parameter in a matrix product (Kaplan et al. 2020, section 2.1), plus attention's
    4 · layers · width · seq_len (Chowdhery et al. 2022, PaLM, appendix B): a causal kernel computes
    half of that, at about half the rate of the products.
    """
    m = run.model
    products = 2 * m.layers * m.matrices + (2 * run.trained if run.lora_r else 0)
    return products + 4 * m.layers * m.width * run.seq_len, 2 * m.vocab * m.width


def flops_per_token(run: Run, checkpointing: str = "none") -> float:
    """FLOPs a token of forward and backward: three times the forward pass; twice if frozen (LoRA).

    Full checkpointing computes the forward pass of the layers again; selective no product.
    """
    layers, head = forward_flops(run)
    total = 3 * (layers + head)
    if run.lora_r:
        m = run.model
        total -= 2 * (m.layers * m.matrices + m.vocab * m.width)
    return total + (layers if checkpointing == "full" else 0)


def compute_seconds(run: Run, layout: Layout) -> float:
    """Of a micro-batch on one rank."""
    m = run.model
    flops = flops_per_token(run, layout.checkpointing)
    if layout.checkpointing == "selective":  # what is no product again, see `kernel_share`
        half = run.machine.half_width
        flops += forward_flops(run)[0] * half / (m.width + half)
    rate = run.machine.peak * run.machine.kernel_share(m.width)
    return flops * run.tokens / (layout.tensor * layout.pipeline) / rate


def gather_seconds(
    size: float, ranks: int, machine: Machine, stride: int = 1, calls: int = 1
) -> float:
    """Seconds until each of `ranks` holds all `size` bytes, of which it had its share.

    A reduce-scatter takes as long, an all-reduce is one of each. `stride`: the distance between
    neighbours of the group, in ranks; groups that work at the same time share their nodes' cards.
    `calls`: into how many messages the bytes are divided. The better of two ways: one ring through
    all ranks (Patarasuk and Yuan 2009); or a ring in each node and recursive doubling between
    nodes, log2(nodes) hops (Thakur et al. 2005).
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


def data_parallel_seconds(run: Run, layout: Layout, compute: float) -> tuple[float, float]:
    """(all, exposed) seconds of the communication among data-parallel ranks, in an update.

    `compute` is that of one micro-batch. DDP all-reduces gradients during the last backward pass,
    two thirds of it. ZeRO-1 scatters them instead, and gathers the updated 16-bit weights during
    the next forward pass. FSDP gathers weights for forward and backward (zero2: once for both) and
    scatters gradients in every micro-batch; in a hybrid the replicas then all-reduce their shards.
    At least one piece, a bucket or a layer, stays exposed.
    """
    m, machine, stride = run.model, run.machine, layout.tensor
    own = m.part(layout.tensor, layout.pipeline)
    trained = run.trained if run.lora_r else own
    layers = max(1, m.layers // layout.pipeline)
    buckets = math.ceil(4 * trained / 25e6)  # DDP's default size

    def exposed(seconds: float, window: float, pieces: int) -> float:
        return max(seconds - run.overlap * window, seconds / pieces)

    gradients = gather_seconds(4 * trained, layout.data, machine, stride, buckets)
    if layout.kind == "ddp":
        return 2 * gradients, exposed(2 * gradients, compute * 2 / 3, buckets)
    if layout.kind == "zero1":
        weights = gather_seconds(run.width * trained, layout.data, machine, stride, buckets)
        hidden = exposed(gradients, compute * 2 / 3, buckets)
        return gradients + weights, hidden + exposed(weights, compute / 3, buckets)
    sends = run.width * (own if not run.lora_r else own + trained)
    gather = gather_seconds(sends, layout.shard, machine, stride, layers)
    scatter = gather_seconds(4 * trained, layout.shard, machine, stride, layers)
    once = (1 if layout.kind == "zero2" else 2) * gather + scatter
    total, shown = run.accum * once, run.accum * exposed(once, compute, layers)
    replicas = layout.data // layout.shard
    across = 2 * gather_seconds(
        4 * trained / layout.shard, replicas, machine, stride * layout.shard, layers
    )
    return total + across, shown + exposed(across, compute * 2 / 3, layers) if across else shown


def step_seconds(run: Run, layout: Layout) -> dict[str, float]:
    """Seconds of an update, by cause; `total` is their sum. `communication` includes the hidden.

    Ranks wait for the slowest: if a micro-batch's time deviates by σ on a rank, the m micro-batches
    of an update deviate by σ/√m, and n ranks take 1 + σ/√m · E[largest of n] as long. A pipeline of
    p stages is idle (p − 1)/(m + p − 1) of its time (Huang et al. 2019, GPipe, section 2.3), with v
    chunks a rank (p − 1)/(v · m + p − 1) (Narayanan et al. 2021, section 2.2). Tensor ranks
    all-reduce the activations twice in a layer's forward and twice in its backward pass (Shoeybi et
    al. 2019), in the open; sequence parallelism sends the same bytes (Korthikanti et al. 2022).
    """
    m, machine, t, p = run.model, run.machine, layout.tensor, layout.pipeline
    compute = compute_seconds(run, layout)
    total, exposed = data_parallel_seconds(run, layout, compute)
    hidden_size = run.tokens * m.width * run.width
    calls = math.ceil(m.layers / p) * (6 if layout.checkpointing == "full" else 4)
    tensor = 2 * gather_seconds(calls * hidden_size, t, machine, calls=calls)
    rate = min(machine.link, machine.node_rate / machine.gpus_per_node)
    pipeline = run.accum * 2 * layout.chunks * hidden_size / rate / t if p > 1 else 0.0
    work = run.accum * compute
    spread = run.jitter / math.sqrt(run.accum)
    parts = {
        "compute": work,
        "waiting for the slowest": work * spread * expected_slowest(layout.gpus),
        "data-parallel communication": exposed,
        "tensor communication": run.accum * tensor,
        "pipeline communication": pipeline,
        "pipeline bubble": (compute + tensor) * (p - 1) / layout.chunks,
    }
    read = layout.data / machine.nodes * run.accum * run.tokens * 4 / run.read_rate
    parts["input"] = max(0.0, read - sum(parts.values()))  # prefetched: only what is slower shows
    parts["total"] = sum(parts.values())
    parts["communication"] = total + run.accum * tensor + pipeline
    return parts


def resized(layout: Layout, gpus: int) -> Layout:
    """The same way of dividing on another number of GPUs."""
    data = max(1, gpus // (layout.tensor * layout.pipeline))
    whole = layout.shard == layout.data
    shard = data if whole else min(layout.shard, data)
    return dataclasses.replace(layout, data=data, shard=shard)


def efficiency(run: Run, layout: Layout, gpus: int, strong: bool = False) -> float:
    """Tokens a second and GPU, as a share of what computing alone would give.

    Weak scaling keeps the batch of a GPU, strong scaling the global one; 0 if there are more ranks
    than sequences.
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


def scaling(run: Run, layout: Layout) -> list[dict[str, float]]:
    """Efficiency by number of GPUs."""
    sizes = sorted({1, 8, 16, 32, 128, 1024, 4096, layout.gpus})
    found = []
    for n in (n for n in sizes if n >= layout.tensor * layout.pipeline):
        weak, strong = efficiency(run, layout, n), efficiency(run, layout, n, strong=True)
        found.append({"gpus": n, "weak": weak, "strong": strong})
    return found
