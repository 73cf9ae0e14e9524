"""GPUs, networks and the machines made of them: data sheets, and how much of them is reached."""

from __future__ import annotations

import dataclasses
import math
from typing import Any


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Of the vendor's data sheet, but for `share`."""

    memory: float  # bytes; the few percent that a GB of 2^30 has more are left to CUDA and NCCL
    peak: float  # FLOP/s of dense 16-bit matrix products
    link: float  # bytes/s, each direction, to the other GPUs of the node (NVLink or PCIe)
    network: str  # what usually connects nodes of it
    share: float  # of the peak that the kernels of a very wide model reach, see `kernel_share`
    flash: bool = True  # has flash attention, in 16 bits
    half_width: int = 600  # of a model whose kernels reach half of that share


# Shares: A100 and H100 lie between the frameworks of the published runs that wiki/Planning.md
# lists; H200 computes like H100. All others are guesses by likeness: nobody measured them here.
GPUS = {
    "v100-32gb": Gpu(32e9, 125e12, 150e9, "infiniband-edr", 0.60, flash=False),
    "t4-16gb": Gpu(16e9, 65e12, 16e9, "ethernet-25g", 0.40, flash=False),
    "a100-40gb": Gpu(40e9, 312e12, 300e9, "infiniband-hdr", 0.62),
    "a100-80gb": Gpu(80e9, 312e12, 300e9, "infiniband-hdr", 0.62),
    "h100-80gb": Gpu(80e9, 989e12, 450e9, "infiniband-ndr", 0.50),
    "h200-141gb": Gpu(141e9, 989e12, 450e9, "infiniband-ndr", 0.50),
    "b200-180gb": Gpu(180e9, 2250e12, 900e9, "infiniband-ndr", 0.50),
    "mi300x-192gb": Gpu(192e9, 1307e12, 448e9, "infiniband-ndr", 0.40),
    "l4-24gb": Gpu(24e9, 121e12, 32e9, "ethernet-100g", 0.60),
    "rtx-3090-24gb": Gpu(24e9, 71e12, 32e9, "ethernet-10g", 0.60),
    "rtx-4090-24gb": Gpu(24e9, 165e12, 32e9, "ethernet-10g", 0.60),
    # Two 2.8 GHz cores and Gloo over loopback, as measured there (tests/benchmarks/README.md: tiny
    # models 64 and 128 wide, LoRA 896 wide); memory is what the host has.
    "cpu": Gpu(math.inf, 190e9, 1e9, "ethernet-10g", 1.0, False, half_width=80),
}


@dataclasses.dataclass(frozen=True)
class Network:
    """Cards between nodes: nominal bytes/s each direction, and seconds that a message takes."""

    card: float
    latency: float
    cards_by_gpu: bool  # a card for every GPU, as in DGX machines; else one for the node


NETWORKS = {
    "infiniband-ndr": Network(50e9, 5e-6, True),  # 400 Gb/s
    "infiniband-hdr": Network(25e9, 5e-6, True),  # 200 Gb/s
    "infiniband-edr": Network(12.5e9, 5e-6, True),  # 100 Gb/s
    "ethernet-100g": Network(12.5e9, 20e-6, False),
    "ethernet-25g": Network(3.125e9, 40e-6, False),
    "ethernet-10g": Network(1.25e9, 40e-6, False),
}
NODE_LATENCY = 3e-6  # seconds, NVLink or PCIe inside a node
REACHED = 0.8  # of a link's nominal rate; NCCL reaches about 235 of an A100's 300 GB/s in a node


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine(Gpu):
    """Equal nodes of equal GPUs; here `link` is what a GPU reaches inside its node."""

    name: str
    nodes: int
    gpus_per_node: int
    node_rate: float  # bytes/s that a node's cards reach together
    latency: float  # seconds between nodes

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    def of_size(self, gpus: int) -> Machine:
        """The same with another number of GPUs; fewer than a node are a part of one."""
        per_node = min(self.gpus_per_node, gpus)
        return dataclasses.replace(self, nodes=math.ceil(gpus / per_node), gpus_per_node=per_node)

    def kernel_share(self, width: int) -> float:
        """Of the peak that the kernels reach while they compute, for a model of this width.

        Matrix products grow with the square of the width; the rest of a layer (norms, activation,
        sums: memory traffic) with the width. So the time is a · width² + b · width, and the share
        width / (width + b/a) of what products alone would reach. b/a = 600 is fitted to 51
        published speeds of MPT models from 125M to 70B parameters on 8 A100 and 8 H100
        (llm-foundry, scripts/train/benchmarking); it leaves a deviation of 9 %.
        """
        return self.share * width / (width + self.half_width)


def machine_of(name: str, nodes: int, gpus_per_node: int, **instead: Any) -> Machine:
    """A machine by the name of its GPU; `instead` are values for the GPU's own, or None."""
    values = dataclasses.asdict(GPUS[name]) | {k: v for k, v in instead.items() if v}
    values["link"] *= REACHED
    card = NETWORKS[values["network"]]
    rate = REACHED * card.card * (gpus_per_node if card.cards_by_gpu else 1)
    shape = {"name": name, "nodes": nodes, "gpus_per_node": gpus_per_node}
    return Machine(**values, **shape, node_rate=rate, latency=card.latency)
