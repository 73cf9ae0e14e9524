"""Two detectors that find most bugs: compare the ranks, and compare with one process.

Both take any model, and both are for tests and for the first updates of a run: they send more than
a training step does.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def gathered(value: Any) -> list:
    """What each rank passed, in the order of ranks. Ranks meet."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def same_on_all_ranks(tensors: dict[str, torch.Tensor]) -> None:
    """Compares the norms of named tensors between ranks."""
    first, *others = gathered({name: float(t.norm()) for name, t in tensors.items()})
    for rank, norms in enumerate(others, 1):
        for name, norm in first.items():
            other = norms.get(name, math.nan)
            assert other == norm, f"{name}: norm {norm:.6g} on rank 0, {other:.6g} on rank {rank}"


def same_gradients(model: nn.Module) -> None:
    """After backward, compares the ranks' gradients."""
    same_on_all_ranks({n: p.grad for n, p in model.named_parameters() if p.grad is not None})


def same_weights(model: nn.Module) -> None:
    """After an update, compares the ranks' weights."""
    same_on_all_ranks(dict(model.named_parameters()))


def beside_one_process(
    model: nn.Module, micro_batches: list[dict]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient after backward, and that of the joined batch in one process, as vectors.

    `model(**batch)` returns the mean loss of a batch, or an object that has it as `.loss`.
    The joined batch holds all micro-batches of all ranks. Dropout must be 0. Ranks meet.
    """
    batches = [batch for own in gathered(micro_batches) for batch in own]
    joined = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
    alone = copy.deepcopy(getattr(model, "module", model))  # without DDP and without gradients
    loss = alone(**joined)
    getattr(loss, "loss", loss).backward()
    found, wanted = (
        torch.cat([p.grad.flatten() for p in m.parameters() if p.grad is not None])
        for m in (model, alone)
    )
    return found, wanted


def like_one_process(model: nn.Module, micro_batches: list[dict]) -> None:
    """After backward, compares the gradient with that of the joined batch in one process."""
    found, wanted = beside_one_process(model, micro_batches)
    error = float((found - wanted).norm() / wanted.norm())
    assert error < 1e-4, f"the gradient is {error:.1e} (relative) off that of the joined batch"
