"""The classic bugs of distributed training, each made for real on two ranks of this machine's CPU.

    python -m labs.break_it --list
    python -m labs.break_it --bug mean-of-means
    python -m labs.break_it --all

Most of these bugs raise no error. The loss falls, only more slowly, or the run is fine until it is
resumed, so each one is shown in four parts:

    the code     as a diff: `-` is the wrong version, `+` the right one, unmarked lines are in both
    symptom      a number measured with the wrong version and with the right one; or a hang, with
                 the place where each rank waits
    detector     a few lines to copy into a test or a training script
    verdict      what the detector said to the wrong version; it must be silent on the right one

What is shown is what runs: the functions are printed from their own source. Each version gets two
fresh processes with a process group of their own, and they are killed when their time is over.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import difflib
import faulthandler
import functools
import hashlib
import inspect
import json
import linecache
import os
import re
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

if not __package__:  # started by its path: the project is in the folder above
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from labs.common import end_with_lab, process_context, refuse_launcher, require_writable, say
from llm_ddp_parallel_training import (
    Launch,
    OneLineParser,
    RunError,
    ShardSampler,
    TinyCausalTransformer,
    Where,
    build_optimizer,
    build_tiny,
    choose_device,
    evaluate,
    gather,
    inputs_of,
    learning_rate,
    one_clear_ending,
    parameter_digest,
    parse_settings,
    print_on_any_terminal,
    training_step,
    updates_of_epoch,
    valid_targets,
    write_file,
    write_json,
)

RANKS = 2
HANG_S = 3  # after which a rank counts as waiting; what comes before takes milliseconds
LIMIT_S = 60  # for every other version, once its processes have started


class Bug:
    """One bug. Each rank makes an instance of its own, after it joined the process group.

    The first line of a subclass's docstring is its title, the rest says why it matters.

    `given` builds the arguments of both versions, `wrong` and `right`. What a version returns goes
    to `symptom`, which makes a number and a sentence of it, and to `detector`, which raises
    `AssertionError` when it finds the bug. All of them run on all ranks, which may meet in each.
    """

    name: str
    flags: Sequence[str] = ()  # of llm_ddp_parallel_training.py
    environment: ClassVar[dict[str, str]] = {}  # what the detector needs there

    def __init__(self, launch: Launch, folder: Path) -> None:
        self.launch, self.rank, self.ranks = launch, launch.rank, launch.world_size
        self.folder = folder  # the same on all ranks, empty
        self.settings = parse_settings(
            ["--cpu", "--threads", "1", "--batch-size", "4", *self.flags]
        )
        choose_device(launch, self.settings)
        self.built = build_tiny(launch, self.settings)
        self.model = self.built.model  # bare, and alike on all ranks by its seed
        self.dataset = self.built.data.train
        self.collate = self.built.collate

    def batch(self, places: Sequence[int]) -> dict:
        """The samples at these places of the training set, as one batch."""
        return self.collate([self.dataset[place] for place in places])

    def own_batches(self, count: int) -> list[dict]:
        """So many batches of 4, other samples on every rank."""
        own = range(self.rank, len(self.dataset), self.ranks)
        return [self.batch(own[4 * i : 4 * i + 4]) for i in range(count)]

    def one_process_gradient(self, global_batch: dict) -> torch.Tensor:
        """What one process alone would get for the global batch: the measure of all gradients."""
        alone = build_tiny(Launch(), self.settings).model
        alone(**inputs(global_batch)).backward()
        return gradient(alone)

    def spread(self, model: nn.Module) -> float:
        """The largest difference between two ranks' values of one weight."""
        copies = gather(nn.utils.parameters_to_vector(model.parameters()).detach(), self.launch)
        return max(float((copy - copies[0]).abs().max()) for copy in copies)


class Hang(Bug):
    """A bug that leaves ranks waiting for ever.

    Its symptom is seen from outside, in the ranks' stacks. The detector gets a version to run, so
    that it can do something before, around or after it, and raises what ends the waiting.
    """


def inputs(batch: dict) -> dict:
    """What the model takes of a batch, on the CPU."""
    return inputs_of(batch, torch.device("cpu"))


def gradient(model: nn.Module) -> torch.Tensor:
    """All gradients of a model as one vector."""
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """|a - b| / |b|, in L2 norms."""
    return float((a - b).norm() / b.norm())


# ------------------------------------------------------------------------------------------
# Data: which rank sees what
# ------------------------------------------------------------------------------------------


class NoSetEpoch(Bug):
    """No set_epoch: every epoch comes in the same order.

    A distributed sampler shuffles by (seed, epoch), and only the loop can tell it the epoch.
    Without that, the same samples share a batch for ever, and the model sees a fixed cycle.
    """

    name = "no-set-epoch"

    def given(self) -> tuple:
        return (ShardSampler(len(self.dataset), 0, self.ranks, self.rank),)

    def wrong(self, sampler):
        orders = {}
        for epoch in (1, 2):
            orders[epoch] = list(sampler)
        return orders

    def right(self, sampler):
        orders = {}
        for epoch in (1, 2):
            sampler.set_epoch(epoch)
            orders[epoch] = list(sampler)
        return orders

    def symptom(self, orders):
        first, second = orders[1], orders[2]
        same = sum(a == b for a, b in zip(first, second)) / len(first)
        return same, f"{same:.0%} of the samples came at the same place in both epochs"

    def detector(self, orders):
        assert orders[1] != orders[2], "two epochs in the same order: is set_epoch called?"


class NoSampler(Bug):
    """No DistributedSampler: every rank trains on the same data.

    With equal seeds all ranks shuffle alike, so N ranks compute one and the same gradient N times.
    It is right, and it costs N times what one process would cost. With unequal seeds the batches
    differ, but an epoch still shows every sample N times.
    """

    name = "no-sampler"

    def given(self) -> tuple:
        return self.dataset, self.collate

    def wrong(self, dataset, collate):
        order = torch.Generator().manual_seed(0)
        loader = DataLoader(dataset, 4, shuffle=True, generator=order, collate_fn=collate)
        return [int(i) for batch in loader for i in batch["record_ids"]]

    def right(self, dataset, collate):
        sampler = ShardSampler(len(dataset), 0, self.ranks, self.rank)
        loader = DataLoader(dataset, 4, sampler=sampler, collate_fn=collate)
        return [int(i) for batch in loader for i in batch["record_ids"]]

    def symptom(self, record_ids):
        seen = [i for ids in gather(record_ids, self.launch) for i in ids]
        times = len(seen) / len(set(seen))
        return times, f"an epoch trained {times:.2g} × on each of {len(set(seen))} records"

    def detector(self, record_ids):
        seen = [i for ids in gather(record_ids, self.launch) for i in ids]
        repeats = len(seen) - len(set(seen))
        assert not repeats, f"{repeats} of {len(seen)} records of the epoch came again"


class UnequalBatches(Hang):
    """Unequal numbers of batches: one rank is done while the other waits for its gradients.

    17 samples in batches of 4 are three batches on rank 0 and two on rank 1. DDP meets in every
    backward pass. The reference counts updates over all ranks and lets a rank whose samples ran
    out train on padding, which weighs nothing.
    """

    name = "unequal-batches"

    def given(self) -> tuple:
        dataset = [self.dataset[place] for place in range(17)]
        sampler = ShardSampler(len(dataset), 0, self.ranks, self.rank)
        loader = DataLoader(dataset, 4, sampler=sampler, collate_fn=self.collate)
        model = DistributedDataParallel(self.model)
        optimizer = build_optimizer(model, self.settings)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        step = functools.partial(training_step, model, optimizer, scaler)
        return model, loader, sampler, step

    def wrong(self, model, loader, sampler, step):
        for batch in loader:
            step([batch], self.launch, self.settings)

    def right(self, model, loader, sampler, step):
        for micro_batches in updates_of_epoch(loader, sampler, self.settings):
            step(micro_batches, self.launch, self.settings)

    def detector(self, train, model, *others):
        with Join([model], throw_on_early_termination=True):
            train(model, *others)


# ------------------------------------------------------------------------------------------
# Gradients: what is added up, and what it is divided by
# ------------------------------------------------------------------------------------------


class MeanOfMeans(Bug):
    """A mean of means: the ranks' mean losses are averaged, whatever they are means of.

    DDP divides the sum of the ranks' gradients by the number of ranks. With a mean loss on each
    rank, a token of the rank with the fewest tokens weighs the most. Here the texts of rank 0
    end after 8 bytes.
    """

    name = "mean-of-means"

    def given(self) -> tuple:
        texts = [self.dataset[place] for place in range(8)]
        texts[:4] = [(record_id, text[:8]) for record_id, text in texts[:4]]
        self.global_batch = self.collate(texts)
        own = self.collate(texts[4 * self.rank : 4 * self.rank + 4])
        return DistributedDataParallel(self.model), own

    def wrong(self, model, batch):
        loss = model(**inputs(batch))
        loss.backward()
        return gradient(model)

    def right(self, model, batch):
        loss = model(**inputs(batch))
        tokens = torch.tensor(float(valid_targets(batch["labels"])))
        all_tokens = tokens.clone()
        dist.all_reduce(all_tokens)  # ranks meet
        (loss * tokens * self.ranks / all_tokens).backward()
        return gradient(model)

    def symptom(self, found):
        wanted = self.one_process_gradient(self.global_batch)
        error = relative_difference(found, wanted)
        return error, f"the gradient is {error:.1e} (relative) off that of one process"

    def detector(self, found):
        wanted = self.one_process_gradient(self.global_batch)
        error = relative_difference(found, wanted)
        assert error < 1e-5, f"{error:.1e} off the gradient of the same global batch in one process"


class SumNotMean(Bug):
    """Forgotten averaging: the all-reduce adds up, and nobody divides.

    The gradient is N times too large, so the best learning rate changes with the number of ranks,
    and clipping sets in N times too early. AdamW hides it: it divides by the gradient's own size.
    """

    name = "sum-not-mean"
    flags = ("--pack",)  # full windows: as many tokens on every rank

    def given(self) -> tuple:
        self.global_batch = self.batch(range(8))
        return self.model, self.batch(range(4 * self.rank, 4 * self.rank + 4))

    def wrong(self, model, batch):
        model(**inputs(batch)).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        return gradient(model)

    def right(self, model, batch):
        model(**inputs(batch)).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.ranks
        return gradient(model)

    def symptom(self, found):
        times = float(found.norm() / self.one_process_gradient(self.global_batch).norm())
        return times, f"the gradient is {times:.4f} times as long as that of one process"

    def detector(self, found):
        times = float(found.norm() / self.one_process_gradient(self.global_batch).norm())
        assert abs(times - 1) < 1e-3, f"the gradient grew {times:.2f} times with {self.ranks} ranks"


class NoSyncOnLast(Bug):
    """no_sync on the last micro-batch, too: nothing is ever sent.

    Inside no_sync gradients stay local. The last micro-batch of an update must be outside, with
    its forward pass, for there DDP decides whether the backward pass will synchronize.
    """

    name = "no-sync-on-last"

    def given(self) -> tuple:
        model = DistributedDataParallel(self.model)
        return model, build_optimizer(model, self.settings), self.own_batches(2)

    def wrong(self, model, optimizer, micro_batches):
        with model.no_sync():
            for batch in micro_batches:
                model(**inputs(batch)).backward()
        optimizer.step()
        return model

    def right(self, model, optimizer, micro_batches):
        with model.no_sync():
            for batch in micro_batches[:-1]:
                model(**inputs(batch)).backward()
        model(**inputs(micro_batches[-1])).backward()
        optimizer.step()
        return model

    def symptom(self, model):
        spread = self.spread(model)
        return spread, f"after one update the ranks' weights differ by up to {spread:.1e}"

    def detector(self, model):
        norms = gather(float(gradient(model).norm()), self.launch)
        assert len(set(norms)) == 1, f"after backward the ranks' gradients have the norms {norms}"


class ClipBeforeUnscale(Bug):
    """Clipping before unscaling: the limit is applied to a gradient that is 65,536 times too long.

    The scaler multiplies the loss so that small fp16 gradients do not vanish. Clipped in that
    state, every gradient is cut to the limit, and unscaling then divides it by 65,536. AdamW, which
    looks at ratios, goes on with a gradient of any size until its eps takes over, so it stays
    unseen; plain SGD, as here, stands still.
    """

    name = "clip-before-unscale"
    LIMIT = 0.1

    def given(self) -> tuple:
        model = DistributedDataParallel(self.model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
        return model, optimizer, scaler, *self.own_batches(1)

    def wrong(self, model, optimizer, scaler, batch):
        scaler.scale(model(**inputs(batch))).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), self.LIMIT)
        scaler.step(optimizer)
        scaler.update()
        return model, scaler, float(norm)

    def right(self, model, optimizer, scaler, batch):
        scaler.scale(model(**inputs(batch))).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), self.LIMIT)
        scaler.step(optimizer)
        scaler.update()
        return model, scaler, float(norm)

    def symptom(self, outcome):
        model, _, _ = outcome
        used = float(gradient(model).norm())  # scaler.step has unscaled what was still scaled
        return used, f"the gradient that the optimizer used has norm {used:.2g}, limit {self.LIMIT}"

    def detector(self, outcome):
        _, scaler, norm = outcome
        assert norm < scaler.get_scale() / 100, f"norm {norm:,.0f}, which grows with the loss scale"


# ------------------------------------------------------------------------------------------
# Weights and random numbers: what must be alike on all ranks, and what must not
# ------------------------------------------------------------------------------------------


class DifferentWeights(Bug):
    """Different initial weights: gradients are averaged by hand, but the replicas never were equal.

    DDP sends rank 0's weights to all when it is built. Without it, a seed that contains the rank,
    or no seed at all, gives every rank another model; equal updates keep them apart for ever.
    """

    name = "different-weights"

    def given(self) -> tuple:
        return (self.own_batches(2),)

    def wrong(self, batches):
        torch.manual_seed(self.rank)
        model = TinyCausalTransformer()
        self.train_by_hand(model, batches)
        return model

    def right(self, batches):
        torch.manual_seed(self.rank)
        model = TinyCausalTransformer()
        for parameter in model.parameters():
            dist.broadcast(parameter.data, src=0)
        self.train_by_hand(model, batches)
        return model

    def train_by_hand(self, model: nn.Module, batches: list[dict]) -> None:
        """DDP in four lines: backward, all-reduce, divide, step."""
        optimizer = build_optimizer(model, self.settings)
        for batch in batches:
            optimizer.zero_grad()
            model(**inputs(batch)).backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.ranks
            optimizer.step()

    def symptom(self, model):
        spread = self.spread(model)
        return spread, f"after two updates the ranks' weights differ by up to {spread:.1e}"

    def detector(self, model):
        digests = gather(parameter_digest(model)[:8], self.launch)
        assert len(set(digests)) == 1, f"the ranks' weights have the digests {digests}"


class SameDropout(Bug):
    """The same dropout masks on all ranks: what one rank leaves out, all leave out.

    The masks come from the seed that made the weights alike, so the ranks' noise does not average
    out. Weights first, from one seed; then a seed that contains the rank.
    """

    name = "same-dropout"
    flags = ("--dropout", "0.2")

    def given(self) -> tuple:
        self.masks = []
        self.model.drop.register_forward_hook(lambda _, __, out: self.masks.append(out == 0))
        return DistributedDataParallel(self.model), *self.own_batches(1)

    def wrong(self, model, batch):
        torch.manual_seed(self.settings.seed)
        model(**inputs(batch)).backward()
        return self.masks[0]

    def right(self, model, batch):
        torch.manual_seed(self.settings.seed + 1 + self.rank)
        model(**inputs(batch)).backward()
        return self.masks[0]

    def symptom(self, mask):
        first, second = gather(mask, self.launch)
        alike = float((first == second).float().mean())
        return alike, f"{alike:.1%} of the mask is alike on both ranks (by chance: 68 %)"

    def detector(self, mask):
        state = hashlib.sha256(torch.get_rng_state().numpy()).hexdigest()[:8]
        states = gather(state, self.launch)
        assert len(set(states)) == len(states), f"the ranks' random states are {states}"


# ------------------------------------------------------------------------------------------
# The loop: who meets whom, and when the rate moves
# ------------------------------------------------------------------------------------------


class RankZeroCollective(Hang):
    """A collective that only rank 0 calls: it waits for ranks that have gone on.

    Logging, saving and printing happen on rank 0; whatever they need from the others must be
    fetched before the condition. If the others' next collective looks alike, there is no hang but
    worse: it is paired with the wrong one, and every number from then on is another one's.
    """

    name = "rank-0-collective"
    environment: ClassVar[dict[str, str]] = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}

    def given(self) -> tuple:
        return (torch.tensor([5.5]),)  # a message about a tensor without dimensions is garbled

    def wrong(self, loss):
        if self.rank == 0:
            dist.all_reduce(loss)
            print("loss", float(loss) / self.ranks)

    def right(self, loss):
        dist.all_reduce(loss)
        if self.rank == 0:
            print("loss", float(loss) / self.ranks)

    def detector(self, log_loss, loss):
        log_loss(loss)  # the environment variable does it: all collectives are compared first


class LrPerMicroBatch(Bug):
    """A learning rate that steps per micro-batch: the schedule ends long before the training.

    With 4 micro-batches an update, the rate reaches its end after a quarter of the updates, and
    `--grad-accum`, which should change nothing but memory, changes the training.
    """

    name = "lr-per-micro-batch"
    flags = ("--schedule", "linear", "--max-steps", "8", "--grad-accum", "4", "--batch-size", "1")

    def given(self) -> tuple:
        model, s = DistributedDataParallel(self.model), self.settings
        optimizer = build_optimizer(model, s)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=s.max_steps)
        update = [self.batch([place]) for place in range(self.rank, 4 * self.ranks, self.ranks)]
        return model, optimizer, scheduler, [update] * s.max_steps

    def wrong(self, model, optimizer, scheduler, updates):
        rates = []
        for micro_batches in updates:
            for batch in micro_batches:
                (model(**inputs(batch)) / len(micro_batches)).backward()
                scheduler.step()
            rates += scheduler.get_last_lr()[:1]
            optimizer.step()
            optimizer.zero_grad()
        return rates

    def right(self, model, optimizer, scheduler, updates):
        rates = []
        for micro_batches in updates:
            for batch in micro_batches:
                (model(**inputs(batch)) / len(micro_batches)).backward()
            rates += scheduler.get_last_lr()[:1]
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return rates

    def symptom(self, rates):
        still = sum(rate == 0 for rate in rates)
        return still, f"{still} of {len(rates)} updates ran at rate 0"

    def detector(self, rates):
        planned = [learning_rate(u, self.settings, len(rates)) for u in range(len(rates))]
        for update, (rate, plan) in enumerate(zip(rates, planned)):
            assert abs(rate - plan) < 1e-9, f"update {update}: rate {rate:.1e}, planned {plan:.1e}"


# ------------------------------------------------------------------------------------------
# Validation and saving: work beside the training
# ------------------------------------------------------------------------------------------


class ModelWithBuffer(nn.Module):
    """The tiny model, with its causal mask as a buffer, as many models keep theirs."""

    def __init__(self, tiny: TinyCausalTransformer) -> None:
        super().__init__()
        self.tiny = tiny
        self.register_buffer("mask", torch.ones(64, 64, dtype=torch.bool).triu(1))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.tiny(input_ids, labels)


class ValidateThroughWrapper(Hang):
    """Validation through the wrapper on rank 0: its forward pass meets ranks that are elsewhere.

    Before a forward pass DDP sends rank 0's buffers to all ranks, also in eval mode and without
    gradients. What one rank does alone must use the module inside the wrapper.
    """

    name = "validate-through-wrapper"

    def given(self) -> tuple:
        return DistributedDataParallel(ModelWithBuffer(self.model)).eval(), *self.own_batches(1)

    def wrong(self, model, batch):
        if self.rank == 0:
            with torch.no_grad():
                print("validation loss", float(model(**inputs(batch))))

    def right(self, model, batch):
        if self.rank == 0:
            with torch.no_grad():
                print("validation loss", float(model.module(**inputs(batch))))

    def detector(self, validate, model, *others):
        def while_training(module, _inputs):
            assert module.training, "a forward pass through the wrapper, but not to train"

        model.register_forward_pre_hook(while_training)
        validate(model, *others)


class ValidationPadding(Bug):
    """Validation that counts padding twice: the sampler repeats samples to make shares even.

    3 samples on 2 ranks become 4. The result then depends on the number of ranks, and runs that
    differ in it cannot be compared. Share out without repeats, and add up before dividing.
    """

    name = "validation-padding"

    def given(self) -> tuple:
        return self.model, self.built.data.validation

    def wrong(self, model, dataset):
        share = DistributedSampler(dataset, self.ranks, self.rank, shuffle=False)
        loader = DataLoader(dataset, 4, sampler=share, collate_fn=self.collate)
        return evaluate(model, loader, self.launch, self.settings), list(share)

    def right(self, model, dataset):
        share = range(self.rank, len(dataset), self.ranks)
        loader = DataLoader(dataset, 4, sampler=share, collate_fn=self.collate)
        return evaluate(model, loader, self.launch, self.settings), list(share)

    def symptom(self, outcome):
        loss, _ = outcome
        everything = DataLoader(self.built.data.validation, 4, collate_fn=self.collate)
        alone = evaluate(self.model, everything, Launch(), self.settings)
        error = abs(loss - alone)
        return error, f"the validation loss is {error:.1e} off that of one process"

    def detector(self, outcome):
        _, share = outcome
        counted = sorted(i for places in gather(share, self.launch) for i in places)
        expected = list(range(len(self.built.data.validation)))
        assert counted == expected, f"samples {counted} were counted, not {expected}"


class ModuleKeys(Bug):
    """`module.` keys: what was saved from the wrapper does not fit the model.

    All names of a wrapped model begin with `module.`; loading without looking (`strict=False`)
    then loads nothing at all and leaves random weights. Save the model inside.
    """

    name = "module-keys"

    def given(self) -> tuple:
        return DistributedDataParallel(self.model), self.folder / "model.pt"

    def wrong(self, model, path):
        if self.rank == 0:
            torch.save(model.state_dict(), path)
        return path

    def right(self, model, path):
        if self.rank == 0:
            torch.save(model.module.state_dict(), path)
        return path

    def symptom(self, path):
        state = torch.load(path, weights_only=True) if self.rank == 0 else {}
        fitting = len(state.keys() & self.model.state_dict().keys())
        lost = len(state) - fitting
        return lost, f"{lost} of {len(state)} saved tensors have no place in the bare model"

    def detector(self, path):
        if self.rank == 0:
            state = torch.load(path, weights_only=True)
            missing, unexpected = self.model.load_state_dict(state, strict=False)
            assert not missing + unexpected, f"{missing[0]} is missing, {unexpected[0]} is extra"


class EveryRankSaves(Bug):
    """Saving from every rank into one file: the last writer wins, or two are mixed.

    Whoever opens the file second empties what the first one had finished, so there is a moment
    without any checkpoint; what remains is one rank's state, or pieces of two. Rank 0 alone
    writes, beside the old file, and renames when all is there (`write_file` of the reference).
    """

    name = "every-rank-saves"
    SAVES = 10

    def given(self) -> tuple:
        torch.manual_seed(1 + self.rank)
        state = {"model": self.model.state_dict(), "random": torch.get_rng_state()}
        return state, [self.folder / f"{save}.pt" for save in range(self.SAVES)]

    def wrong(self, state, paths):
        for path in paths:
            self.be_late()
            torch.save(state, path)
        return state, paths

    def right(self, state, paths):
        for path in paths:
            self.be_late()
            if self.rank == 0:
                write_file(path, lambda file: torch.save(state, file))
        return state, paths

    def be_late(self) -> None:
        """Ranks are never quite in step: rank 1 comes some milliseconds later here."""
        dist.barrier()
        time.sleep(0.02 * self.rank)

    def symptom(self, outcome):
        spoiled = sum(not self.holds(*outcome, place) for place in range(self.SAVES))
        return spoiled, f"{spoiled} of {self.SAVES} files do not hold what rank 0 saved"

    def holds(self, state: dict, paths: list[Path], place: int) -> bool:
        """Whether rank 0 finds its own state in a file."""
        try:
            loaded = torch.load(paths[place], weights_only=True)
        except Exception:  # torch raises many kinds for a mixed file
            return False
        return torch.equal(loaded["random"], state["random"])

    def detector(self, outcome):
        if self.rank == 0:
            state, paths = outcome
            for path in paths:
                loaded = torch.load(path, weights_only=True)
                same = torch.equal(loaded["random"], state["random"])
                assert same, "read back, the file holds another rank's random state"


BUGS: dict[str, type[Bug]] = {
    bug.name: bug
    for bug in (
        NoSetEpoch, NoSampler, UnequalBatches,
        MeanOfMeans, SumNotMean, NoSyncOnLast, ClipBeforeUnscale,
        DifferentWeights, SameDropout,
        RankZeroCollective, LrPerMicroBatch,
        ValidateThroughWrapper, ValidationPadding, ModuleKeys, EveryRankSaves,
    )
}  # fmt: skip


# ------------------------------------------------------------------------------------------
# Running a version on two ranks
# ------------------------------------------------------------------------------------------

# What a rank that waits in C++ is doing there, by the innermost Python function on its stack.
MEETINGS = {
    "_engine_run_backward": "DDP's all-reduce of the gradients",
    "_distributed_broadcast_coalesced": "DDP's broadcast of the buffers",
}


def rank_main(name: str, version: str, guarded: bool, rank: int, folder: Path) -> None:
    """One rank of one version of a bug, in a process of its own.

    Writes to `folder` what `examine` found, as `<rank>.json`; all that the process prints, as
    `<rank>.log`; and if it is still busy when its time is over, its stack, as `<rank>.stack`.
    """
    end_with_lab()
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    if guarded:
        os.environ.update(BUGS[name].environment)
        dist.set_debug_level_from_env()
    store = (folder / "store").as_uri()
    patience = datetime.timedelta(seconds=LIMIT_S)  # an orphan ends by itself
    dist.init_process_group("gloo", store, rank=rank, world_size=RANKS, timeout=patience)
    bug = BUGS[name](Launch(rank, rank, RANKS, RANKS), folder / "files")
    given = bug.given()
    stack = open(folder / f"{rank}.stack", "w", encoding="utf-8")
    dist.barrier()
    limit = HANG_S if hangs(name, version, guarded) else LIMIT_S
    faulthandler.dump_traceback_later(limit, file=stack)
    finding = examine(bug, getattr(bug, version), given, guarded)
    write_json(folder / f"{rank}.json", finding)
    os._exit(0)  # a group that is broken on purpose cannot be destroyed in order


def examine(bug: Bug, version: Callable, given: tuple, guarded: bool) -> dict[str, Any]:
    """Runs a version and the detector; the symptom's number and sentence, what was detected."""
    finding = {"number": 0, "symptom": "every rank came back", "detected": None}
    if not isinstance(bug, Hang):
        outcome = version(*given)
        finding["number"], finding["symptom"] = bug.symptom(outcome)
        detect = functools.partial(bug.detector, outcome)
    elif guarded:
        detect = functools.partial(bug.detector, version, *given)
    else:
        detect = functools.partial(version, *given)  # returns, if at all, without a finding
    try:
        detect()
        gather("done", bug.launch)  # the end of the job, where ranks meet once more
    except (AssertionError, RuntimeError) as error:
        finding["detected"] = str(error)
    return {**finding, "at": time.time()}


def run_version(name: str, version: str, guarded: bool = False) -> list[dict[str, Any]]:
    """Runs "wrong" or "right" on two fresh ranks; what each found, or `{"waits": where}`.

    A `guarded` hang runs inside its detector. Raises `RunError` if a rank failed, or waits where
    none should.
    """
    context = process_context(["torch._dynamo"])
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "files").mkdir()
        processes = [
            context.Process(target=rank_main, args=(name, version, guarded, rank, folder))
            for rank in range(RANKS)
        ]
        try:
            for process in processes:
                process.start()
            wait_for(processes, folder)
        finally:
            for process in processes:
                if process.pid:  # else it was not started yet
                    process.kill()
                    process.join()
        found = [read_finding(folder, rank, f"{name}, {version}") for rank in range(RANKS)]
    if not hangs(name, version, guarded):
        for rank, finding in enumerate(found):
            if "waits" in finding:
                raise RunError(f"{name}, {version}: rank {rank} waits in {finding['waits']}")
    return found


def hangs(name: str, version: str, guarded: bool) -> bool:
    """Whether ranks are expected to wait until they are killed."""
    return issubclass(BUGS[name], Hang) and version == "wrong" and not guarded


def wait_for(processes: list, folder: Path) -> None:
    """Returns when every rank has ended or written its stack, at the latest after twice LIMIT_S."""
    until = time.monotonic() + 2 * LIMIT_S
    busy = dict(enumerate(processes))
    while busy and time.monotonic() < until:
        time.sleep(0.02)
        for rank, process in list(busy.items()):
            stack = folder / f"{rank}.stack"
            if not process.is_alive() or (stack.exists() and stack.stat().st_size):
                del busy[rank]
    time.sleep(0.1)  # for the rest of a stack


def read_finding(folder: Path, rank: int, what: str) -> dict[str, Any]:
    """What a rank left behind."""
    stack = folder / f"{rank}.stack"
    if stack.exists() and (frames := stack.read_text("utf-8")):
        return {"waits": waiting_place(frames)}
    try:
        return json.loads((folder / f"{rank}.json").read_text("utf-8"))
    except FileNotFoundError:
        log = (folder / f"{rank}.log").read_text("utf-8", errors="replace")
        raise RunError(f"{what}: rank {rank} failed\n{log}") from None


def waiting_place(stacks: str) -> str:
    """Names the collective and the line of this file it was reached from, as faulthandler has them.

    Of several threads, the one that counts is the one with a frame of this file.
    """
    frame = re.compile(r'File "(.+)", line (\d+) in (\S+)')
    for thread in stacks.split("\n\n"):
        frames = frame.findall(thread)
        for path, line, _ in frames:
            if Path(path).name == Path(__file__).name:
                innermost = frames[0][2]
                code = linecache.getline(__file__, int(line)).partition("#")[0].strip()
                return f"{MEETINGS.get(innermost, innermost)}, at `{code}`"
    return "an unknown place"


@dataclasses.dataclass
class Finding:
    """What came of one version."""

    number: float  # the symptom; of a hang, how many ranks wait for ever
    symptom: str  # the same as a sentence
    detected: str | None  # what the detector says, None if it found nothing


def reproduce(name: str) -> dict[str, Finding]:
    """Runs both versions of a bug: {"wrong": finding, "right": finding}."""
    kind = BUGS[name]
    findings = {}
    for version in ("wrong", "right"):
        found = run_version(name, version, guarded=issubclass(kind, Hang))
        said = sorted((f["at"], f["detected"]) for f in found if f.get("detected"))
        detected = one_line(said[0][1]) if said else None  # the first; others follow from it
        if issubclass(kind, Hang) and version == "wrong":
            found = run_version(name, version)
        waits = {rank: f["waits"] for rank, f in enumerate(found) if "waits" in f}
        symptom = "; ".join(f"rank {rank} waits in {place}" for rank, place in waits.items())
        number = len(waits) if waits else found[0]["number"]
        findings[version] = Finding(number, symptom or found[0]["symptom"], detected)
    return findings


# ------------------------------------------------------------------------------------------
# The report
# ------------------------------------------------------------------------------------------

WIDTH = 100


def one_line(message: str) -> str:
    """A message of PyTorch without its line breaks, addresses of its C++ source and stack."""
    message = re.split("Exception raised from|Collectives differ", message)[0]
    message = re.sub(r"\[\S+?:\d+\] |, TensorDeviceTypes=.*?\(nullopt\)\)", "", message)
    return " ".join(message.split())


def source(function: Callable) -> list[str]:
    return textwrap.dedent(inspect.getsource(function)).splitlines()


def title(kind: type[Bug]) -> str:
    return inspect.getdoc(kind).splitlines()[0]


def tell(name: str, findings: dict[str, Finding]) -> None:
    """Prints all there is to say about a bug."""
    kind = BUGS[name]
    indented = functools.partial(textwrap.indent, prefix="    ")
    about = inspect.getdoc(kind).split("\n\n", 1)[1]
    code = [
        line
        for line in difflib.ndiff(source(kind.wrong), source(kind.right))
        if not line.startswith("?")
    ]
    environment = "".join(f"{key}={value}\n" for key, value in kind.environment.items())
    say(f"\n{name}\n{'=' * len(name)}\n{title(kind)}\n\n{textwrap.fill(about, WIDTH)}\n")
    say(indented("\n".join(code)))
    say("\nsymptom")
    for version, finding in findings.items():
        say(f"    {version}  " + finding.symptom.replace("; ", "\n           "))
    say("\ndetector")
    say(indented(environment + "\n".join(source(kind.detector))) + "\n")
    for version, finding in findings.items():
        say(f"    {version}  {finding.detected or 'silent'}")


def shown(name: str, findings: dict[str, Finding]) -> bool:
    """Whether the detector spoke to the wrong version only, and what should hang did."""
    hung = not issubclass(BUGS[name], Hang) or findings["wrong"].number == RANKS
    return hung and bool(findings["wrong"].detected) and findings["right"].detected is None


def parser() -> argparse.ArgumentParser:
    options = OneLineParser(
        prog="python -m labs.break_it", allow_abbrev=False,
        description="The classic bugs of distributed training, each made for real on two ranks.",
    )  # fmt: skip
    what = options.add_mutually_exclusive_group(required=True)
    what.add_argument("--list", action="store_true", help="the bugs, one a line")
    what.add_argument("--bug", metavar="NAME", choices=BUGS, help="make this one")
    what.add_argument("--all", action="store_true", help="make all of them, in about a minute")
    options.add_argument("--json", type=Path, metavar="FILE",
                         help="also write the findings there, replacing an old file")  # fmt: skip
    return options


def main(argv: Sequence[str] | None = None) -> None:
    print_on_any_terminal()
    with one_clear_ending(Where()):
        given = parser().parse_args(argv)
        refuse_launcher("break_it")
        if given.list:
            say("\n".join(f"{name:25} {title(kind)}" for name, kind in BUGS.items()))
            return
        require_writable("--json", given.json)
        findings = {}
        for name in BUGS if given.all else [given.bug]:
            findings[name] = reproduce(name)
            tell(name, findings[name])
        if given.json:
            write_json(given.json, {
                name: {version: dataclasses.asdict(f) for version, f in both.items()}
                for name, both in findings.items()
            })  # fmt: skip
        missing = [name for name, both in findings.items() if not shown(name, both)]
        say(f"\n{len(findings) - len(missing)} of {len(findings)} bugs made and detected")
        if missing:
            raise RunError(f"not shown: {', '.join(missing)}")


if __name__ == "__main__":
    main()
