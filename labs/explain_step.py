"""One training step in slow motion, rank by rank: who computes what, who sends what, and when.

Two processes on one CPU; the flags of llm_ddp_parallel_training.py (the reference) choose model,
data and batch:

    python -m torch.distributed.run --standalone --nproc_per_node=2 \\
        -m labs.explain_step --cpu --steps 2

A larger model in small buckets, to see how the all-reduce hides behind the backward pass:

    python -m torch.distributed.run --standalone --nproc_per_node=2 \\
        -m labs.explain_step --cpu --steps 2 --d-model 256 --layers 4 --bucket-cap-mb 4

It runs the reference's own `training_step` and looks on from four places:

    Where.enter             the reference announces every phase of a step: here it is timed, and the
                            random state is kept before a forward pass
    a forward hook          the local loss
    a communication hook    DDP calls it with each bucket that is ready: the local gradient, before
                            any other rank has seen it, and the times of the all-reduce
    an optimizer hook       the averaged gradient, as AdamW gets it
    before and after        the weights and their digests

Then the same step is made twice more from the same weights: by hand, with one all-reduce for every
parameter after the backward pass, and in a single process that takes the samples of all ranks and
knows nothing of DDP and of `training_step`. All three must agree.

It writes to runs/explain-<date>-<time>, or to --output-dir: explain.txt, the report; explain.png, a
timeline and the gradients; explain.json, all figures; trace.json, for https://ui.perfetto.dev or
chrome://tracing; run.json, the settings. The weights are not saved.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import itertools
import json
import math
import re
import statistics
import sys
import textwrap
import time
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.elastic.multiprocessing.errors import record

if not __package__:  # started by its path: the project is in the folder above
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import llm_ddp_parallel_training as ddp
from labs.common import BETWEEN_UPDATES, refuse_flags, results_folder

OUTPUTS = ("explain.txt", "explain.png", "explain.json", "trace.json")
TOLERANCE = 1e-6  # relative, between DDP's gradient and that of one process
RACE_S = 2.0  # about how long the ways to average are timed
WIDTH = 100  # of the report
WAIT = "wait for all-reduce"  # the end of a backward pass, when all gradients are computed
COPIES = "observer's copies"  # what the lab itself does between two phases
SHOWN = 4  # samples of a rank in the report; explain.json has them all

Tensors = dict[str, torch.Tensor]  # by parameter name


# ------------------------------------------------------------------------------------------
# Settings
# ------------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, argparse.Namespace]:
    """This lab's own settings and the reference's. Raises `UserError`."""
    parser = ddp.OneLineParser(
        prog="labs.explain_step", allow_abbrev=False,
        description="One training step in slow motion, rank by rank.",
        epilog="All other flags are those of llm_ddp_parallel_training.py, see its --help.",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=ddp.number(int, 1, 1000), default=2,
        help="updates to explain, from the first; only from the second on are DDP's buckets in "
        "the order in which gradients arrive (default: 2)",
    )  # fmt: skip
    parser.add_argument(
        "--bucket-cap-mb", type=ddp.number(float, 0, above=True),
        help="size in MiB at which DDP closes a bucket; lower it to see several in a small model "
        "(default: DDP's own, 1 for the first and 25 for the others)",
    )  # fmt: skip
    own, rest = parser.parse_known_args(argv)
    given = refuse_flags(rest, BETWEEN_UPDATES, "explain_step")
    if not {"max_steps", "epochs"} & given.keys():
        rest = [*rest, f"--max-steps={own.steps}"]
    return own, ddp.parse_settings(rest)


def claim_folder(launch: ddp.Launch, settings: argparse.Namespace) -> Path:
    """The folder to write to, which holds no other run. Raises `UserError`. Ranks meet."""
    with ddp.together(launch):
        if launch.rank == 0:  # only its folder counts
            settings.output_dir = results_folder(
                "explain", OUTPUTS, settings.output_dir, settings.overwrite
            )
    return ddp.open_run_folder(launch, settings)


# ------------------------------------------------------------------------------------------
# Looking on
# ------------------------------------------------------------------------------------------


class Clock:
    """Seconds since the start of a step, a moment that the ranks have in common.

    On one machine all processes read the same monotonic clock, and zero is the same instant for
    all; on several, each rank's zero is when it leaves the same barrier.

    A GPU works behind Python's back. `now` waits until it has done all it was given, so that a
    phase ends when its work does. Inside the backward pass waiting would destroy the overlap that
    is to be seen: `mark` leaves an event in the GPU's own queue instead, and `at` reads it later.
    """

    def __init__(self, launch: ddp.Launch) -> None:
        """Ranks meet."""
        self.device, self.zero = launch.device, 0.0
        self.nccl = launch.world_size > 1 and dist.get_backend() == "nccl"
        if launch.world_size > 1:
            dist.barrier()
        self.zero = self.now()
        if launch.local_world_size == launch.world_size:
            self.zero = max(ddp.gather(self.zero, launch))
        self.first = self.now()  # with nothing to do, a GPU reaches the mark at once
        self.first_mark = self.mark()

    def now(self) -> float:
        getattr(torch, self.device.type).synchronize()  # nothing to wait for on the CPU
        return time.perf_counter() - self.zero

    def mark(self, of_all_reduce: bool = False) -> Any:
        """A point in this device's work, cheap enough for the middle of a backward pass."""
        if self.device.type != "cuda" or (of_all_reduce and not self.nccl):  # Gloo's is Python's
            return time.perf_counter() - self.zero
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def at(self, mark: Any) -> float:
        """When a mark was reached."""
        if isinstance(mark, float):
            return mark
        return self.first + self.first_mark.elapsed_time(mark) / 1000  # it counts milliseconds


def random_state(launch: ddp.Launch) -> dict:
    return {"cpu": torch.get_rng_state(), **ddp.cuda_random_state(launch)}


def set_random_state(state: dict, launch: ddp.Launch) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], launch.device)


class Observer(ddp.Where):
    """Stands where the reference announces its phases, and so sees a step without changing it.

    `phases` collects [name, begin, end] in seconds of the clock. `gradient` is what the optimizer
    got. `random` holds the random state before each forward pass; given as `replay`, it makes
    another pass draw the same dropout masks. `exchange`, where there is no DDP, averages the
    gradients after the backward pass.
    """

    def __init__(
        self, launch: ddp.Launch, clock: Clock, bare: nn.Module, replay: Sequence[dict] = (),
        exchange: Callable | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.launch, self.clock, self.bare = launch, clock, bare
        self.replay, self.exchange = iter(replay), exchange
        self.phases: list[list] = []
        self.gradient: Tensors = {}
        self.random: list[dict] = []

    def enter(self, phase: str, meets: bool = False) -> None:
        if phase == "forward":
            self.begin(COPIES)
            state = next(self.replay, None)
            if state:
                set_random_state(state, self.launch)
            self.random.append(random_state(self.launch))
        elif phase == "sum of losses" and self.exchange:
            self.begin("all-reduce")
            self.exchange(self.bare, self.launch.world_size)
        self.begin(phase)
        self.launch.where.enter(phase, meets)  # where the watchdog looks

    def before_update(self, *_: Any) -> None:
        """A hook of the optimizer: it is about to use the gradients that are there."""
        self.begin(COPIES)
        self.gradient = {name: p.grad.clone() for name, p in ddp.trained_parameters(self.bare)}
        self.begin("optimizer")

    def begin(self, phase: str) -> None:
        """Ends the phase before, too."""
        now = self.clock.now()
        if self.phases:
            self.phases[-1][2] = now
        self.phases.append([phase, now, now])

    def end(self) -> None:
        self.phases[-1][2] = self.clock.now()

    def begin_of(self, phase: str) -> float:
        """When the first phase of that name began."""
        return next(begin for name, begin, _ in self.phases if name == phase)


@dataclasses.dataclass
class Bucket:
    """One message of DDP; times are marks of the clock."""

    names: list[str]  # of its parameters, in the order of the buffer
    sizes: list[int]  # their elements
    bytes: int
    ready: Any  # the last of its gradients is there
    local: torch.Tensor  # a copy of this rank's own gradients, flat
    sent: Any = None  # the all-reduce is on its way, after that copy
    done: Any = None  # the sum has arrived


class BucketWatch:
    """DDP's communication hook: notes each bucket and passes it on to DDP's own all-reduce.

    Without a hook, DDP multiplies by 1/N where its all-reduce hook divides by N: the same bits
    when N is a power of two, else the same but for the last place.
    """

    def __init__(self, model: nn.parallel.DistributedDataParallel, bare: nn.Module) -> None:
        self.names = {id(p): name for name, p in ddp.trained_parameters(bare)}
        self.buckets: list[Bucket] = []
        self.clock: Clock | None = None
        model.register_comm_hook(None, self.hook)

    def hook(self, group, bucket):  # DDP would refuse its annotations, which are text here
        """Called for every bucket, on the thread that runs the backward pass."""
        ready, buffer, parameters = self.clock.mark(), bucket.buffer(), bucket.parameters()
        noted = Bucket(
            [self.names[id(p)] for p in parameters], [p.numel() for p in parameters],
            buffer.numel() * buffer.element_size(), ready, buffer.clone(),
        )  # fmt: skip
        self.buckets.append(noted)

        def done(future: torch.futures.Future) -> torch.Tensor:
            """Called when the sum is there; with NCCL, in a stream that waits for it."""
            noted.done = self.clock.mark(of_all_reduce=True)
            return future.value()

        noted.sent = self.clock.mark()
        return allreduce_hook(group, bucket).then(done)  # ranks meet, beside the backward pass

    def take(self) -> list[Bucket]:
        taken, self.buckets = self.buckets, []
        return taken


# ------------------------------------------------------------------------------------------
# Three ways to make one step
# ------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Outcome:
    """What a step came to."""

    result: ddp.StepResult
    gradient: Tensors  # G, of the mean over all valid tokens of the global batch, unclipped
    weights: Tensors


def capacity(settings: argparse.Namespace) -> int:
    """c in the docstring of `training_step`: the most tokens a rank can have in an update."""
    return settings.batch_size * settings.grad_accum * (settings.seq_len - 1)


def make_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler,
    micro_batches: list[dict], settings: argparse.Namespace, observer: Observer,
) -> Outcome:  # fmt: skip
    """One update by the reference's own `training_step`, seen by the observer."""
    launch = dataclasses.replace(observer.launch, where=observer)
    watching = optimizer.register_step_pre_hook(observer.before_update)
    result = ddp.training_step(model, optimizer, scaler, micro_batches, launch, settings)
    watching.remove()
    observer.end()
    if result.skipped:
        raise ddp.RunError(
            "the gradient overflowed in fp16, so there is no step to explain; give "
            "--precision bf16 or fp32"
        )
    clip = clip_factor(result.grad_norm, settings)
    gradient = {name: g / clip for name, g in observer.gradient.items()}
    return Outcome(result, gradient, weights_of(observer.bare))


def clip_factor(grad_norm: float, settings: argparse.Namespace) -> float:
    """What clipping multiplies the gradient by."""
    return min(1.0, settings.clip / (grad_norm + 1e-6)) if settings.clip else 1.0


def weights_of(bare: nn.Module) -> Tensors:
    """A copy of what is trained."""
    return {name: p.detach().clone() for name, p in ddp.trained_parameters(bare)}


class Twin:
    """A copy of a trainer's model, optimizer and scaler as they are now, without DDP.

    Frozen weights are shared with the original.
    """

    def __init__(self, trainer: ddp.Trainer) -> None:
        frozen = {id(p): p for p in trainer.bare.parameters() if not p.requires_grad}
        self.model = copy.deepcopy(trainer.bare, frozen)
        self.model.no_sync = contextlib.nullcontext  # `training_step` asks DDP for it
        self.optimizer = ddp.build_optimizer(self.model, trainer.settings)
        self.optimizer.load_state_dict(copy.deepcopy(trainer.optimizer.state_dict()))
        self.scaler = torch.amp.GradScaler("cuda", enabled=trainer.scaler.is_enabled())
        self.scaler.load_state_dict(trainer.scaler.state_dict())


def one_process_step(
    twin: Twin, micro_batches: list[dict], random: list[dict], launch: ddp.Launch,
    settings: argparse.Namespace,
) -> Outcome:  # fmt: skip
    """The step as a textbook has it: one process, the mean over all tokens of the global batch.

    It takes the micro-batches of all ranks one after another, each with the random state that it
    had on its rank, and adds up their gradients. Nothing here is shared with `training_step`. (The
    constant c drops out. Without it the loss would enter the backward pass with another factor,
    and all that follows would be rounded in another way.)
    """
    c, n = capacity(settings), sum(ddp.valid_targets(batch["labels"]) for batch in micro_batches)
    loss_sum = 0.0
    for batch, state in zip(micro_batches, random):
        set_random_state(state, launch)
        with ddp.autocast(launch, settings):
            mean = twin.model(**ddp.inputs_of(batch, launch.device))
        tokens = ddp.valid_targets(batch["labels"])
        twin.scaler.scale(mean * (tokens / c)).backward()
        loss_sum += mean.item() * tokens
    twin.scaler.unscale_(twin.optimizer)
    parameters = [p for _, p in ddp.trained_parameters(twin.model)]
    for parameter in parameters:
        parameter.grad *= c / n
    gradient = {name: p.grad.clone() for name, p in ddp.trained_parameters(twin.model)}
    if settings.clip:
        nn.utils.clip_grad_norm_(parameters, settings.clip)
    twin.scaler.step(twin.optimizer)
    result = ddp.StepResult(loss_sum / n, n, norm(gradient))
    return Outcome(result, gradient, weights_of(twin.model))


def average_one_by_one(model: nn.Module, ranks: int) -> None:
    """The naive way: one message for every parameter, after the backward pass. Ranks meet."""
    for _, parameter in ddp.trained_parameters(model):
        dist.all_reduce(parameter.grad)
        parameter.grad /= ranks


def average_at_once(model: nn.Module, ranks: int) -> None:
    """All gradients as one message, after the backward pass. Ranks meet."""
    gradients = [p.grad for _, p in ddp.trained_parameters(model)]
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat)
    flat /= ranks
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients])):
        gradient.copy_(part.view_as(gradient))


def average_nothing(model: nn.Module, ranks: int) -> None:
    """Wrong on purpose: what a step would cost if ranks sent nothing."""


def prove(
    outcome: Outcome, twins: list[Twin], micro_batches: list[dict], random: list[dict],
    clock: Clock, trainer: ddp.Trainer,
) -> dict:  # fmt: skip
    """The step again without DDP, and again in one process, on rank 0. Ranks meet."""
    launch, s, (by_hand, single) = trainer.launch, trainer.settings, twins
    observer = Observer(launch, clock, by_hand.model, random, average_one_by_one)
    naive = make_step(
        by_hand.model, by_hand.optimizer, by_hand.scaler, micro_batches, s, observer
    )  # fmt: skip
    batches, states = ddp.gather(micro_batches, launch), ddp.gather(random, launch)
    launch.where.enter("proof", meets=True)
    proof = {}
    if launch.rank == 0:
        in_turn, states = (list(itertools.chain.from_iterable(x)) for x in (batches, states))
        alone = one_process_step(single, in_turn, states, launch, s)
        proof = {
            "DDP": difference(outcome, alone),
            "one all-reduce per parameter": difference(naive, alone),
        }
    return ddp.from_rank_0(proof, launch)


def difference(a: Outcome, b: Outcome) -> dict[str, float]:
    """How far `a` is from `b`: relative for loss and gradient (norms), absolute for weights."""
    gradient = {name: a.gradient[name] - g for name, g in b.gradient.items()}
    weights = {name: a.weights[name] - w for name, w in b.weights.items()}
    return {
        "loss_relative": abs(a.result.loss - b.result.loss) / abs(b.result.loss),
        "gradient_relative": norm(gradient) / norm(b.gradient),
        "gradient_largest": max(float(d.abs().max()) for d in gradient.values()),
        "weights_largest": max(float(d.abs().max()) for d in weights.values()),
    }


def agrees(step: dict) -> bool:
    """Whether DDP, the hand-made average and one process came to the same loss and gradient."""
    return all(
        difference[what] <= TOLERANCE
        for difference in step["proof"].values()
        for what in ("loss_relative", "gradient_relative")
    )


def race(trainer: ddp.Trainer, micro_batches: list[dict], ddp_options: dict) -> dict:
    """Times the ways to an averaged gradient in turn, each on a twin. Ranks meet.

    Returns, for each way, the slowest rank's seconds from the first forward pass to the averaged
    gradient, over rounds. No hooks and no copies here.
    """
    launch, rounds = trainer.launch, []
    ways = {
        "no all-reduce at all (wrong)": average_nothing,
        "one all-reduce per parameter, after backward": average_one_by_one,
        "one all-reduce of everything, after backward": average_at_once,
        "DDP: bucket after bucket, during backward": None,
    }
    twins = [Twin(trainer) for _ in ways]
    models = [twin.model for twin in twins]
    models[-1] = ddp.wrap_in_ddp(models[-1], launch, **ddp_options)
    began = time.perf_counter()
    while True:
        times = []
        for exchange, twin, model in zip(ways.values(), twins, models):
            clock = Clock(launch)  # ranks meet: all begin together
            observer = Observer(launch, clock, twin.model, exchange=exchange)
            ddp.training_step(
                model, twin.optimizer, twin.scaler, micro_batches,
                dataclasses.replace(launch, where=observer), trainer.settings,
            )  # fmt: skip
            times.append(observer.begin_of("sum of losses") - observer.begin_of("forward"))
        rounds.append([max(column) for column in zip(*ddp.gather(times, launch))])
        elapsed = time.perf_counter() - began
        enough = elapsed > RACE_S if len(rounds) >= 5 else elapsed > 5 * RACE_S and len(rounds) >= 3
        if ddp.from_rank_0(enough, launch):
            break
    timed = rounds[2:]  # in the first, memory is allocated and DDP learns the order of gradients
    return {
        "rounds": len(timed),
        "seconds": {
            way: {"median": statistics.median(c), "fastest": min(c), "slowest": max(c)}
            for way, c in zip(ways, zip(*timed))
        },
    }


# ------------------------------------------------------------------------------------------
# One step, explained
# ------------------------------------------------------------------------------------------


def norm(tensors: Tensors) -> float:
    """L2 norm of all values together."""
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors.values()))


def norms(tensors: Tensors) -> dict[str, float]:
    """The norm of each layer, in the order of the names, and of all under "total".

    A layer is what a name says up to its first number, or else the module of a parameter.
    """
    layers: dict[str, Tensors] = {}
    for name, tensor in tensors.items():
        numbered = re.match(r".*?\.\d+(?=\.)", name)
        layer = numbered[0] if numbered else name.rpartition(".")[0]
        layers.setdefault(layer, {})[name] = tensor
    return {**{layer: norm(part) for layer, part in layers.items()}, "total": norm(tensors)}


def text_reader(settings: argparse.Namespace) -> Callable[[dict, int], str]:
    """A function that turns a row of a batch back into text."""
    if settings.model == "tiny":
        return lambda batch, row: bytes(
            token for token in batch["input_ids"][row].tolist() if token < ddp.PAD
        ).decode("utf-8", errors="replace")
    from transformers import AutoTokenizer

    folder = Path(settings.base_model).expanduser()
    tokenizer = AutoTokenizer.from_pretrained(folder if folder.is_dir() else settings.base_model)

    def text(batch: dict, row: int) -> str:
        """Without the padding, where a mask tells it; packed windows hold several texts."""
        ids = batch["input_ids"][row]
        return tokenizer.decode(ids[batch["attention_mask"][row] == 1] if "attention_mask" in batch
                                else ids)  # fmt: skip

    return text


def updates_of(trainer: ddp.Trainer) -> Iterator[tuple[list[dict], list[int]]]:
    """The micro-batches of this rank, update after update over as many epochs as it takes.

    With them come the records that one process with the whole global batch would take next.
    """
    sampler, data = trainer.sampler, trainer.run.data.train
    size = ddp.global_batch(trainer.launch, trainer.settings)
    for epoch in itertools.count(1):
        sampler.set_epoch(epoch)
        alone = ddp.EpochSampler(sampler.size, sampler.seed)
        alone.set_epoch(epoch)
        order = iter(alone)
        for micro_batches in ddp.updates_of_epoch(trainer.loader, sampler, trainer.settings):
            yield micro_batches, sorted(data[i][0] for i in itertools.islice(order, size))


def explain(
    trainer: ddp.Trainer, watch: BucketWatch | None, micro_batches: list[dict],
    expected: list[int], text: Callable[[dict, int], str],
) -> dict:  # fmt: skip
    """Makes one update and tells all about it, for all ranks. Ranks meet."""
    launch, s, bare = trainer.launch, trainer.settings, trainer.bare
    twins = [Twin(trainer), Twin(trainer)] if watch else []
    before = weights_of(bare)
    losses: list[torch.Tensor] = []

    def note_loss(model: nn.Module, arguments: tuple, loss: torch.Tensor) -> None:
        losses.append(loss.detach())

    clock = Clock(launch)  # ranks meet
    observer = Observer(launch, clock, bare)
    scale = trainer.scaler.get_scale()  # 1 but for fp16
    if watch:
        watch.clock = clock
    listening = trainer.model.register_forward_hook(note_loss)
    outcome = make_step(
        trainer.model, trainer.optimizer, trainer.scaler, micro_batches, s, observer
    )  # fmt: skip
    listening.remove()
    random_after = random_state(launch)

    local, buckets = outcome.gradient, []  # in a single process that is the only gradient
    if watch:
        buckets = watch.take()
        check_buckets(buckets, bare)
        # Before the all-reduce a bucket holds Σ_j ∇S_j / c; times c / n_r it is the gradient of the
        # mean over this rank's tokens.
        tokens = sum(ddp.valid_targets(batch["labels"]) for batch in micro_batches)
        local = local_gradient(buckets, capacity(s) / max(tokens, 1) / scale)
    own = {
        "rank": launch.rank,
        "samples": samples_of(micro_batches, text),
        **own_share(micro_batches, losses, outcome),
        "local_gradient_norms": norms(local),
        "digests": {
            "weights before": ddp.digest_of(before.items()),
            "local gradient": ddp.digest_of(local.items()),
            "averaged gradient": ddp.digest_of(outcome.gradient.items()),
            "weights after": ddp.digest_of(outcome.weights.items()),
        },
        **timeline(observer.phases, buckets, clock),
    }
    proof = prove(outcome, twins, micro_batches, observer.random, clock, trainer) if watch else {}
    set_random_state(random_after, launch)  # the twins have drawn, too
    return {
        "loss": outcome.result.loss,
        "tokens": outcome.result.tokens,
        "capacity": capacity(s),
        "correction": capacity(s) * launch.world_size / outcome.result.tokens,
        "learning_rate": trainer.optimizer.param_groups[0]["lr"],
        "clip_factor": clip_factor(outcome.result.grad_norm, s),
        "gradient_norms": norms(outcome.gradient),
        "update_norms": norms({n: w - before[n] for n, w in outcome.weights.items()}),
        "weight_norms": norms(outcome.weights),
        "expected_records": expected,
        "ranks": ddp.gather(own, launch),  # ranks meet
        "proof": proof,
    }


def own_share(micro_batches: list[dict], losses: list[torch.Tensor], outcome: Outcome) -> dict:
    """This rank's tokens, the mean of its losses over them, and their weight in the global mean."""
    counts = [ddp.valid_targets(batch["labels"]) for batch in micro_batches]
    tokens = sum(counts)
    return {
        "micro_batches": len(micro_batches),
        "tokens": tokens,
        "weight": tokens / outcome.result.tokens,
        "local_loss": sum(float(x) * n for x, n in zip(losses, counts)) / max(tokens, 1),
    }


def local_gradient(buckets: list[Bucket], factor: float) -> Tensors:
    """What the buckets held before the all-reduce, times a factor, in name order."""
    parts = (
        (name, part * factor)
        for bucket in buckets
        for name, part in zip(bucket.names, bucket.local.split(bucket.sizes))
    )
    return dict(sorted(parts, key=lambda part: part[0]))


def samples_of(micro_batches: list[dict], text: Callable[[dict, int], str]) -> list[dict]:
    """Record id and start of the text of every row that is not padding."""
    return [
        {"record": record, "text": text(batch, row)[:80]}
        for batch in micro_batches
        for row, record in enumerate(batch["record_ids"].tolist())
        if record >= 0
    ]


def check_buckets(buckets: list[Bucket], bare: nn.Module) -> None:
    """Every trained parameter is in one bucket, and nothing else is sent. Raises `RunError`."""
    trained = {name: p.numel() * p.element_size() for name, p in ddp.trained_parameters(bare)}
    names, size = [n for b in buckets for n in b.names], sum(b.bytes for b in buckets)
    if sorted(names) != sorted(trained) or size != sum(trained.values()):
        raise ddp.RunError(
            f"the buckets hold {len(names)} parameters of {size} bytes, the model {len(trained)} "
            f"trained ones of {sum(trained.values())}"
        )


def timeline(phases: list[list], buckets: list[Bucket], clock: Clock) -> dict:
    """Phases and buckets of one rank in seconds, and how much of the all-reduces was hidden.

    When the last bucket is sent, the backward pass has computed its last gradient; what it still
    takes is waiting. So what is under way before that moment is hidden, and the rest is not.
    """
    sent = [
        {"parameters": bucket.names, "bytes": bucket.bytes, "ready": clock.at(bucket.ready),
         "sent": clock.at(bucket.sent), "done": clock.at(bucket.done)}
        for bucket in buckets
    ]  # fmt: skip
    if not sent:
        return {"phases": phases, "buckets": []}
    last = max(i for i, phase in enumerate(phases) if phase[0] == "backward")
    _, begin, end = phases[last]
    computed = sent[-1]["sent"]
    waiting = [WAIT, computed, end]
    phases = [*phases[:last], ["backward", begin, computed], waiting, *phases[last + 1 :]]
    overlap = {
        "backward": computed - begin,
        "under_way": covered((b["sent"], b["done"]) for b in sent),
        "hidden": covered((b["sent"], min(b["done"], computed)) for b in sent),
        "copies": sum(b["sent"] - b["ready"] for b in sent),
    }
    return {"phases": phases, "buckets": sent, "overlap": overlap}


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """How long at least one of the (begin, end) spans lasts."""
    total, reached = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(end - max(begin, reached), 0)
        reached = max(end, reached)
    return total


# ------------------------------------------------------------------------------------------
# The report
# ------------------------------------------------------------------------------------------


def prose(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="   ", subsequent_indent="   ",
                         break_long_words=False, break_on_hyphens=False)  # fmt: skip


def table(rows: list[list]) -> list[str]:
    """Rows of cells as aligned lines: the first column to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    first, *widths = (max(map(len, column)) for column in zip(*cells))
    return [
        "  ".join(["   " + row[0].ljust(first), *map(str.rjust, row[1:], widths)]).rstrip()
        for row in cells
    ]


def title(text: str) -> list[str]:
    return ["", f"== {text} ".ljust(WIDTH, "=")]


def without_prefix(names: list[str]) -> list[str]:
    """The names without the modules that all of them are in; a number keeps its list's name."""
    parts, shared = [name.split(".") for name in names], 0
    while all(
        p[shared] == parts[0][shared] and len(p) > shared + 1 and not p[shared + 1].isdigit()
        for p in parts
    ):
        shared += 1
    return [".".join(p[shared:]) for p in parts]


def step_report(number: int, steps: list[dict], run: ddp.Run) -> list[str]:
    """Update `number` (from 1) in words, for somebody who sees DDP for the first time."""
    step = steps[number - 1]
    lines = [
        *title(f"Update {number} of {len(steps)}"), *samples_report(step), *loss_report(step),
        *gradient_report(step, run.settings), *digest_report(step),
    ]  # fmt: skip
    on_cpu = run.launch.device.type == "cpu"
    if step["proof"]:
        return [*lines, *bucket_report(number, step, on_cpu), *proof_report(step)]
    return [*lines, "", "One process: nothing was sent. Buckets, their all-reduce and the proof "
            "need two ranks or more."]  # fmt: skip


def samples_report(step: dict) -> list[str]:
    lines = ["", "1. Each rank reads its own samples"]
    for rank in step["ranks"]:
        samples = rank["samples"]
        rows = []
        for sample in samples[:SHOWN]:
            quoted = json.dumps(sample["text"], ensure_ascii=False)
            start = quoted if len(quoted) <= 66 else quoted[:64] + '…"'
            rows.append(f"record {sample['record']:<5} {start}")
        rows += [f"and {len(samples) - SHOWN} more"] if len(samples) > SHOWN else []
        rows = rows or ["none: the epoch has run out of samples, so it gets padding"]
        heads = [f"rank {rank['rank']}", *[""] * len(rows)]
        lines += [f"   {head:<8} {row}" for head, row in zip(heads, rows)]
    union = sorted(x["record"] for rank in step["ranks"] for x in rank["samples"])
    same = "the" if union == step["expected_records"] else "NOT the"
    return lines + prose(
        f"Together they are {same} {ddp.counted(len(step['expected_records']), 'sample')} that one "
        "process with this global batch would take next."
    )


def loss_report(step: dict) -> list[str]:
    ranks, n = step["ranks"], step["tokens"]
    rows = [["rank", "valid tokens", "mean loss over them", "weight in the global mean"]]
    for r in ranks:
        weight = f"{r['tokens']} / {n} = {r['weight']:.6f}"
        rows.append([r["rank"], r["tokens"], f"{r['local_loss']:.6f}", weight])
    terms = " + ".join(f"{r['weight']:.6f} × {r['local_loss']:.6f}" for r in ranks)
    mean = sum(r["weight"] * r["local_loss"] for r in ranks)
    text = f"global mean = {terms} = {mean:.6f}; training_step says {step['loss']:.6f}."
    if len(ranks) > 1:
        of_means = sum(r["local_loss"] for r in ranks) / len(ranks)
        text += (
            f" The plain mean of the {len(ranks)} means would be {of_means:.6f}: in it, the tokens "
            "of a rank that has fewer count more."
        )
    heading = "2. Each rank computes the mean loss of its own tokens"
    return ["", heading, *table(rows), *prose(text)]


def gradient_report(step: dict, settings: argparse.Namespace) -> list[str]:
    ranks, s = step["ranks"], settings
    layers = list(step["gradient_norms"])
    columns = [["norms", *without_prefix(layers[:-1]), "total"]]
    columns += [
        [head, *(f"{of[layer]:.6f}" for layer in layers)]
        for head, of in (
            *((f"rank {r['rank']}", r["local_gradient_norms"]) for r in ranks),
            ("averaged", step["gradient_norms"]), ("AdamW's step", step["update_norms"]),
            ("weights", step["weight_norms"]),
        )
    ]  # fmt: skip
    c, n = step["capacity"], step["tokens"]
    clip = "is not clipped (--clip 0)"
    if s.clip:
        clip = f"is below --clip {s.clip:g} and stays as it is"
        if step["clip_factor"] < 1:
            clip = f"is above --clip {s.clip:g} and is multiplied by {step['clip_factor']:.6f}"
    what = "In a single process the rank's own gradient is the averaged one, G."
    exchange = "N is 1, and nothing is sent"
    if len(ranks) > 1:
        what = (
            "A rank's own gradient, as it was before the all-reduce, is that of its own mean loss. "
            "The averaged one, G, is that of the global mean: the ranks' gradients times the "
            "weights above, added up. It is shorter than they are where they disagree."
        )
        exchange = f"DDP adds up and divides by N = {len(ranks)}"
    how = (
        "How training_step gets there: a rank's backward pass starts from (sum of its losses) / c, "
        f"with c = batch × accumulation × (seq_len − 1) = {s.batch_size} × {s.grad_accum} × "
        f"{s.seq_len - 1} = {c}. {exchange}. Times c·N/n = {c} × {len(ranks)} / {n} = "
        f"{step['correction']:.6f} that is G. Its norm {clip}; then AdamW moves the weights, with "
        f"learning rate {step['learning_rate']:g}."
    )
    several = "Each rank computes its own gradient; the all-reduce makes one of them"
    heading = f"3. {several if len(ranks) > 1 else 'The gradient'}"
    rows = [list(row) for row in zip(*columns)]
    return ["", heading, *table(rows), *prose(what), *prose(how)]


def digest_report(step: dict) -> list[str]:
    ranks = step["ranks"]
    rows = [["sha256, first digits", *(f"rank {r['rank']}" for r in ranks), ""]]
    for what in ranks[0]["digests"]:
        digests = [r["digests"][what] for r in ranks]
        verdict = "equal" if len(set(digests)) == 1 else "different"
        rows.append([what, *(d[:12] for d in digests), verdict if len(ranks) > 1 else ""])
    several = "Equal weights, different gradients, one average, equal weights"
    return ["", f"4. {several if len(ranks) > 1 else 'Digests'}", *table(rows)]


def bucket_report(number: int, step: dict, on_cpu: bool) -> list[str]:
    ranks, buckets = step["ranks"], step["ranks"][0]["buckets"]
    size, several = sum(b["bytes"] for b in buckets), len(buckets) > 1
    begins = [[b for name, b, _ in r["phases"] if name == "backward"][-1] for r in ranks]
    rows = [["bucket", "bytes", "gradients", *(f"rank {r['rank']}: ready, done" for r in ranks)]]
    for i, bucket in enumerate(buckets):
        times = [[1e3 * (r["buckets"][i][x] - b) for x in ("ready", "done")]
                 for r, b in zip(ranks, begins)]  # fmt: skip
        times = [f"{ready:.2f}, {done:.2f}" for ready, done in times]
        rows.append([i, f"{bucket['bytes']:,}", len(bucket["parameters"]), *times])
    lines = ["", f"5. DDP sent {len(buckets)} bucket{'s' * several}: {size:,} bytes, every trained "
             "parameter once", *table(rows)]  # fmt: skip
    order = (
        "In its first backward pass DDP does not know yet in which order gradients arrive, so it "
        "sends them all at the end." if number == 1 else
        "From the second update on, DDP fills its buckets in the order in which the gradients "
        "arrived in the first one."
    )  # fmt: skip
    lines += prose(f"Times are ms since that rank's last backward pass began. {order}")
    names = without_prefix([name for b in buckets for name in b["parameters"]])
    for i, bucket in enumerate(buckets):
        held, names = names[: len(bucket["parameters"])], names[len(bucket["parameters"]) :]
        shown = held if len(held) < 5 else [*held[:3], "…", held[-1]]
        lines += prose(f"bucket {i}: {', '.join(shown)}")
    last = [max(r["buckets"][i]["sent"] for r in ranks) for i in range(len(buckets))]
    for rank in ranks:
        over = {what: 1e3 * seconds for what, seconds in rank["overlap"].items()}
        waited = covered((b["sent"], late) for b, late in zip(rank["buckets"], last))
        lines += prose(
            f"rank {rank['rank']}: all-reduces were under way for {over['under_way']:.2f} ms, "
            f"{over['hidden']:.2f} ms of it ({over['hidden'] / over['under_way']:.0%}) hidden "
            f"behind {over['backward']:.2f} ms of backward pass, and {1e3 * waited:.2f} ms of it "
            "waiting for a slower rank to send"
        )
    if on_cpu:
        lines += prose(
            "On a CPU the cores that compute also add up and send, so what is hidden is not free."
        )
    rows = [["phases, ms", *(f"rank {r['rank']}" for r in ranks)]]
    for phase in dict.fromkeys(name for name, *_ in ranks[0]["phases"]):
        spans = [sum(e - b for name, b, e in r["phases"] if name == phase) for r in ranks]
        rows.append([phase, *(f"{1e3 * seconds:.2f}" for seconds in spans)])
    copies = max(r["overlap"]["copies"] for r in ranks)
    return lines + table(rows) + prose(
        f"(The observer's copies are for this report; up to {1e3 * copies:.2f} ms more of them are "
        "in the backward pass.)"
    )  # fmt: skip


def proof_report(step: dict) -> list[str]:
    rows = [["from one process differ", "loss", "gradient", "largest of it", "of the weights"]]
    rows += [
        [way, *(f"{x:.1e}" if x else "0" for x in apart.values())]
        for way, apart in step["proof"].items()
    ]
    verdict = "agree" if agrees(step) else "do NOT agree"
    return [
        "", "6. The same update from the same weights: by hand, and in one process",
        *table(rows),
        *prose(
            "Loss and gradient relative (norm of the difference by norm), the others absolute. "
            "AdamW divides a gradient by its own size, which enlarges the rounding of tiny ones."
        ),
        *prose(f"DDP, the average by hand and one process {verdict} to {TOLERANCE:g}."),
    ]  # fmt: skip


def race_report(result: dict) -> list[str]:
    rows = [["ms from the forward pass to the averaged gradient", "median", "fastest", "slowest"]]
    rows += [
        [way, *(f"{1e3 * of[which]:.2f}" for which in ("median", "fastest", "slowest"))]
        for way, of in result["seconds"].items()
    ]
    how = (
        "The last batch again, each way in turn and without an observer; of each round the slowest "
        f"rank. Rounds: {result['rounds']}."
    )
    return [*title("What the averaging costs here"), "", *prose(how), *table(rows)]


# ------------------------------------------------------------------------------------------
# Picture and trace
# ------------------------------------------------------------------------------------------

SENT = "all-reduce of a bucket"
COLORS = {
    "forward": "tab:blue", "backward": "tab:green", WAIT: "lightgreen",
    "sum of losses": "tab:purple", "optimizer": "tab:red", COPIES: "lightgrey",
    SENT: "tab:orange",
}  # fmt: skip


def draw(steps: list[dict], path: Path) -> None:
    """The timeline of the last update, and its gradients before and after the all-reduce."""
    from matplotlib.figure import Figure

    count = len(steps[-1]["ranks"])
    figure = Figure(figsize=(12, 5.5 + 0.9 * count), layout="constrained")
    above, below = figure.subplots(2, height_ratios=(1 + 0.9 * count, 4))
    draw_timeline(above, steps[-1], f"Update {len(steps)}, rank by rank, in ms")
    draw_gradients(below, steps[-1])
    ddp.write_file(path, lambda file: figure.savefig(file, format="png", dpi=110))


def draw_timeline(axes: Any, step: dict, title: str) -> None:
    """A lane for each rank: its phases, and below them its buckets while they are under way."""
    from matplotlib.patches import Patch

    ranks = step["ranks"]
    origin = min(rank["phases"][0][1] for rank in ranks)
    for y, rank in enumerate(ranks):
        for name, begin, end in rank["phases"]:
            axes.barh(
                y - 0.2, 1e3 * (end - begin), 0.34, 1e3 * (begin - origin), color=COLORS[name],
                hatch="//" if name == WAIT else None, edgecolor="white", lw=0.3,
            )  # fmt: skip
        buckets = rank["buckets"]
        height = 0.4 / max(len(buckets), 1)
        for i, bucket in enumerate(buckets):
            middle = y + 0.03 + (i + 0.5) * height
            sent, done = (1e3 * (bucket[x] - origin) for x in ("sent", "done"))
            axes.barh(middle, done - sent, 0.85 * height, sent, color=COLORS[SENT])
            if len(buckets) <= 8:
                label = f" {i}: {bucket['bytes'] / 1e3:,.0f} kB"
                axes.text(done, middle, label, fontsize=7, va="center")
    seen = {name for rank in ranks for name, *_ in rank["phases"]}
    seen |= {SENT} if ranks[0]["buckets"] else set()
    axes.legend(
        handles=[Patch(color=c, label=name) for name, c in COLORS.items() if name in seen],
        ncols=7, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False,
    )  # fmt: skip
    axes.set(
        yticks=range(len(ranks)), yticklabels=[f"rank {r['rank']}" for r in ranks],
        ylim=(len(ranks) - 0.4, -0.5), title=title,
    )  # fmt: skip


def draw_gradients(axes: Any, step: dict) -> None:
    """The norms of each layer's gradient: every rank's own, and the averaged one."""
    from matplotlib import colormaps

    ranks, layers = step["ranks"], list(step["gradient_norms"])
    bars = [
        (f"rank {r['rank']}, before", r["local_gradient_norms"],
         colormaps["Blues"](0.35 + 0.5 * i / len(ranks)))
        for i, r in enumerate(ranks)
    ]  # fmt: skip
    bars.append(("averaged, after", step["gradient_norms"], "black"))
    width = 0.8 / len(bars)
    for i, (label, norms_of, color) in enumerate(bars):
        places = [x + (i - (len(bars) - 1) / 2) * width for x in range(len(layers))]
        axes.bar(places, [norms_of[layer] for layer in layers], width, label=label, color=color)
    slant = {"rotation": 45, "ha": "right"} if len(layers) > 10 else {}
    names = [*without_prefix(layers[:-1]), "total"]
    axes.set_xticks(range(len(layers)), names, fontsize=8, **slant)
    axes.set(ylabel="norm", title="Gradients before and after the all-reduce")
    axes.legend(fontsize=8)
    axes.grid(axis="y", alpha=0.3)


def trace_events(steps: list[dict]) -> dict:
    """The timeline in the Trace Event Format: a process for each rank, times in microseconds.

    Format: "Trace Event Format", the Chromium project; read by Perfetto and chrome://tracing. Each
    bucket has a thread of its own, since all-reduces that are under way at once do not nest.
    Updates are laid one after another, without what the lab does in between.
    """
    events: list[dict] = []

    def name(what: str, rank: int, thread: int, text: str) -> None:
        events.append(
            {"name": what, "ph": "M", "pid": rank, "tid": thread, "args": {"name": text}}
        )  # fmt: skip

    for rank in range(len(steps[0]["ranks"])):
        name("process_name", rank, 0, f"rank {rank}")
        name("thread_name", rank, 0, "step")
        for i in range(max(len(step["ranks"][rank]["buckets"]) for step in steps)):
            name("thread_name", rank, i + 1, f"all-reduce of bucket {i}")
    offset = 0.0
    for number, step in enumerate(steps, 1):
        first = min(rank["phases"][0][1] for rank in step["ranks"])
        for rank in step["ranks"]:
            spans = [(what, 0, begin, end, {}) for what, begin, end in rank["phases"]]
            spans += [
                (f"bucket {i}", i + 1, bucket["sent"], bucket["done"],
                 {"bytes": bucket["bytes"], "parameters": bucket["parameters"]})
                for i, bucket in enumerate(rank["buckets"])
            ]  # fmt: skip
            events += [
                {"name": what, "cat": "step", "ph": "X", "pid": rank["rank"], "tid": thread,
                 "ts": 1e6 * (offset + begin - first), "dur": 1e6 * (end - begin),
                 "args": {"update": number, **arguments}}
                for what, thread, begin, end, arguments in spans
            ]  # fmt: skip
        offset += max(rank["phases"][-1][2] for rank in step["ranks"]) - first + 1e-3
    return {"traceEvents": events, "displayTimeUnit": "ms"}


# ------------------------------------------------------------------------------------------
# The story
# ------------------------------------------------------------------------------------------


@record
def main(argv: Sequence[str] | None = None) -> None:
    """From the launcher's environment to the report, in the order of the reference's own main."""
    where = ddp.Where()
    ddp.print_on_any_terminal()
    with ddp.one_clear_ending(where):
        launch = ddp.read_launcher(where)
        own, settings = parse(argv)
        ddp.require_matplotlib()
        ddp.choose_device(launch, settings)
        ddp.set_up(launch)
        if own.bucket_cap_mb:
            asked = (
                "buckets",
                f"{own.bucket_cap_mb:g} MB of gradients a message",
                "--bucket-cap-mb",
            )
            launch.choices = [asked if row[0] == "buckets" else row for row in launch.choices]
        run = (ddp.build_tiny if settings.model == "tiny" else ddp.build_qwen)(launch, settings)
        if own.steps > run.updates:
            raise ddp.UserError(
                f"--steps {own.steps} is more than --max-steps and --epochs allow, which is "
                f"{ddp.counted(run.updates, 'update')}"
            )
        folder = claim_folder(launch, settings)
        ddp.print_header(run)
        if launch.rank == 0:
            ddp.write_run_file(run, folder)

        options = {"bucket_cap_mb": own.bucket_cap_mb} if own.bucket_cap_mb else {}
        # The trainer's loader, sampler, optimizer and DDP wrapper are wanted, not its loop: of its
        # log it reads these two only.
        log = types.SimpleNamespace(folder=folder, progress=ddp.Progress())
        trainer = ddp.Trainer(run, log, **options)
        watch = BucketWatch(trainer.model, trainer.bare) if launch.world_size > 1 else None
        text, steps, timed = text_reader(settings), [], {}
        with ddp.Watchdog(launch):
            for micro_batches, expected in itertools.islice(updates_of(trainer), own.steps):
                launch.where.step = len(steps) + 1
                rate = ddp.learning_rate(len(steps), settings, run.updates)
                for group in trainer.optimizer.param_groups:
                    group["lr"] = rate
                steps.append(explain(trainer, watch, micro_batches, expected, text))
            if watch:
                timed = race(trainer, micro_batches, options)
        if launch.rank == 0:
            write_outputs(folder, run, steps, timed)
        if launch.world_size > 1:
            dist.barrier()  # ranks meet: nobody leaves before rank 0 has written
        broken = [number for number, step in enumerate(steps, 1) if not agrees(step)]
        if broken:
            raise ddp.RunError(
                f"update {broken[0]}: DDP, the average by hand and one process do not agree to "
                f"{TOLERANCE:g}; see part 6 of its report"
            )


def write_outputs(folder: Path, run: ddp.Run, steps: list[dict], timed: dict) -> None:
    """Report, figures, trace and picture.

    In explain.json times are seconds since the step's zero (see `Clock`), a phase is [name, begin,
    end], and `common_clock` says whether the times of different ranks can be compared.
    """
    launch = run.launch
    report = [
        line for number in range(1, len(steps) + 1) for line in step_report(number, steps, run)
    ]
    report += race_report(timed) if timed else []
    launch.say("\n".join(report))
    trained = [p for _, p in ddp.trained_parameters(run.model)]
    content = {
        "world_size": launch.world_size,
        "device": launch.device.type,
        "model": run.settings.model,
        "trained_parameters": sum(p.numel() for p in trained),
        "trained_bytes": sum(p.numel() * p.element_size() for p in trained),
        "common_clock": launch.local_world_size == launch.world_size,
        "steps": steps,
        "race": timed,
    }
    text = "\n".join(report).lstrip("\n") + "\n"
    ddp.write_file(folder / "explain.txt", lambda file: file.write(text.encode("utf-8")))
    ddp.write_json(folder / "explain.json", content)
    ddp.write_json(folder / "trace.json", trace_events(steps))
    draw(steps, folder / "explain.png")
    launch.say(f"\nwritten to {folder}: {' '.join(OUTPUTS)}")
    launch.say("trace.json opens in https://ui.perfetto.dev and in chrome://tracing")


if __name__ == "__main__":
    main()
