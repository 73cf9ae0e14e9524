"""Gradients: what is added up, and what it is divided by."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labs.break_it.bug import Bug, gradient_is_off
from labs.break_it.detectors import beside_one_process, like_one_process


class MeanOfMeans(Bug, name="mean-of-means"):
    """A mean of means: the ranks' mean losses are averaged, whatever they are means of.

    With a mean loss on each rank, a token of the rank with the fewest tokens weighs the most. Here
    the texts of rank 0 end after 8 bytes.
    """

    def given(self):
        own = self.dataset[4 * self.rank : 4 * self.rank + 4]
        batch = self.batch(own, cut=8 if self.rank == 0 else None)
        return DistributedDataParallel(self.model), batch

    def wrong(model, batch):
        """DDP averages the ranks' mean losses"""
        loss = model(**batch)
        loss.backward()
        return model, [batch]

    def right(model, batch):
        """each rank's mean is weighted by its share of all tokens"""
        loss = model(**batch)
        tokens = (batch["labels"][:, 1:] != -100).sum()
        all_tokens = tokens.clone()
        dist.all_reduce(all_tokens)  # ranks meet
        (loss * tokens * dist.get_world_size() / all_tokens).backward()
        return model, [batch]

    symptom = gradient_is_off
    detector = like_one_process


class MeanOfMicroBatches(MeanOfMeans, name="mean-of-micro-batches"):
    """Accumulation as a mean of means: each micro-batch's mean loss is divided by their number.

    The same mistake within a rank: tokens of a short micro-batch weigh more, so that accumulation,
    which should change nothing but memory, changes the training.
    """

    def given(self):
        own = self.dataset[self.rank :: self.ranks]
        micro_batches = [self.batch(own[:4], cut=8), self.batch(own[4:8])]
        return DistributedDataParallel(self.model), micro_batches

    def wrong(model, micro_batches):
        """each micro-batch's mean loss, divided by their number"""
        for batch in micro_batches:
            loss = model(**batch)
            (loss / len(micro_batches)).backward()
        return model, micro_batches

    def right(model, micro_batches):
        """each mean is weighted by its share of the tokens of all micro-batches and ranks"""
        counts = [(batch["labels"][:, 1:] != -100).sum() for batch in micro_batches]
        all_tokens = sum(counts)
        dist.all_reduce(all_tokens)  # ranks meet
        for batch, tokens in zip(micro_batches, counts):
            loss = model(**batch)
            (loss * tokens * dist.get_world_size() / all_tokens).backward()
        return model, micro_batches


class SumNotMean(Bug, name="sum-not-mean"):
    """Forgotten averaging: the all-reduce adds up, and nobody divides.

    The gradient is N times too long, so the best learning rate changes with the number of ranks,
    and clipping sets in N times too early. AdamW hides it: it divides by the gradient's own size.
    """

    def given(self):
        return self.model, self.batch(self.dataset[4 * self.rank : 4 * self.rank + 4], cut=8)

    def wrong(model, batch):
        """all-reduce adds up, and nobody divides"""
        model(**batch).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        return model, [batch]

    def right(model, batch):
        """divided by the number of ranks, as DDP does"""
        model(**batch).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        return model, [batch]

    def symptom(self, model, micro_batches):
        found, wanted = beside_one_process(model, micro_batches)
        times = float(found.norm() / wanted.norm())
        return times, f"the gradient is {times:.4f} times as long as that of one process"

    detector = like_one_process


class ClipBeforeUnscale(Bug, name="clip-before-unscale"):
    """Clipping before unscaling: the limit is applied to a gradient that is 65,536 times too long.

    Every gradient is cut to the limit, and unscaling then divides it by 65,536. AdamW, which looks
    at ratios, hides it until its eps takes over; plain SGD, as here, stands still.
    """

    def given(self):
        model = DistributedDataParallel(self.model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
        return model, optimizer, scaler, *self.own_batches(1), 0.1

    def wrong(model, optimizer, scaler, batch, limit):
        """clipped while the loss scale is still in the gradient"""
        scaler.scale(model(**batch)).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
        scaler.step(optimizer)
        scaler.update()
        return model, norm, limit

    def right(model, optimizer, scaler, batch, limit):
        """`scaler.unscale_(optimizer)` first"""
        scaler.scale(model(**batch)).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
        scaler.step(optimizer)
        scaler.update()
        return model, norm, limit

    def symptom(self, model, norm, limit):
        used = float(nn.utils.get_total_norm([p.grad for p in model.parameters()]))
        return used, f"the gradient that the optimizer used has norm {used:.2g}, limit {limit}"

    def detector(model, norm, limit):
        """after the step, compares the gradient's norm with what clipping should have left of it"""
        # By then the scaler has unscaled what was still scaled. It skips a step that overflowed.
        used = float(nn.utils.get_total_norm([p.grad for p in model.parameters()]))
        left = min(float(norm), limit)
        assert not math.isfinite(norm) or math.isclose(used, left, rel_tol=1e-3), (
            f"clipping left a norm of {left:.2g}, and the optimizer used one of {used:.2g}"
        )
