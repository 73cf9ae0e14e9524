"""Parameter server: rank 0 keeps the weights and the optimizer, the others compute gradients.

Batch: divided by rows among the N − 1 workers.
Model: every worker has a copy, the server too.
Step: a worker runs forward and backward on its part, pushes its mean gradient and number of tokens,
and pulls the weights.
Ranks meet: each worker only the server. With --mode sync the server answers when all have pushed,
which is DDP. With async every push is an update and is answered at once: nobody waits, but by then
others may have pushed. A gradient's staleness is the number of updates since its weights were
pulled.

Messages go through Gloo and main memory, on CUDA too: NCCL cannot run the threads' receives side by
side, and a server of this kind lives on a host (Li et al. 2014; Dean et al. 2012).
"""

from __future__ import annotations

import collections
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from labs.strategies.step import Strategy
from labs.strategies.traffic import Watch, held
from llm_ddp_parallel_training import valid_targets


class ConnectionLost(Exception):
    """A message could not be sent or received: the process at the other end is gone."""


class ParameterServer(Strategy):
    """A worker's step here, the server's work in `Server`."""

    least_ranks = 2

    def divide_model(self, model: nn.Module) -> nn.Module:
        self.part, self.parts = self.launch.rank - 1, self.launch.world_size - 1
        self.group = dist.new_group(backend="gloo")
        self.parameters, self.version, self.steps = list(model.parameters()), 0, 0
        return model

    def forward_backward(self, part: dict, tokens: int) -> torch.Tensor:
        loss = self.model(**part)  # S_r / n_r; the server weights it by n_r / n
        loss.backward()
        self.loss, self.tokens = loss.item(), valid_targets(part["labels"])
        return loss.detach()

    def update(self) -> None:
        """Pushes the gradient, pulls the weights: 4 · parameters bytes each way."""
        if self.launch.rank == self.parts and self.options.kill_worker_after == self.steps:
            os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))
        self.steps += 1
        flat = parameters_to_vector([p.grad for p in self.parameters]).cpu()
        note = torch.tensor([self.version, self.tokens, self.loss], dtype=torch.float64)
        for exchange in (dist.send, dist.recv):  # ranks meet: with --mode sync, all of them
            for tensor in (note, flat):
                exchange(tensor, 0, self.group)
        self.version = int(note[0])
        with torch.no_grad():
            vector_to_parameters(flat.to(self.launch.device), self.parameters)
        self.optimizer.zero_grad(set_to_none=True)

    def total_loss(self, loss: torch.Tensor) -> float:
        return float(loss)  # a worker's own; the server adds up


class Server:
    """What rank 0 does: one thread for each worker, and one update at a time."""

    def __init__(self, strategy: ParameterServer, tell: Callable[[int, float], None]) -> None:
        self.s, self.tell = strategy, tell  # the number and the loss of each update
        self.sync = strategy.options.mode == "sync"
        self.turn = threading.Condition()  # held by the thread that uses what follows
        self.alive, self.arrived = set(range(1, strategy.launch.world_size)), set()
        self.sum = torch.zeros(sum(p.numel() for p in strategy.parameters))
        self.pushed = [torch.empty_like(self.sum) for _ in self.alive]
        self.version, self.loss, self.tokens, self.losses = 0, 0.0, 0.0, []
        self.first_gradients: dict[str, torch.Tensor] = {}
        self.staleness: collections.Counter = collections.Counter()
        self.lost: dict[int, int] = {}  # workers that died, and after which update

    def serve(self) -> dict[str, Any]:
        """Answers all workers until each has made its steps or died; what there is to report."""
        with ThreadPoolExecutor(len(self.alive)) as pool:
            served = list(pool.map(self.serve_worker, sorted(self.alive)))
        steps, gradients = self.s.settings.max_steps, [self.sum, self.sum, *self.pushed]
        return held(self.s.parameters, gradients, self.s.optimizer) | {  # one `sum` is the mean's
            "gathered": 0,
            "activations": 0,
            "traffic": {"send": [sum(each) / steps for each in zip(*served)]},
            "first_gradients": self.first_gradients,
            "losses": self.losses,
            "staleness": dict(sorted(self.staleness.items())),  # by number of gradients
            "lost_workers": self.lost,
        }

    def serve_worker(self, worker: int) -> list[float]:
        """Takes gradients and answers with weights; what was sent to this worker."""
        note, gradient = torch.zeros(3, dtype=torch.float64), self.pushed[worker - 1]
        watch = Watch()  # a mode belongs to a thread, so each has its own
        try:
            for _ in range(self.s.settings.max_steps):
                self.exchange(dist.recv, worker, note, gradient)
                with self.turn:
                    self.add(worker, note, gradient)
                    while worker in self.arrived:  # --mode sync: until the last one pushes
                        self.turn.wait()
                    note[0] = self.version
                    weights = parameters_to_vector(self.s.parameters).detach().cpu()
                with watch:
                    self.exchange(dist.send, worker, note, weights)
        except ConnectionLost:
            with self.turn:
                self.lost[worker] = self.version
            self.s.launch.say(f"rank {worker} is gone after update {self.version}; others go on")
        with self.turn:
            self.alive.discard(worker)
            self.update_when_complete()  # the others may have been waiting for this one
        return watch.traffic.get("send", [0, 0, 0])

    def exchange(self, how: Callable, worker: int, *tensors: torch.Tensor) -> None:
        """Sends to the worker, or receives. Raises `ConnectionLost` if it is gone."""
        try:
            for tensor in tensors:
                how(tensor, worker, self.s.group)
        except RuntimeError as error:  # what Gloo raises when a connection breaks
            raise ConnectionLost from error

    def add(self, worker: int, note: torch.Tensor, gradient: torch.Tensor) -> None:
        """Adds n_r · ∇(S_r / n_r); divided by Σ n_r that is G of those who have pushed."""
        version, tokens, loss = note.tolist()
        self.staleness[self.version - int(version)] += 1
        self.sum.add_(gradient, alpha=tokens)
        self.loss += loss * tokens
        self.tokens += tokens
        self.arrived.add(worker)
        self.update_when_complete()

    def update_when_complete(self) -> None:
        """One update from what has arrived: of everybody alive, or with --mode async of anybody."""
        if not self.arrived or (self.sync and not self.arrived >= self.alive):
            return
        mean, start = (self.sum / max(self.tokens, 1)).to(self.s.launch.device), 0
        for parameter in self.s.parameters:
            parameter.grad = mean[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()
        self.first_gradients = self.first_gradients or self.s.gradients()
        self.s.optimizer.step()
        self.version += 1
        self.losses.append(self.loss / max(self.tokens, 1))
        self.tell(self.version, self.losses[-1])
        self.loss, self.tokens = 0.0, 0.0
        self.sum.zero_()
        self.arrived.clear()
        self.turn.notify_all()
