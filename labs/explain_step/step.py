"""All figures of one step: what each rank read, computed, sent and received."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

import llm_ddp_parallel_training as ddp
from labs.explain_step.observe import (
    Bucket,
    BucketWatch,
    Clock,
    Observer,
    Tensors,
    random_state,
    set_random_state,
)
from labs.explain_step.three_ways import (
    Outcome,
    Parts,
    capacity,
    clip_factor,
    norm,
    observed_step,
    prove,
    weights_of,
)

WAIT = "wait for all-reduce"  # the end of a backward pass, when all gradients are computed


@dataclasses.dataclass
class Update:
    """What a rank is given for an update."""

    micro_batches: list[dict]
    expected: list[int]  # records that one process with the whole global batch would take next
    rate: float  # learning rate


def updates_of(run: ddp.Run) -> Iterator[Update]:
    """This rank's share of one update after another, over as many epochs as it takes."""
    launch, s, data = run.launch, run.settings, run.data.train
    sampler = ddp.ShardSampler(len(data), s.seed, launch.world_size, launch.rank)
    loader = DataLoader(
        data, s.batch_size, sampler=sampler, collate_fn=run.collate, generator=torch.Generator()
    )
    numbers = itertools.count()
    for epoch in itertools.count(1):
        sampler.set_epoch(epoch)
        alone = ddp.EpochSampler(len(data), s.seed)
        alone.set_epoch(epoch)
        order = iter(alone)
        for micro_batches in ddp.updates_of_epoch(loader, sampler, s):
            samples = itertools.islice(order, ddp.global_batch(launch, s))
            rate = ddp.learning_rate(next(numbers), s, run.updates)
            yield Update(micro_batches, sorted(data[i][0] for i in samples), rate)


def explain(
    parts: Parts, watch: BucketWatch | None, update: Update, launch: ddp.Launch, text: Callable
) -> dict:
    """Makes one update and tells all about it, for all ranks. Ranks meet.

    `watch` is None in a single process. `text(batch, row)` turns a row back into text.
    """
    s, bare, micro_batches = parts.settings, parts.bare, update.micro_batches
    for group in parts.optimizer.param_groups:
        group["lr"] = update.rate
    twins = [parts.twin(), parts.twin()] if watch else []
    before, losses = weights_of(bare), []
    clock = Clock(launch)  # ranks meet
    observer = Observer(launch, clock, bare)
    scale = parts.scaler.get_scale()  # 1 but for fp16
    if watch:
        watch.clock = clock
    listening = parts.model.register_forward_hook(lambda *call: losses.append(call[-1].detach()))
    outcome = observed_step(parts, micro_batches, observer)
    listening.remove()
    random_after = random_state(launch.device)

    local, buckets = outcome.gradient, []  # in a single process that is the only gradient
    share = own_share(micro_batches, losses, outcome)
    if watch:
        buckets = watch.take()
        check_buckets(buckets, bare)
        # Before the all-reduce a bucket holds Σ_j ∇S_j / c; times c / n_r it is the gradient of the
        # mean over this rank's tokens.
        local = local_gradient(buckets, capacity(s) / max(share["tokens"], 1) / scale)
    own = {
        "rank": launch.rank,
        "samples": samples_of(micro_batches, text),
        **share,
        "local_gradient_norms": norms(local),
        "digests": {
            "weights before": ddp.digest_of(before.items()),
            "local gradient": ddp.digest_of(local.items()),
            "averaged gradient": ddp.digest_of(outcome.gradient.items()),
            "weights after": ddp.digest_of(outcome.weights.items()),
        },
        **timeline(observer.phases, buckets, clock),
    }
    proof = prove(outcome, twins, micro_batches, observer.random, clock, launch) if watch else {}
    set_random_state(random_after, launch.device)  # the twins have drawn, too
    return {
        "loss": outcome.loss,
        "tokens": outcome.tokens,
        "capacity": capacity(s),
        "correction": capacity(s) * launch.world_size / outcome.tokens,
        "learning_rate": update.rate,
        "clip_factor": clip_factor(outcome.grad_norm, s),
        "gradient_norms": norms(outcome.gradient),
        "update_norms": norms({n: w - before[n] for n, w in outcome.weights.items()}),
        "weight_norms": norms(outcome.weights),
        "expected_records": update.expected,
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
        "weight": tokens / outcome.tokens,
        "local_loss": sum(float(x) * n for x, n in zip(losses, counts)) / max(tokens, 1),
    }


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


def local_gradient(buckets: list[Bucket], factor: float) -> Tensors:
    """What the buckets held before the all-reduce, times a factor, in name order."""
    parts = (
        (name, part * factor)
        for bucket in buckets
        for name, part in zip(bucket.names, bucket.local.split(bucket.sizes))
    )
    return dict(sorted(parts, key=lambda part: part[0]))


def samples_of(micro_batches: list[dict], text: Callable) -> list[dict]:
    """Record id and start of the text of every row that is not padding."""
    return [
        {"record": record, "text": text(batch, row)[:80]}
        for batch in micro_batches
        for row, record in enumerate(batch["record_ids"].tolist())
        if record >= 0
    ]


def text_reader(settings: ddp.Settings) -> Callable[[dict, int], str]:
    """A function that turns a row of a batch back into text."""
    if settings.model == "tiny":
        return lambda batch, row: bytes(
            token for token in batch["input_ids"][row].tolist() if token < ddp.PAD
        ).decode("utf-8", errors="replace")
    from transformers import AutoTokenizer

    folder = Path(settings.base_model).expanduser()
    tokenizer = AutoTokenizer.from_pretrained(folder if folder.is_dir() else settings.base_model)

    def text(batch: dict, row: int) -> str:
        """Without the padding; packed windows hold several texts."""
        return tokenizer.decode(batch["input_ids"][row][batch["attention_mask"][row] == 1])

    return text


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
