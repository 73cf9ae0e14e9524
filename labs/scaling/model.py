"""More ranks than there are here: what follows from the measurements, under stated assumptions.

The duration of a step with N ranks is

    own work + waiting for the slowest + sum of the losses + what shows of the all-reduce + rest

with all five terms measured here, on n ranks, so that n ranks come out as measured. With N

    waiting      grows as the largest of N normal values, which a step's deviations are taken for;
    messages     last 2 ⌈log2 N⌉ latencies (a tree up and down, as NCCL has it for small messages)
                 and 2 (N − 1)/N · bytes / bandwidth (Patarasuk and Yuan 2009);
    all-reduce   hides as many seconds behind the backward pass as here, and shows the rest;
    own work     and the rest, such as DDP's hooks, stay.

It ends at 8 n ranks: further away the machine, the links and the batch are different ones.
`labs.planner` computes those from data sheets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from labs.planner.faults import expected_slowest
from labs.scaling.measured import Measured

LOSSES = 32  # bytes, with the sum of the losses
BACKWARD = 2 / 3  # of a step's own work; with matrix products it is twice the forward pass
FURTHEST = 8  # times as many ranks as were measured


def message_seconds(ranks: int, size: float, link: tuple[float, float]) -> float:
    """Duration of an all-reduce of `size` bytes; `link`: (seconds a message, bytes a second)."""
    latency, bandwidth = link
    steps = 2 * math.ceil(math.log2(ranks))
    return steps * latency + 2 * (ranks - 1) / ranks * size / bandwidth


def fit_link(messages: Sequence[tuple[int, int, float]]) -> tuple[float, float]:
    """(seconds a message, bytes a second) from plain all-reduces: (ranks, bytes, seconds) each.

    `message_seconds` is linear in latency and 1 / bandwidth: least squares of the relative errors.
    Where one of the two comes out below zero, it is too small to be seen beside the other, and is
    left out.
    """
    rows = np.array([
        (message_seconds(n, 0, (1, 1)) / seconds, message_seconds(n, size, (0, 1)) / seconds)
        for n, size, seconds in messages
    ])  # fmt: skip
    fitted = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)[0]
    for one in (0, 1):
        if fitted[1 - one] < 0:
            fitted = np.zeros(2)
            fitted[one] = rows[:, one].sum() / (rows[:, one] ** 2).sum()
    return float(fitted[0]), 1 / float(fitted[1]) if fitted[1] else math.inf


class Prediction:
    """Steps of N ranks that have cores of their own, from those of `ranks` here; in seconds."""

    def __init__(self, measured: dict[tuple, Measured], ranks: int, size: int) -> None:
        """`size`: bytes of the gradients."""
        links = [m for (what, _), m in measured.items() if what == "link"]
        self.link = fit_link([message for link in links for message in link.messages()])
        self.ranks, self.size = ranks, size
        own = measured["independent", ranks].durations()
        self.own = float(np.median(own.mean(axis=(1, 2))))
        full, no_sync = (float(np.median(measured[what, ranks].step_seconds()))
                         for what in ("weak", "no_sync"))  # fmt: skip
        added, meeting = max(full - no_sync, 0.0), max(no_sync - self.own, 0.0)
        # Steps relative to their round, so that the drift of the machine does not count.
        deviation = float((own / own.mean(axis=(1, 2), keepdims=True)).std())
        losses = min(message_seconds(ranks, LOSSES, self.link), meeting)
        self.waiting = min(self.own * deviation * expected_slowest(ranks), meeting - losses)
        plain = message_seconds(ranks, size, self.link)
        self.hidden = min(max(plain - added, 0.0), BACKWARD * self.own)
        self.rest = 0.0
        self.rest = full - self.step(ranks)

    def step(self, ranks: int) -> float:
        """Duration of a step, in seconds."""
        if ranks == 1:
            return self.own
        waiting = self.waiting * expected_slowest(ranks) / expected_slowest(self.ranks)
        losses, gradients = (message_seconds(ranks, b, self.link) for b in (LOSSES, self.size))
        return self.own + waiting + losses + max(gradients - self.hidden, 0.0) + self.rest

    def efficiency(self, ranks: int) -> float:
        """Tokens a second, as a share of N times one rank's."""
        return self.own / self.step(ranks)

    def numbers(self) -> list[int]:
        """The numbers of ranks that it is for: powers of two."""
        return [n for n in (2**i for i in range(12)) if self.ranks < n <= FURTHEST * self.ranks]
