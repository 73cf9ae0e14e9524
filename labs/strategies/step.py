"""One process, and DDP: every other strategy is read as a difference to these two classes.

Each answers four questions, in this order: how is the batch divided, how the model, what does a
step do, where do ranks meet. All follow the gradient of the mean over all valid tokens of the
global batch, as the reference does,

    G = (1/n) · Σ_r ∇S_r ,

with S_r the summed loss of part r. Each rank reads the whole global batch before it takes its part,
so n is known beforehand. Gradients are not clipped: their norm would be one more meeting.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from llm_ddp_parallel_training import build_optimizer, valid_targets, wrap_in_ddp


class Strategy:
    """One process: the whole batch, the whole model; what all others are measured against."""

    least_ranks = 1

    def __init__(self, model: nn.Module, launch: Any, settings: Any, options: Any) -> None:
        self.launch, self.settings, self.options = launch, settings, options
        self.part, self.parts = 0, 1  # which part of the batch this rank takes, of how many
        self.group = None  # the ranks that hold these parts, if not all
        self.model = self.divide_model(model)
        self.bare = getattr(self.model, "module", self.model)  # without the DDP wrapper
        self.optimizer = build_optimizer(self.bare, settings)  # only now: of the rank's share

    def divide_batch(self, batch: dict) -> dict:
        """The global batch, tensors [B, T] → this rank's part: rows r, r + N, …"""
        return {name: rows[self.part :: self.parts] for name, rows in batch.items()}

    def divide_model(self, model: nn.Module) -> nn.Module:
        """The whole model, equal on all ranks → the rank's share of it. Sets `part`, `parts`."""
        return model

    def forward_backward(self, part: dict, tokens: int) -> torch.Tensor:
        """Leaves G in the gradients, returns S_r / n; `tokens` is n, of the global batch."""
        loss = self.model(**part) * (valid_targets(part["labels"]) / tokens)  # mean · n_r / n
        # DDP and FSDP divide the sum over their N ranks by N; N times the loss undoes that.
        (loss * self.parts).backward()
        return loss.detach()

    def update(self) -> None:
        """Changes the weights by the gradients that `forward_backward` left."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def total_loss(self, loss: torch.Tensor) -> float:
        """The loss of the global batch from those of its parts."""
        if self.parts > 1:
            dist.all_reduce(loss, group=self.group)  # ranks meet: one float64
        return float(loss)

    def findings(self) -> dict:
        """What only this strategy has to report, at the end, on rank 0. Ranks may meet."""
        return {}

    def gradients(self) -> dict[str, torch.Tensor]:
        """The whole gradient by the reference's names, on the CPU of rank 0. Ranks may meet."""
        return {name: whole(p.grad).cpu().clone() for name, p in self.bare.named_parameters()}


class DDP(Strategy):
    """The reference's way.

    Batch: divided by rows. Model: a replica on every rank. Step: forward and backward on the part.
    Ranks meet: in the backward pass, which all-reduces the gradients bucket by bucket.
    """

    least_ranks = 2

    def divide_model(self, model: nn.Module) -> nn.Module:
        self.part, self.parts = self.launch.rank, self.launch.world_size
        return wrap_in_ddp(model, self.launch)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor of which ranks hold slices. Ranks meet, if they do."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
