"""What ranks send and what memory a step needs, counted in one step of the training itself.

Nothing is computed from the model's formula: a `TorchDispatchMode` sees each operator that its
thread runs. Those of PyTorch's c10d libraries are communication, DDP's too, whose C++ reducer runs
them inside the backward pass; all others show the tensors that there are. (PyTorch's own
`CommDebugMode` counts calls, but no bytes, and it does not see `send`.)
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WATCHED_STEP = 3  # the one that is counted: DDP arranges its buckets until step 2
COLLECTIVES = {  # PyTorch's operators, in place and functional, by what they are called
    "allreduce_": "all-reduce", "all_reduce": "all-reduce", "all_reduce_": "all-reduce",
    "_allgather_base_": "all-gather", "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter", "reduce_scatter_tensor": "reduce-scatter",
    "broadcast_": "broadcast", "send": "send",
}  # fmt: skip
NOT_SENT = {"recv_", "barrier", "wait_tensor", "_wrap_tensor_autograd"}  # the sender's, or empty


class Watch(TorchDispatchMode):
    """Counts messages and memory while it is entered.

    `traffic` maps a collective to [messages, bytes, bytes that cross a link]; see `over_a_link`.
    `activations` and `gathered` are the most bytes that were alive at once, of tensors that are
    neither parameters, gradients nor optimizer state: `gathered` are FSDP's buffers for whole
    layers.
    """

    def __init__(self, known: Iterable[torch.Tensor] = (), parameters: Sequence = ()) -> None:
        super().__init__()
        self.traffic: dict[str, list[float]] = {}
        self.activations, self.gathered, self.parameters = 0, 0, parameters
        self.known = weakref.WeakSet(local(t).untyped_storage() for t in known)
        self.alive: weakref.WeakSet = weakref.WeakSet()
        self.buffers: weakref.WeakSet = weakref.WeakSet()  # those of `alive` that FSDP gathers in

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # it first takes itself apart, into what is counted here
        result = func(*args, **(kwargs or {}))
        library = getattr(func, "namespace", "")
        if library in ("c10d", "_c10d_functional"):
            self._count_message(func.overloadpacket.__name__, args, result)
        elif self.parameters:
            self._count_memory(tensors_in((args, kwargs, result)), library == "fsdp")
        return result

    def counts(self) -> dict[str, Any]:
        """What was counted, by name."""
        return {name: getattr(self, name) for name in ("gathered", "activations", "traffic")}

    def _count_message(self, name: str, args: tuple, result: Any) -> None:
        if name in NOT_SENT:
            return
        name = COLLECTIVES.get(name, name)
        # The whole gradient of an all-reduce, the result of a gather, the input of a scatter.
        size = max(nbytes(tensors_in(value)) for value in (*args, result))
        amounts = (1, size, size * over_a_link(name, ranks_of(args)))
        entry = self.traffic.setdefault(name, [0, 0, 0])
        entry[:] = [old + new for old, new in zip(entry, amounts)]

    def _count_memory(self, tensors: list[torch.Tensor], gathering: bool) -> None:
        for tensor in tensors:
            self.alive.add(tensor.untyped_storage())
            if gathering:
                self.buffers.add(tensor.untyped_storage())
        gradients = {local(p.grad).untyped_storage() for p in self.parameters if p.grad is not None}
        new = [s for s in self.alive if s not in self.known and s not in gradients]
        buffers = sum(s.nbytes() for s in new if s in self.buffers)
        self.gathered = max(self.gathered, buffers)
        self.activations = max(self.activations, sum(s.nbytes() for s in new) - buffers)


def over_a_link(collective: str, ranks: int) -> float:
    """Bytes that a rank of a ring sends to the next one, for each byte of the whole tensor.

    (N − 1)/N to gather or to reduce and scatter, both one after the other to all-reduce (Patarasuk
    and Yuan 2009); a message from one to another is sent once.
    """
    rounds = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}.get(collective)
    return rounds * (ranks - 1) / ranks if rounds else 1.0


def ranks_of(args: tuple) -> int:
    """The size of the group that an operator of c10d was called with."""
    for value in reversed(args):
        if isinstance(value, str):  # functional operators name their group, as the last argument
            return _resolve_process_group(value).size()
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value).size()
    return dist.get_world_size()


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of nested lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that this rank holds of them."""
    return sum(local(t).numel() * t.element_size() for t in tensors)


def state_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All tensors that the optimizer keeps."""
    return [tensor for state in optimizer.state.values() for tensor in state.values()]


def held(parameters: list, gradients: list, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of what this rank holds of the model and its training state."""
    parts = {"parameters": parameters, "gradients": gradients, "optimizer": state_of(optimizer)}
    return {name: nbytes(tensors) for name, tensors in parts.items()}
