"""Pipeline: each rank holds some of the layers; micro-batches follow each other through them.

Batch: not divided over ranks, but into micro-batches.
Model: layers in N groups, the embeddings with the first, norm and head with the last.
Step: GPipe runs all forward passes, then all backward passes; 1F1B alternates as soon as it can, so
that a stage keeps the activations of N micro-batches at most (Narayanan et al. 2019, PipeDream;
2021, section 2.2).
Ranks meet: each stage sends activations to the next one, and their gradients back.

While the first micro-batch travels down and the last one back, stages have nothing to do. With m
micro-batches and equal stages this bubble is (N − 1) / (m + N − 1) of a step, under both schedules.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from labs.strategies.step import Strategy
from llm_ddp_parallel_training import gather, summed_loss


class Pipeline(Strategy):
    """The layers are divided; a step is what PyTorch's schedule makes of it."""

    least_ranks = 2

    def divide_model(self, model: nn.Module) -> nn.Module:
        rank, ranks, device = self.launch.rank, self.launch.world_size, self.launch.device
        module = Stage(model, rank, ranks)
        self.stage = PipelineStage(module, rank, ranks, device)
        schedule = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[self.options.schedule]
        # The loss of a micro-batch is S_j / n: summed up they are exact, so nothing is averaged.
        count = self.options.micro_batches
        self.schedule = schedule(self.stage, count, self.micro_loss, scale_grads=False)
        return module

    def micro_loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """S_j / n of a micro-batch, on the last stage."""
        return summed_loss(logits, labels)[0] / self.tokens

    def forward_backward(self, part: dict, tokens: int) -> torch.Tensor:
        self.tokens, losses, first, last = tokens, [], self.stage.is_first, self.stage.is_last
        self.schedule.step(  # ranks meet: every activation and its gradient is sent and awaited
            *([part["input_ids"]] if first else []),
            **({"target": part["labels"], "losses": losses} if last else {}),
            return_outputs=False,
        )
        own = torch.zeros((), dtype=torch.float64, device=self.launch.device)
        return own + sum(loss.detach() for loss in losses)

    def total_loss(self, loss: torch.Tensor) -> float:
        dist.all_reduce(loss)  # ranks meet: only the last stage has anything to add
        return float(loss)

    def gradients(self) -> dict[str, torch.Tensor]:
        stages = gather(super().gradients(), self.launch)  # ranks meet
        return {name: gradient for stage in stages for name, gradient in stage.items()}


class Stage(nn.Module):
    """One stage of a `TinyCausalTransformer`; its parameters keep their names in the model."""

    def __init__(self, model: nn.Module, index: int, stages: int) -> None:
        super().__init__()
        layers = model.encoder.layers
        cuts = [len(layers) * i // stages for i in range(stages + 1)]
        own = {str(i): layers[i] for i in range(cuts[index], cuts[index + 1])}
        self.encoder = nn.ModuleDict({"layers": nn.ModuleDict(own)})
        self.first, self.last = index == 0, index == stages - 1
        if self.first:
            self.token_emb, self.pos_emb = model.token_emb, model.pos_emb
        if self.last:
            self.norm, self.lm_head = model.norm, model.lm_head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """ids [b, T] or hidden [b, T, D] → hidden [b, T, D] or logits [b, T, V]."""
        if self.first:
            x = self.token_emb(x) + self.pos_emb.weight[: x.shape[1]]
        for layer in self.encoder["layers"].values():
            x = layer(x)
        return self.lm_head(self.norm(x)) if self.last else x
