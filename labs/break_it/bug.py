"""What a bug is, and what all of them train."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from labs.break_it.detectors import beside_one_process
from llm_ddp_parallel_training import (
    TinyCausalTransformer,
    build_data,
    parse_settings,
    tiny_collator,
)

BUGS: dict[str, type[Bug]] = {}  # by name, in the order in which they are told


class Bug:
    """One bug. `class NoSampler(Bug, name="no-sampler")` also puts it on the list.

    The first line of a subclass's docstring is its title, the rest says why it matters. `wrong`,
    `right` and `detector` are plain functions without `self`; the first line of each docstring
    stands in the table of all bugs.

    `given` builds the arguments of both versions. What a version returns goes to `symptom`, which
    makes a number and a sentence of it, and to `detector`, which raises `AssertionError` when it
    finds the bug. All of them run on all ranks, each with a `Bug` of its own, and may meet.
    """

    debug: ClassVar[str] = ""  # TORCH_DISTRIBUTED_DEBUG, if that is what detects it
    wrong: ClassVar[Callable]
    right: ClassVar[Callable]
    detector: ClassVar[Callable]

    def __init_subclass__(cls, name: str = "") -> None:
        for part in {"wrong", "right", "detector"} & vars(cls).keys():
            setattr(cls, part, staticmethod(vars(cls)[part]))
        if name:
            BUGS[name] = cls

    def __init__(self, folder: Path) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.folder = folder  # the same on all ranks, empty
        data = build_data(parse_settings(["--cpu"]))
        self.dataset, self.validation = list(data.train), list(data.validation)  # (id, text) each
        torch.manual_seed(0)
        self.model = TinyCausalTransformer()  # bare, and alike on all ranks by its seed

    def given(self) -> tuple:
        raise NotImplementedError

    def symptom(self, *outcome: Any) -> tuple[float, str]:
        raise NotImplementedError

    def batch(self, samples: Sequence[tuple[int, str]], cut: int | None = None) -> dict:
        """Samples as what the model takes: input_ids and labels, int64 [B, 64] each.

        `cut`: only so many bytes of each text, so that all have as many tokens.
        """
        batch = tiny_collator([(record, text[:cut]) for record, text in samples], seq_len=64)
        return {"input_ids": batch["input_ids"], "labels": batch["labels"]}

    def own_batches(self, count: int) -> list[dict[str, torch.Tensor]]:
        """So many batches of 4 for this rank; no two ranks share a sample."""
        own = self.dataset[self.rank :: self.ranks]
        return [self.batch(own[4 * i : 4 * i + 4]) for i in range(count)]


class Stop(Bug):
    """A bug that stops the run: ranks wait for ever, or PyTorch raises an error.

    Its symptom is seen from outside. The detector gets a version to run and its arguments, so that
    it can do something before, around or after it, and raises what ends the waiting.
    """

    def detector(train, *arguments):
        """none is needed: PyTorch raises an error"""
        train(*arguments)


class OnPaper(Bug):
    """A bug that cannot be made on a CPU: shown, but not run. `seen` says what it would do."""

    seen: ClassVar[str]


def gradient_is_off(bug: Bug, model: nn.Module, micro_batches: list[dict]) -> tuple[float, str]:
    """The symptom of all bugs that divide by a wrong number."""
    found, wanted = beside_one_process(model, micro_batches)
    error = float((found - wanted).norm() / wanted.norm())
    shown = f"{error:.0%}" if error >= 0.01 else figure(error)
    return error, f"the gradient is {shown} (relative) off that of one process"


def weights_differ(bug: Bug, model: nn.Module) -> tuple[float, str]:
    """The symptom of all bugs that drive replicas apart: the largest difference of any weight."""
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    copies = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, flat)
    spread = max(float((copy - copies[0]).abs().max()) for copy in copies)
    return spread, f"the ranks' weights differ by up to {figure(spread)}"


def figure(x: float) -> str:
    """A difference as it is written: 8.4e-08, 0."""
    return f"{x:.1e}" if x else "0"
