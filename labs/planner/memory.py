"""Memory of a rank: states, weights that exist twice, activations, the loss."""

from __future__ import annotations

import math

from labs.planner.runs import DIVIDED, Layout, Run


def state_bytes(parameters: int, trained: int, run: Run, layout: Layout) -> dict[str, int]:
    """What a rank holds between two steps, of `parameters` of which `trained` are trained.

    Trained weights, their gradients and AdamW's two means are fp32: 4 + 4 + 8 bytes (Rajbhandari
    et al. 2020, ZeRO, section 3.1). Frozen weights have the precision of the matrix products.
    """
    divided = DIVIDED[layout.kind]
    if layout.kind == "zero1" and not run.mixed:  # there are no 16-bit weights to compute with
        divided = ("optimizer",)

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

    ddp, zero1: a 16-bit copy of all trained weights; DDP's buckets are the gradients themselves.
    zero2 keeps all weights gathered. fsdp gathers layer by layer: two of them (one computes, the
    next arrives), embedding and head throughout, and one layer's whole gradient before it is
    scattered (Zhao et al. 2023, PyTorch FSDP, sections 3.2 and 3.3).
    """
    if layout.kind in ("ddp", "zero1") or layout.shard == 1:
        return 2 * parameters if run.mixed and not run.lora_r else 0
    if layout.kind == "zero2":
        return run.width * parameters
    m = run.model
    layer = (m.matrices + m.norms) // layout.tensor
    outside = parameters - layer * (m.layers // layout.pipeline)
    return run.width * (2 * layer + outside) + (0 if run.lora_r else 4 * layer)


def layer_values(run: Run, layout: Layout) -> tuple[float, float]:
    """Values a token that a layer keeps for the backward pass: (all, what checkpointing keeps).

    As Korthikanti et al. 2022, equations 1, 2 and 4, without the score matrix (Dao et al. 2022).
    Outside the products that tensor ranks divide: the inputs of two norms and what they return;
    inside: q, k, v, the attention's output, and 2 or (gated) 4 feed-forward widths. Full
    checkpointing keeps a layer's input; selective also what products and attention return.
    """
    m = run.model
    qkv = m.width + 2 * m.kv_width + (2 * m.width if run.repeats_keys else 0)
    outside, inside = 4.0 * m.width, qkv + m.width + (4 if m.gated else 2) * m.ffn
    if run.dropout:  # masks, and the attention's scores, which the fused kernel would not keep
        inside += 6 * m.width + 3 * m.heads * run.seq_len
    returned = m.width + 2 * m.kv_width + m.width + (2 if m.gated else 1) * m.ffn
    if run.lora_r:
        # A frozen product keeps no input, so the norms' results and the feed-forward's last input
        # are gone; an adapter keeps its own, after dropout in fp32. Norms compute in fp32.
        adapters = m.adapted(run.lora_targets)
        precise = 4 // run.width  # what fp32 takes, in values of `run.width`
        outside = 2.0 * precise * m.width
        inside = qkv + m.width + (3 if m.gated else 2) * m.ffn
        inside += sum(i for i, _ in adapters) * (precise + (1 if run.mixed else 0))
        returned += sum(o for _, o in adapters)
    across = layout.tensor if layout.sequence else 1
    everything = outside / across + inside / layout.tensor
    kept = {
        "none": everything,
        "full": m.width / across,
        "selective": 3 * m.width / across + returned / layout.tensor,  # input, and two sums
    }
    return everything, min(everything, kept[layout.checkpointing])


def activation_bytes(run: Run, layout: Layout, stage: int = 0) -> tuple[int, int]:
    """(kept for the backward pass by the layers, needed around the loss), in bytes.

    A 1F1B stage holds a micro-batch for each stage from it to the end; interleaved, (p − 1)/chunks
    more (Narayanan et al. 2021, section 2.2). With checkpointing, one layer at a time has
    everything. Around the loss: the last norm's input and output, and three fp32 values a logit.
    LoRA, as the reference trains it, never holds more than 256 rows of logits.
    """
    m = run.model
    everything, kept = layer_values(run, layout)
    in_flight = float(layout.pipeline - stage)
    if layout.chunks > 1:
        in_flight += (layout.pipeline - 1) / layout.chunks
    in_flight = min(in_flight, float(run.accum))
    values = kept * m.stage_layers(layout.pipeline, stage) * in_flight + (everything - kept)
    loss = 0
    if stage == layout.pipeline - 1:
        loss = run.tokens * (run.width * 2 * m.width + 4 * 3 * m.vocab // layout.tensor)
    if run.lora_r:  # in fp32, and between two products of 16 bits
        loss = (4 if run.width == 4 else 2 + 4 + 2) * 256 * m.vocab
    return math.ceil(run.width * run.tokens * values), loss


def memory(run: Run, layout: Layout) -> dict[str, int]:
    """Peak bytes on the fullest rank, by what holds them; `total` is their sum.

    One process without accumulation never has all gradients and all activations at once: the
    backward pass frees the one while it makes the other. `reused` takes that off. On the CPU the C
    library's heap loses about 0.3 of what is kept (measured with glibc 2.36: 0.24 to 0.39).
    """
    fullest: dict[str, int] = {"total": -1}
    layers = [run.model.stage_layers(layout.pipeline, s) for s in range(layout.pipeline)]
    host = run.machine.name == "cpu"
    # Of stages with equal layers the first holds most, but for embedding and head.
    for stage in {0, layers.index(max(layers)), layout.pipeline - 1}:
        own = run.model.part(layout.tensor, layout.pipeline, stage)
        parts = state_bytes(own, run.trained if run.lora_r else own, run, layout)
        parts["copies"] = copies_bytes(own, run, layout)
        parts["activations"], parts["loss"] = activation_bytes(run, layout, stage)
        kept = parts["activations"] + (0 if run.lora_r else parts["loss"])
        alone = layout.gpus == 1 and run.accum == 1
        parts["reused"] = -min(parts["gradients"], kept) if alone else 0
        parts["heap"] = 3 * kept // 10 if host else 0
        parts["saving"] = 12 * run.trained if host and run.saving else 0  # what is being written
        parts["total"] = sum(parts.values())
        fullest = max(fullest, parts, key=lambda parts: parts["total"])
    return fullest
