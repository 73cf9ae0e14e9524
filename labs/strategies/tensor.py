"""Tensor parallelism: every rank holds a slice of every matrix, and works on every sequence.

Batch: not divided.
Model: attention by heads, the feed-forward by columns and then rows (Shoeybi et al. 2019,
Megatron-LM, section 3), embedding and head by the vocabulary.
Step: the logits stay divided, and the loss is computed from the slices.
Ranks meet: an all-reduce of activations after attention and after the feed-forward, in forward and
backward; for the loss one of maxima, one of sums and one of the targets' logits.

Column-wise, a rank computes some of the outputs from the whole input; row-wise, it takes some of
the inputs, and an all-reduce adds up the outputs. One after the other need one meeting, not two. In
attention the columns are heads.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from labs.strategies.step import Strategy, whole


class TensorParallel(Strategy):
    """The whole batch on every rank, as in one process; the matrices are divided."""

    least_ranks = 2

    def __init__(self, model: nn.Module, launch: Any, settings: Any, options: Any) -> None:
        super().__init__(model, launch, settings, options)
        for group in self.optimizer.param_groups:  # one kernel for all refuses a mixture of
            group.update(fused=False, foreach=False)  # whole tensors (norms) and divided ones

    def divide_model(self, model: nn.Module) -> nn.Module:
        mesh = init_device_mesh(self.launch.device.type, (self.launch.world_size,))
        return split_matrices(model, mesh)

    def forward_backward(self, part: dict, tokens: int) -> torch.Tensor:
        with loss_parallel():  # cross-entropy of logits of which each rank has a slice [B·T, V/N]
            return whole(super().forward_backward(part, tokens))

    def gradients(self) -> dict[str, torch.Tensor]:
        """As in one process: q, k and v, which `SplitAttention` took apart, in one matrix again."""
        named, found = super().gradients(), {}
        for name, gradient in named.items():
            if ".q_proj." in name:
                parts = [named[name.replace("q_proj", p)] for p in ("q_proj", "k_proj", "v_proj")]
                found[name.replace("q_proj.weight", "in_proj_weight")] = torch.cat(parts)
            elif ".k_proj." not in name and ".v_proj." not in name:
                found[name] = gradient
        return found


def split_matrices(model: nn.Module, mesh: Any) -> nn.Module:
    """Divides the matrices of a `TinyCausalTransformer` over a mesh of one dimension.

    `once` makes matrices that share an input add up its gradients before they are sent.
    """
    column, row = ColwiseParallel, RowwiseParallel
    once = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
    plan = {
        "self_attn": once, "self_attn.q_proj": column(), "self_attn.k_proj": column(),
        "self_attn.v_proj": column(), "self_attn.out_proj": row(),
        "linear1": column(), "linear2": row(),
    }  # fmt: skip
    for index, layer in enumerate(model.encoder.layers):
        model.encoder.layers[index] = parallelize_module(SplitLayer(layer), mesh, plan)
    # A rank's slice of the embedding knows V/N tokens and gives zeros for those of the others.
    embedding = row(input_layouts=Replicate())
    logits = column(output_layouts=Shard(-1), use_local_output=False)  # (B, T, V/N), a DTensor
    parallelize_module(model, mesh, {"token_emb": embedding, "lm_head": logits})
    # The engine gives every rank the embedding's gradient for the whole vocabulary: keep a slice.
    weight = model.token_emb.weight
    weight.register_hook(lambda g: g.redistribute(placements=weight.placements).clone())
    return model


class SplitAttention(nn.Module):
    """The reference's attention with its fused `in_proj` taken apart, so that heads can be divided.

    Rows 0 … D−1 of `in_proj_weight` make the queries, head by head, the next D rows the keys, the
    last D the values. A slice of rows of the fused matrix would give one rank all queries and the
    other all values; a slice of each of the three gives it whole heads. (Models of transformers,
    such as Qwen and Llama, hold the three apart from the start.)
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
    """The reference's `CausalLayer` without dropout, around a `SplitAttention`."""

    def __init__(self, layer: nn.TransformerEncoderLayer) -> None:
        super().__init__()
        self.norm1, self.norm2, self.activation = layer.norm1, layer.norm2, layer.activation
        self.self_attn = SplitAttention(layer.self_attn)
        self.linear1, self.linear2 = layer.linear1, layer.linear2

    def forward(self, src: torch.Tensor, **_: Any) -> torch.Tensor:
        """[B, T, D] → [B, T, D]"""
        hidden = src + self.self_attn(self.norm1(src))
        return hidden + self.linear2(self.activation(self.linear1(self.norm2(hidden))))
