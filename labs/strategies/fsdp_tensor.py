"""FSDP and tensor parallelism at once: a mesh of N/2 × 2 ranks.

Batch: by the mesh's rows; the two ranks of a row work on the same sequences.
Model: each matrix cut by tensor parallelism over the two ranks of a row, and each slice cut again
by FSDP over the ranks of a column.
Step: as in tensor parallelism.
Ranks meet: rows in every layer's all-reduces, columns in all-gathers and reduce-scatters. On real
machines a row is the GPUs of one node, with fast links for the frequent messages, and a column
crosses the network.
"""

from __future__ import annotations

import logging

from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from labs.strategies.fsdp import shard_layers
from labs.strategies.tensor import TensorParallel, split_matrices


class FSDPTensor(TensorParallel):
    """The model is divided twice; the rest is tensor parallelism's."""

    least_ranks = 4

    def divide_model(self, model: nn.Module) -> nn.Module:
        shape, names = (self.launch.world_size // 2, 2), ("data", "tensor")
        mesh = init_device_mesh(self.launch.device.type, shape, mesh_dim_names=names)
        self.part, self.parts = mesh["data"].get_local_rank(), shape[0]
        self.group = mesh["data"].get_group()
        # PyTorch warns that a tensor cut twice takes two gathers to be put together; only the
        # comparison of the gradients does that.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        split_matrices(model, mesh["tensor"])
        return shard_layers(model, mesh["data"], self.settings.precision)
