"""What the ways to an averaged gradient cost here, timed in turn."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

import llm_ddp_parallel_training as ddp
from labs.explain_step.observe import Clock, Observer
from labs.explain_step.three_ways import Parts, average_one_by_one

RACE_S = 2.0  # about how long it takes


def average_at_once(model: nn.Module, ranks: int) -> None:
    """All gradients as one message, after the backward pass. Ranks meet."""
    gradients = [p.grad for _, p in ddp.trained_parameters(model)]
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat)
    flat /= ranks
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients])):
        gradient.copy_(part.view_as(gradient))


def average_nothing(model: nn.Module, ranks: int) -> None:
    """Wrong on purpose: what a step would cost if ranks sent nothing."""


def race(parts: Parts, wrap: Callable, micro_batches: list[dict], launch: ddp.Launch) -> dict:
    """Times the ways to an averaged gradient in turn, each on a twin. Ranks meet.

    Returns, for each way, the slowest rank's seconds from the first forward pass to the averaged
    gradient, over rounds. No hooks and no copies here. `wrap` puts a model into DDP's wrapper.
    """
    rounds = []
    ways = {
        "no all-reduce at all (wrong)": average_nothing,
        "one all-reduce per parameter, after backward": average_one_by_one,
        "one all-reduce of everything, after backward": average_at_once,
        "DDP: bucket after bucket, during backward": None,
    }
    twins = [parts.twin() for _ in ways]
    twins[-1].model = wrap(twins[-1].bare)
    began = time.perf_counter()
    while True:
        times = []
        for exchange, twin in zip(ways.values(), twins):
            clock = Clock(launch)  # ranks meet: all begin together
            observer = Observer(launch, clock, twin.bare, exchange=exchange)
            ddp.training_step(
                twin.model, twin.optimizer, twin.scaler, micro_batches,
                dataclasses.replace(launch, watch=observer), twin.settings,
            )  # fmt: skip
            times.append(observer.begin_of("sum of losses") - observer.begin_of("forward"))
        rounds.append([max(column) for column in zip(*ddp.gather(times, launch))])
        elapsed = time.perf_counter() - began
        enough = elapsed > RACE_S if len(rounds) >= 5 else elapsed > 5 * RACE_S and len(rounds) >= 3
        if ddp.gather(enough, launch)[0]:  # rank 0's clock decides for all
            break
    timed = rounds[2:]  # in the first, memory is allocated and DDP learns the order of gradients
    return {
        "rounds": len(timed),
        "seconds": {
            way: {"median": statistics.median(c), "fastest": min(c), "slowest": max(c)}
            for way, c in zip(ways, zip(*timed))
        },
    }
