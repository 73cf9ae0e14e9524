"""One process of a team: the reference's own step, timed in blocks."""

from __future__ import annotations

import contextlib
import copy
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from llm_ddp_parallel_training import (
    EpochSampler,
    Launch,
    ShardSampler,
    build_optimizer,
    build_qwen,
    build_tiny,
    gather,
    parse_settings,
    read_launcher,
    set_up,
    trained_parameters,
    training_step,
    updates_of_epoch,
    wrap_in_ddp,
)

BLOCK_S = 0.3  # how long a block of steps lasts: short against the drift, long against a step


class Rank:
    """The reference's set-up, and blocks of its step; a block is a `Block` of team.py."""

    def __init__(self, flags: Sequence[str]) -> None:
        self.launch, self.settings = read_launcher(), parse_settings(flags)
        self.ranks = self.launch.world_size
        set_up(self.launch, self.settings)
        build = build_tiny if self.settings.model == "tiny" else build_qwen
        self.run = build(self.launch, self.settings)
        self.model = self.bare = self.run.model
        if self.ranks > 1:
            self.model = wrap_in_ddp(self.bare, self.launch)
        self.optimizer = build_optimizer(self.bare, self.settings)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0  # the same work, and the replicas stay equal whatever is left out
        self.scaler = torch.amp.GradScaler("cuda", enabled=self.settings.precision == "fp16")
        self.updates: dict[int, Iterator[list[dict]]] = {}  # by batch size
        self.counts: dict[Any, int] = {}  # steps in a block
        self.bytes = 4 * sum(p.numel() for _, p in trained_parameters(self.bare))

    def introduce(self) -> None:
        """Says what is measured, once for the team."""
        chosen = {what: choice for what, choice, _ in self.launch.choices}
        self.launch.say(
            f"{self.bytes / 1e6:.2f} MB of gradients, {chosen['device']}, backend "
            f"{chosen['backend']}"
        )

    def measure(self, block: Any, before: list) -> dict[str, Any]:
        """One block: {"seconds": of each step, "tokens": this rank's share}, or {size: seconds}."""
        if block.what == "link":
            return {size: self.all_reduce(size, 6)[1:] for size in message_sizes(self.bytes)}
        if block not in self.counts:
            step = min(self.steps(block, 4)["seconds"][1:])
            own = min(max(round(BLOCK_S / step), 2), 500)
            self.counts[block] = gather(own, self.launch)[0]  # ranks meet: all make as many
        return self.steps(block, self.counts[block])

    def steps(self, block: Any, count: int) -> dict[str, Any]:
        """Times `count` updates of the reference's own step, batches included."""
        torch.set_num_threads(block.threads)
        settings = copy.copy(self.settings)
        settings.batch_size = block.batch
        if block.batch not in self.updates:
            self.updates[block.batch] = self.endless(settings)
        launch, model, unsynchronized = self.launch, self.model, contextlib.nullcontext()
        if block.what in ("independent", "all cores") or self.ranks == 1:
            # The model inside the wrapper: DDP ignores a backward pass whose forward it missed.
            launch, model = Launch(device=launch.device), self.bare
        elif block.what == "no_sync":
            unsynchronized = model.no_sync()
        seconds, tokens = [], 0.0
        self.meet()
        with unsynchronized:
            for _ in range(count):
                begin = time.perf_counter()
                micro_batches = next(self.updates[block.batch])
                result = training_step(
                    model, self.optimizer, self.scaler, micro_batches, launch, settings
                )
                self.finish()
                seconds.append(time.perf_counter() - begin)
                tokens += result.tokens / launch.world_size
        return {"seconds": seconds, "tokens": tokens}

    def all_reduce(self, size: int, count: int) -> list[float]:
        """Seconds of each of `count` all-reduces of `size` bytes, with nothing else to do."""
        message = torch.zeros(size // 4, device=self.launch.device)
        seconds = []
        for _ in range(count):
            self.meet()
            begin = time.perf_counter()
            dist.all_reduce(message)  # ranks meet
            self.finish()
            seconds.append(time.perf_counter() - begin)
        return seconds

    def endless(self, settings: Any) -> Iterator[list[dict]]:
        """This rank's micro-batches, update after update, epoch after epoch."""
        data = self.run.data.train
        sampler = EpochSampler(len(data), settings.seed)
        if self.ranks > 1:
            sampler = ShardSampler(len(data), settings.seed, self.ranks, self.launch.rank)
        loader = DataLoader(
            data, settings.batch_size, sampler=sampler, collate_fn=self.run.collate
        )  # fmt: skip
        for epoch in itertools.count(1):
            sampler.set_epoch(epoch)
            yield from updates_of_epoch(loader, sampler, settings)

    def meet(self) -> None:
        """Lets all ranks of the team go on at one time. Ranks meet."""
        self.finish()
        if self.ranks > 1:
            dist.barrier()

    def finish(self) -> None:
        """Waits until what was begun on a GPU is done."""
        if self.launch.device.type == "cuda":
            torch.cuda.synchronize(self.launch.device)


def message_sizes(gradient: int) -> list[int]:
    """Bytes: a small message, the gradient, and one large enough to show the bandwidth."""
    return sorted({4096, max(gradient, 4096) // 4 * 4, max(8 * gradient, 1 << 22)})
