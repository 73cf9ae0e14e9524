"""Looking on while a step runs: a clock for all ranks, the step's phases, DDP's buckets.

Nothing here changes what a step computes.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import llm_ddp_parallel_training as ddp

COPIES = "observer's copies"  # what the lab itself does between two phases

Tensors = dict[str, torch.Tensor]  # by parameter name


class Clock:
    """Seconds since the start of a step, the same moment for all ranks of a machine.

    A GPU works behind Python's back. `now` waits until it has done all it was given, so that a
    phase ends when its work does. Inside the backward pass waiting would destroy the overlap that
    is to be seen: `mark` leaves an event in the GPU's own queue instead, and `at` reads it later.
    """

    def __init__(self, launch: ddp.Launch) -> None:
        """Ranks meet."""
        self.device, self.zero = launch.device, 0.0
        if launch.world_size > 1:
            dist.barrier()
        self.zero = self.now()
        if launch.local_world_size == launch.world_size:  # all read one and the same clock
            self.zero = max(ddp.gather(self.zero, launch))
        self.first = self.now()  # with nothing to do, a GPU reaches the mark at once
        self.first_mark = self.mark()

    def now(self) -> float:
        getattr(torch, self.device.type).synchronize()  # nothing to wait for on the CPU
        return time.perf_counter() - self.zero

    def mark(self) -> Any:
        """A point in this device's work, cheap enough for the middle of a backward pass."""
        if self.device.type != "cuda":
            return time.perf_counter() - self.zero
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def at(self, mark: Any) -> float:
        """When a mark was reached."""
        if isinstance(mark, float):
            return mark
        return self.first + self.first_mark.elapsed_time(mark) / 1000  # it counts milliseconds


def random_state(device: torch.device) -> list[torch.Tensor]:
    """The states of the generators that dropout draws from: the CPU's, and a GPU's."""
    gpu = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *gpu]


def set_random_state(state: list[torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(state[0])
    for of_gpu in state[1:]:
        torch.cuda.set_rng_state(of_gpu, device)


class Observer:
    """Takes the place of the reference's `Watch` in a step, and passes all on to it.

    `phases` collects [name, begin, end] in seconds of the clock. `gradient` is what the optimizer
    got. `random` holds the random state before each forward pass, with which another pass draws
    the same dropout masks.
    """

    signal = 0  # nobody asks for the end of the run in the middle of an explanation

    def __init__(self, launch: ddp.Launch, bare: nn.Module) -> None:
        """Ranks meet, to begin at the same time."""
        self.launch, self.bare, self.clock = launch, bare, Clock(launch)
        self.phases: list[list] = []
        self.gradient: Tensors = {}
        self.random: list[list[torch.Tensor]] = []

    def enter(self, phase: str, meets: bool = False, patient: bool = False) -> None:
        if phase == "forward":
            self.begin(COPIES)
            self.random.append(random_state(self.launch.device))
        self.begin(phase)
        self.launch.watch.enter(phase, meets, patient)

    def before_update(self, *_: Any) -> None:
        """A hook of the optimizer: it is about to use the gradients that are there."""
        self.begin(COPIES)
        self.gradient = {name: p.grad.clone() for name, p in ddp.trained_parameters(self.bare)}
        self.begin("optimizer")

    def begin(self, phase: str) -> None:
        self.end()
        self.phases.append([phase, self.clock.now(), 0.0])

    def end(self) -> None:
        if self.phases:
            self.phases[-1][2] = self.clock.now()


@dataclasses.dataclass
class Bucket:
    """One message of DDP; times are marks of the clock."""

    local: Tensors  # a copy of this rank's own gradients, in the order of the buffer
    bytes: int
    ready: Any  # the last of its gradients is there
    sent: Any = None  # the all-reduce is on its way, after that copy
    done: Any = None  # the sum has arrived


class BucketWatch:
    """DDP's communication hook: notes each bucket before any other rank has seen it, and passes it
    on to DDP's own all-reduce.

    Without a hook, DDP multiplies by 1/N where its all-reduce hook divides by N: the same bits
    when N is a power of two, else the same but for the last place.
    """

    def __init__(self, model: nn.parallel.DistributedDataParallel, bare: nn.Module) -> None:
        self.names = {id(p): name for name, p in ddp.trained_parameters(bare)}
        self.buckets: list[Bucket] = []  # of the step that `clock` belongs to
        self.clock: Clock | None = None
        model.register_comm_hook(None, self.hook)

    def hook(self, group, bucket):  # DDP would refuse its annotations, which are text here
        """Called for every bucket, on the thread that runs the backward pass."""
        ready, names = self.clock.mark(), [self.names[id(p)] for p in bucket.parameters()]
        local = dict(zip(names, [g.clone() for g in bucket.gradients()]))
        noted = Bucket(local, bucket.buffer().nbytes, ready)
        self.buckets.append(noted)

        def done(future: torch.futures.Future) -> torch.Tensor:
            """Called when the sum is there; with NCCL, in a stream that waits for it."""
            noted.done = self.clock.mark()
            return future.value()

        noted.sent = self.clock.mark()
        return allreduce_hook(group, bucket).then(done)  # ranks meet, beside the backward pass
