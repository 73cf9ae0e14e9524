"""All figures of one step: what each rank read, computed, sent and received."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from pathlib import Path

from torch import Generator
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
from labs.explain_step.three_ways import Parts, capacity, norm, observed_step, prove

WAIT = "wait for all-reduce"  # the end of a backward pass, when all gradients are computed


def updates_of(run: ddp.Run) -> Iterator[tuple[list[dict], list[int], float]]:
    """One update after another, over as many epochs as it takes: this rank's micro-batches, the
    records that one process with the whole global batch would take next, the learning rate."""
    launch, s, data = run.launch, run.settings, run.data.train
    sampler = ddp.ShardSampler(len(data), s.seed, launch.world_size, launch.rank)
    alone, numbers = ddp.EpochSampler(len(data), s.seed), itertools.count()
    # A loader draws a seed from its generator: from one of its own, not from the dropout's.
    own = {"sampler": sampler, "collate_fn": run.collate, "generator": Generator()}
    loader = DataLoader(data, s.batch_size, **own)
    for epoch in itertools.count(1):
        sampler.set_epoch(epoch)
        alone.set_epoch(epoch)
        order = iter(alone)
        for micro_batches in ddp.updates_of_epoch(loader, sampler, s):
            samples = itertools.islice(order, ddp.global_batch(launch, s))
            rate = ddp.learning_rate(next(numbers), s, run.updates)
            yield micro_batches, sorted(data[i][0] for i in samples), rate


def explain(
    parts: Parts, watch: BucketWatch | None, update: tuple, launch: ddp.Launch, text: Callable
) -> dict:
    """Makes one update, one of `updates_of`, and tells all about it, for all ranks. Ranks meet.

    `watch` is None in a single process. `text(batch, row)` turns a row back into text.
    """
    s, (micro_batches, expected, rate) = parts.settings, update
    for group in parts.optimizer.param_groups:
        group["lr"] = rate
    twins = [parts.twin(), parts.twin()] if watch else []
    before, losses, scale = parts.weights(), [], parts.scaler.get_scale()  # 1 but for fp16
    observer = Observer(launch, parts.bare)  # ranks meet
    if watch:
        watch.clock, watch.buckets = observer.clock, []
    listening = parts.model.register_forward_hook(lambda *call: losses.append(call[-1].detach()))
    outcome = observed_step(parts, micro_batches, observer)
    listening.remove()
    random_after = random_state(launch.device)

    counts = [ddp.valid_targets(batch["labels"]) for batch in micro_batches]
    tokens, buckets, local = sum(counts), [], outcome.gradient  # all there is in a single process
    if watch:
        buckets = watch.buckets
        # Before the all-reduce a bucket holds Σ_j ∇S_j / c; times c / n_r it is the gradient of the
        # mean over this rank's tokens.
        factor = capacity(s) / max(tokens, 1) / scale
        local = local_gradient(buckets, factor, sorted(outcome.gradient))
    own = {
        "rank": launch.rank,
        "samples": [
            {"record": record, "text": text(batch, row)[:80]}
            for batch in micro_batches
            for row, record in enumerate(batch["record_ids"].tolist())
            if record >= 0  # not padding
        ],
        "tokens": tokens,
        "weight": tokens / outcome.tokens,
        "local_loss": sum(float(x) * n for x, n in zip(losses, counts)) / max(tokens, 1),
        "local_gradient_norms": norms(local),
        "digests": {
            "weights before": ddp.digest_of(before.items()),
            "local gradient": ddp.digest_of(local.items()),
            "averaged gradient": ddp.digest_of(outcome.gradient.items()),
            "weights after": ddp.digest_of(outcome.weights.items()),
        },
        **timeline(observer.phases, buckets, observer.clock),
    }
    proof = prove(outcome, twins, micro_batches, observer) if watch else {}
    set_random_state(random_after, launch.device)  # the twins have drawn, too
    return {
        "loss": outcome.loss,
        "tokens": outcome.tokens,
        "learning_rate": rate,
        "clip_factor": outcome.clip_factor,
        "gradient_norms": norms(outcome.gradient),
        "update_norms": norms({n: w - before[n] for n, w in outcome.weights.items()}),
        "expected_records": expected,
        "ranks": ddp.gather(own, launch),  # ranks meet
        "proof": proof,
    }


def local_gradient(buckets: list[Bucket], factor: float, trained: list[str]) -> Tensors:
    """What the buckets held, times a factor, by the names of what is trained, in order.

    Raises `RunError` unless every trained parameter was sent once.
    """
    parts = [part for bucket in buckets for part in bucket.local.items()]
    if sorted(name for name, _ in parts) != trained:
        raise ddp.RunError("DDP did not send every trained parameter once")
    return {
        name: gradient.flatten() * factor for name, gradient in sorted(parts, key=itemgetter(0))
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


def text_reader(settings: ddp.Settings) -> Callable[[dict, int], str]:
    """A function that turns a row of a batch back into text, without its padding."""
    if settings.model == "tiny":
        return lambda batch, row: bytes(
            token for token in batch["input_ids"][row].tolist() if token < ddp.PAD
        ).decode("utf-8", errors="replace")
    from transformers import AutoTokenizer

    folder = Path(settings.base_model).expanduser()
    tokenizer = AutoTokenizer.from_pretrained(folder if folder.is_dir() else settings.base_model)
    return lambda batch, row: tokenizer.decode(
        batch["input_ids"][row][batch["attention_mask"][row] == 1]
    )


def timeline(phases: list[list], buckets: list[Bucket], clock: Clock) -> dict:
    """Phases and buckets of one rank in seconds, and how much of the all-reduces was hidden.

    When the last bucket is sent, the backward pass has computed its last gradient; what it still
    takes is waiting. So what is under way before that moment is hidden, and the rest is not.
    """
    if not buckets:
        return {"phases": phases, "buckets": []}
    sent = [
        {"parameters": list(bucket.local), "bytes": bucket.bytes}
        | {when: clock.at(getattr(bucket, when)) for when in ("ready", "sent", "done")}
        for bucket in buckets
    ]
    last = max(i for i, phase in enumerate(phases) if phase[0] == "backward")
    _, begin, end = phases[last]
    computed = sent[-1]["sent"]
    phases[last : last + 1] = ["backward", begin, computed], [WAIT, computed, end]
    overlap = {
        "backward": computed - begin,
        "under_way": covered((b["sent"], b["done"]) for b in sent),
        "hidden": covered((b["sent"], min(b["done"], computed)) for b in sent),
    }
    return {"phases": phases, "buckets": sent, "overlap": overlap}


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """How long at least one of the (begin, end) spans lasts."""
    total, reached = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(end - max(begin, reached), 0)
        reached = max(end, reached)
    return total
