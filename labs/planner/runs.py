"""What is trained in which portions (`Run`), and how it is divided over GPUs (`Layout`)."""

from __future__ import annotations

import dataclasses

from labs.planner.machines import Machine
from labs.planner.models import Model

# What each way of data parallelism divides over the ranks that share a model.
DIVIDED = {
    "ddp": (),
    "zero1": ("weights", "optimizer"),  # fp32 weights; the 16-bit ones stay whole
    "zero2": ("weights", "gradients", "optimizer"),  # fully_shard(reshard_after_forward=False)
    "fsdp": ("weights", "gradients", "optimizer"),  # fully_shard
}
CHECKPOINTING = ("none", "selective", "full")


@dataclasses.dataclass(frozen=True)
class Run:
    """What is trained, in which portions, on what."""

    model: Model
    machine: Machine
    seq_len: int
    batch: int  # sequences of a micro-batch on one data-parallel rank
    accum: int = 1  # micro-batches an update
    mixed: bool = True  # 16-bit matrix products over fp32 weights
    lora_r: int = 0  # 0: all parameters are trained
    lora_targets: tuple[str, ...] = ("q_proj", "v_proj")
    dropout: bool = False
    saving: bool = False  # checkpoints during the run
    jitter: float = 0.02  # standard deviation of a GPU's time for a micro-batch, relative
    overlap: float = 0.8  # share of the time that communication could hide behind that it does
    read_rate: float = 1e9  # bytes/s of training data that a node can read

    @property
    def width(self) -> int:
        """Bytes of an activation, and of a frozen weight."""
        return 2 if self.mixed else 4

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.batch * self.seq_len

    @property
    def trained(self) -> int:
        m = self.model
        return m.lora(self.lora_r, self.lora_targets) if self.lora_r else m.parameters

    @property
    def repeats_keys(self) -> bool:
        """Whether keys and values are copied for every head.

        Without flash attention (V100, T4, fp32, CPU), PyTorch's kernels do not share them.
        """
        m = self.model
        return m.kv_heads < m.heads and not (self.mixed and self.machine.flash)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a run is divided: `data` replicas or shards × `tensor` × `pipeline` ranks."""

    kind: str
    data: int
    shard: int = 1  # ranks that share one copy of what `kind` divides; the rest are replicas
    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1  # of layers on a pipeline rank: more than one is the interleaved schedule
    checkpointing: str = "none"
    sequence: bool = True  # tensor ranks also divide what lies between their products

    @property
    def gpus(self) -> int:
        return self.data * self.tensor * self.pipeline

    @property
    def way(self) -> str:
        """Its name without checkpointing."""
        hybrid = self.kind == "fsdp" and 1 < self.shard < self.data
        schedule = "pipeline" if self.chunks == 1 else "interleaved"
        parts = [f"{schedule} {self.pipeline}"] if self.pipeline > 1 else []
        parts += [f"tensor {self.tensor}"] if self.tensor > 1 else []
        if self.data > 1 or not parts:
            parts.append(("hsdp" if hybrid else self.kind) + f" {self.data}")
        return " × ".join(parts)

    @property
    def name(self) -> str:
        return self.way + (f" ({self.checkpointing})" if self.checkpointing != "none" else "")
