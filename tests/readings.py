"""Counts on the CPU what a GPU would be waited for in a training step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import llm_ddp_parallel_training as ddp


class Readings(TorchDispatchMode):
    """Values that Python asks for, and sizes that depend on values; `seen` has their names."""

    NAMES = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, function: Any, kinds: Any, arguments: tuple = (), options: dict | None = None
    ) -> Any:
        name = function.__name__.partition(".")[0]
        by_mask = name in ("index", "index_put", "index_put_") and any(
            i is not None and i.dtype in (torch.bool, torch.uint8) for i in arguments[1]
        )
        if name in self.NAMES or by_mask:
            self.seen.append(name)
        return function(*arguments, **(options or {}))


@contextlib.contextmanager
def readings_of_a_step() -> Iterator[list[str]]:
    """The names of all readings inside; `tolist`, which dispatches nothing on the CPU, too.

    What the step counts in the labels of a batch is no reading: they stay on the CPU.
    """
    tolist, valid_targets = torch.Tensor.tolist, ddp.valid_targets

    def on_the_cpu(labels: torch.Tensor) -> int:
        with _disable_current_modes():
            return valid_targets(labels)

    def read(tensor: torch.Tensor) -> Any:
        readings.seen.append("tolist")
        return tolist(tensor)

    readings = Readings()
    torch.Tensor.tolist, ddp.valid_targets = read, on_the_cpu
    try:
        with readings:
            yield readings.seen
    finally:
        torch.Tensor.tolist, ddp.valid_targets = tolist, valid_targets
