"""What is measured, and teams of 1, 2, … processes that take turns.

Machines are noisy and drift. So each number of ranks has a team, started once, and all measurements
take turns in short blocks, round after round, while the other teams sleep.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import llm_ddp_parallel_training as ddp

BLOCK_S = 0.3  # how long a block of steps lasts: short against the drift, long against a step


@dataclasses.dataclass(frozen=True)
class Block:
    """One thing that is measured, by one team.

    `what` is "weak" or "strong" scaling; "no_sync", without the all-reduce of the gradients;
    "independent", processes that know nothing of each other; "all cores", one process with the
    threads of all.
    """

    what: str
    ranks: int
    batch: int  # sequences per rank
    threads: int


def plan(teams: Sequence[int], batch: int, threads: int, cores: int) -> list[Block]:
    """All that is measured; `teams` are numbers of ranks, `batch` sequences per rank."""
    blocks = []
    whole = batch * math.lcm(*teams)  # the global batch of strong scaling, a multiple of all ranks
    for ranks in teams:
        blocks.append(Block("weak", ranks, batch, threads))
        blocks.append(Block("strong", ranks, whole // ranks, threads))
        if ranks > 1:
            blocks += [Block(w, ranks, batch, threads) for w in ("no_sync", "independent")]
        elif threads < cores:
            blocks.append(Block("all cores", 1, batch, cores))
    return blocks


def take_turns(port: int, flags: Sequence[str], blocks: Sequence[Block], rounds: int) -> dict:
    """What every rank of every team does; what this one measured, by block, a list of rounds.

    Block k may begin when the store at `port` holds "turn k"; who ends it sets "turn k + 1". Round
    0 warms up: it finds out how many steps make a block.
    """
    rank = Rank(flags)
    forever = datetime.timedelta(days=1)  # the lab ends all teams when one fails
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False, timeout=forever)
    teams, turn = len({block.ranks for block in blocks}), itertools.count()
    found: dict[Block, list] = {block: [] for block in blocks if block.ranks == rank.ranks}
    leads = rank.launch.rank == 0
    rank.meet()
    if rank.ranks == blocks[-1].ranks:
        chosen = {what: choice for what, choice, _ in rank.launch.choices}
        size = 4 * sum(p.numel() for _, p in ddp.trained_parameters(rank.bare))
        sent = f"{size / 1e6:.2f} MB of gradients"
        rank.launch.say(f"{sent}, {chosen['device']}, backend {chosen['backend']}")
    if leads and store.add("ready", 1) == teams:
        store.set("turn 0", "")
    for number in range(rounds + 1):
        # Every other round runs backwards: what drifts one way does not favour the last.
        for block in blocks if number % 2 else reversed(blocks):
            now = next(turn)
            if block in found:
                store.wait([f"turn {now}"])
                result = rank.measure(block)
                if number:
                    found[block].append(result)
                rank.meet()
                if leads:
                    store.set(f"turn {now + 1}", "")
    return found


class Rank:
    """One process of a team: the reference's set-up, and its own step, timed in blocks."""

    def __init__(self, flags: Sequence[str]) -> None:
        self.launch, self.settings = ddp.read_launcher(), ddp.parse_settings(flags)
        self.ranks = self.launch.world_size
        ddp.set_up(self.launch, self.settings)
        build = ddp.build_tiny if self.settings.model == "tiny" else ddp.build_qwen
        self.run = build(self.launch, self.settings)
        self.model = self.bare = self.run.model
        if self.ranks > 1:
            self.model = ddp.wrap_in_ddp(self.bare, self.launch)
        self.optimizer = ddp.build_optimizer(self.bare, self.settings)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0  # the same work, and the replicas stay equal whatever is left out
        self.scaler = torch.amp.GradScaler("cuda", enabled=self.settings.precision == "fp16")
        self.updates: dict[int, Iterator[list[dict]]] = {}  # by batch size
        self.counts: dict[Block, int] = {}  # steps in a block

    def measure(self, block: Block) -> dict[str, Any]:
        """One block: {"seconds": of each step, "tokens": this rank's share}."""
        if block not in self.counts:
            step = min(self.steps(block, 4)["seconds"][1:])
            own = min(max(round(BLOCK_S / step), 2), 500)
            self.counts[block] = ddp.gather(own, self.launch)[0]  # ranks meet: all make as many
        return self.steps(block, self.counts[block])

    def steps(self, block: Block, count: int) -> dict[str, Any]:
        """Times `count` updates of the reference's own step, batches included."""
        torch.set_num_threads(block.threads)
        settings = copy.copy(self.settings)
        settings.batch_size = block.batch
        if block.batch not in self.updates:
            self.updates[block.batch] = self.endless(settings)
        launch, model, unsynchronized = self.launch, self.model, contextlib.nullcontext()
        if block.what in ("independent", "all cores") or self.ranks == 1:
            # The model inside the wrapper: DDP ignores a backward pass whose forward it missed.
            launch, model = ddp.Launch(device=launch.device), self.bare
        elif block.what == "no_sync":
            unsynchronized = model.no_sync()
        parts, updates = (model, self.optimizer, self.scaler), self.updates[block.batch]
        seconds, tokens = [], 0.0
        self.meet()
        with unsynchronized:
            for _ in range(count):
                begin = time.perf_counter()
                result = ddp.training_step(*parts, next(updates), launch, settings)
                self.finish()
                seconds.append(time.perf_counter() - begin)
                tokens += result.tokens / launch.world_size
        return {"seconds": seconds, "tokens": tokens}

    def endless(self, settings: Any) -> Iterator[list[dict]]:
        """This rank's micro-batches, update after update, epoch after epoch."""
        data = self.run.data.train
        sampler = ddp.ShardSampler(len(data), settings.seed, self.ranks, self.launch.rank)
        own = {"sampler": sampler, "collate_fn": self.run.collate}
        loader = DataLoader(data, settings.batch_size, **own)
        for epoch in itertools.count(1):
            sampler.set_epoch(epoch)
            yield from ddp.updates_of_epoch(loader, sampler, settings)

    def meet(self) -> None:
        """Lets all ranks of the team go on at one time. Ranks meet."""
        self.finish()
        if self.ranks > 1:
            dist.barrier()

    def finish(self) -> None:
        """Waits until what was begun on a GPU is done."""
        if self.launch.device.type == "cuda":
            torch.cuda.synchronize(self.launch.device)
