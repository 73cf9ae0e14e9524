"""Three ways to make one step, which must agree."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

import llm_ddp_parallel_training as ddp
from labs.explain_step.observe import Observer, Tensors, set_random_state

TOLERANCE = 1e-6  # relative, between DDP's gradient and that of one process


class Parts:
    """What a step needs: model, optimizer, scaler. `model` is `bare`, in DDP's wrapper or not."""

    def __init__(self, bare: nn.Module, model: nn.Module, settings: ddp.Settings) -> None:
        self.bare, self.model, self.settings = bare, model, settings
        self.optimizer = ddp.build_optimizer(bare, settings)
        self.scaler = torch.amp.GradScaler("cuda", enabled=settings.precision == "fp16")

    def twin(self) -> Parts:
        """A copy of all as it is now, without DDP. Frozen weights are shared with the original."""
        frozen = {id(p): p for p in self.bare.parameters() if not p.requires_grad}
        bare = copy.deepcopy(self.bare, frozen)
        twin = Parts(bare, bare, self.settings)
        twin.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        twin.scaler.load_state_dict(self.scaler.state_dict())
        return twin

    def weights(self) -> Tensors:
        """A copy of what is trained."""
        return {name: p.detach().clone() for name, p in ddp.trained_parameters(self.bare)}


@dataclasses.dataclass
class Outcome:
    """What a step came to."""

    loss: float  # the mean over all valid tokens of the global batch
    tokens: int  # how many those are
    gradient: Tensors  # G, of that loss, unclipped
    weights: Tensors
    clip_factor: float  # what clipping multiplied the gradient by


def capacity(settings: ddp.Settings) -> int:
    """c in the docstring of `training_step`: the most tokens a rank can have in an update."""
    return settings.batch_size * settings.grad_accum * (settings.seq_len - 1)


def norm(tensors: Tensors) -> float:
    """L2 norm of all values together."""
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors.values()))


def observed_step(parts: Parts, micro_batches: list[dict], observer: Observer) -> Outcome:
    """One update by the reference's own `training_step`, seen by the observer."""
    launch, s = dataclasses.replace(observer.launch, watch=observer), parts.settings
    watching = parts.optimizer.register_step_pre_hook(observer.before_update)
    step = ddp.training_step
    result = step(parts.model, parts.optimizer, parts.scaler, micro_batches, launch, s)
    watching.remove()
    observer.end()
    if result.skipped:
        raise ddp.RunError(
            "the gradient overflowed in fp16, so there is no step to explain; give "
            "--precision bf16 or fp32"
        )
    clip = min(1.0, s.clip / (result.grad_norm + 1e-6)) if s.clip else 1.0
    gradient = {name: g / clip for name, g in observer.gradient.items()}
    return Outcome(result.loss, result.learned, gradient, parts.weights(), clip)


def step_by_hand(
    parts: Parts, micro_batches: list[dict], random: list, launch: ddp.Launch, ranks: int
) -> Outcome:
    """The step as a textbook has it, with nothing of DDP and of `training_step`.

    `ranks` = 1: one process, the mean over all tokens of these micro-batches. More: each rank does
    this with its own, and there is one message for every parameter, after the backward pass; then
    ranks meet. Each micro-batch has the random state that it had before. (The constant c drops out.
    Without it the loss would enter the backward pass with another factor, and all that follows
    would be rounded in another way.)
    """
    s, trained, c = parts.settings, ddp.trained_parameters(parts.bare), capacity(parts.settings)
    totals = torch.zeros(2, dtype=torch.float64, device=launch.device)  # loss, tokens
    for batch, state in zip(micro_batches, random):
        set_random_state(state, launch.device)
        with ddp.autocast(launch, s):
            mean = parts.model(**ddp.inputs_of(batch, launch.device))
        tokens = ddp.valid_targets(batch["labels"])
        parts.scaler.scale(mean * (tokens / c)).backward()
        totals[0] += mean.item() * tokens
        totals[1] += tokens
    if ranks > 1:
        for tensor in [totals, *(p.grad for _, p in trained)]:
            dist.all_reduce(tensor)  # ranks meet
    loss, n = totals.tolist()
    parts.scaler.unscale_(parts.optimizer)
    for _, parameter in trained:
        parameter.grad *= c / n
    gradient = {name: p.grad.clone() for name, p in trained}
    if s.clip:
        nn.utils.clip_grad_norm_([p for _, p in trained], s.clip)
    parts.scaler.step(parts.optimizer)
    return Outcome(loss / n, int(n), gradient, parts.weights(), 1.0)


def prove(
    outcome: Outcome, twins: Sequence[Parts], micro_batches: list[dict], seen: Observer
) -> dict:
    """The step again without DDP, and again in one process, on rank 0. Ranks meet."""
    launch = seen.launch
    launch.watch.enter("proof", meets=True)
    naive = step_by_hand(twins[0], micro_batches, seen.random, launch, launch.world_size)
    shares = ddp.gather((micro_batches, seen.random), launch)
    proof = {}
    if launch.rank == 0:
        batches, states = (list(itertools.chain(*share)) for share in zip(*shares))
        alone = step_by_hand(twins[1], batches, states, launch, ranks=1)
        proof = {
            "DDP": difference(outcome, alone),
            "one all-reduce per parameter": difference(naive, alone),
        }
    return ddp.gather(proof, launch)[0]


def difference(a: Outcome, b: Outcome) -> dict[str, float]:
    """How far `a` is from `b`: relative for loss and gradient (norms), absolute for weights."""
    gradient = {name: a.gradient[name] - g for name, g in b.gradient.items()}
    weights = {name: a.weights[name] - w for name, w in b.weights.items()}
    return {
        "loss_relative": abs(a.loss - b.loss) / abs(b.loss),
        "gradient_relative": norm(gradient) / norm(b.gradient),
        "gradient_largest": max(float(d.abs().max()) for d in gradient.values()),
        "weights_largest": max(float(d.abs().max()) for d in weights.values()),
    }


def agrees(step: dict) -> bool:
    """Whether DDP, the hand-made average and one process came to the same loss and gradient."""
    return all(
        max(apart["loss_relative"], apart["gradient_relative"]) <= TOLERANCE
        for apart in step["proof"].values()
    )
