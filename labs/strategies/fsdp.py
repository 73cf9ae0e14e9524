"""FSDP: DDP that keeps only its share of parameters, gradients and optimizer state.

Batch: divided by rows, as in DDP.
Model: every tensor is cut in N along its first dimension. A layer is put together by an all-gather
just before it is needed, and taken apart again after its use.
Step: as in DDP.
Ranks meet: all-gathers of weights in forward and backward; in place of DDP's all-reduce of a bucket
a reduce-scatter of each layer's gradients, after which a rank holds the mean of its share only.

This is ZeRO stage 3 (Rajbhandari et al. 2020; Zhao et al. 2023, PyTorch FSDP). In your own script
the change is the same: where DDP wraps the model, `fully_shard` on each layer, then on the root,
and the optimizer is made afterwards, from the shares.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from labs.strategies.step import DDP


class FSDP(DDP):
    """The batch and the step are DDP's; only the model is divided."""

    def divide_model(self, model: nn.Module) -> nn.Module:
        self.part, self.parts = self.launch.rank, self.launch.world_size
        mesh = init_device_mesh(self.launch.device.type, (self.launch.world_size,))
        return shard_layers(model, mesh, self.settings.precision)


def shard_layers(model: nn.Module, mesh: Any, precision: str) -> nn.Module:
    """Cuts each layer, and then what is left at the root, over the mesh. Each cut is one message in
    forward and one in backward; the root's weights stay together in between.

    bf16: layers are gathered and computed in it, and gradients summed up in fp32; the shares, which
    the optimizer changes, stay fp32.
    """
    policy = MixedPrecisionPolicy()
    if precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.encoder.layers:  # of a Qwen or Llama: model.model.layers
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)
