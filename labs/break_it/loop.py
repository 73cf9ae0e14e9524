"""The loop: who meets whom, and when the learning rate moves."""

import datetime
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from labs.break_it.bug import Bug, Stop


class RankZeroCollective(Stop, name="rank-0-collective"):
    """A collective that only rank 0 calls: it waits for ranks that have gone on.

    What logging or saving on rank 0 needs from the others must be fetched before the condition. If
    the others' next collective looks alike, there is no hang but worse: it is paired with this one.
    """

    debug = "DETAIL"

    def given(self):
        return (torch.tensor([5.5]),)  # a message about a tensor without dimensions is garbled

    def wrong(loss):
        """a collective under `if rank == 0`"""
        if dist.get_rank() == 0:
            dist.all_reduce(loss)
            print("loss", float(loss) / dist.get_world_size())

    def right(loss):
        """all ranks call it, rank 0 prints"""
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            print("loss", float(loss) / dist.get_world_size())

    def detector(log_loss, loss):
        """`TORCH_DISTRIBUTED_DEBUG=DETAIL` names both collectives"""
        log_loss(loss)  # the environment variable does it: all collectives are compared first


class OneRankDecides(Stop, name="one-rank-decides"):
    """One rank decides alone: it leaves the loop, and the others wait for its gradients.

    Whatever a rank finds out about its own batch, clock or file must be made common before anybody
    acts on it. Here the time of rank 1 is up.
    """

    def given(self):
        deadline = time.monotonic() + (0 if self.rank == 1 else 3600)
        return DistributedDataParallel(self.model), self.own_batches(3), deadline

    def wrong(model, batches, deadline):
        """each rank looks at its own clock and leaves"""
        for batch in batches:
            model(**batch).backward()
            if time.monotonic() > deadline:
                break

    def right(model, batches, deadline):
        """the decision is all-reduced: all leave when one wants to"""
        for batch in batches:
            model(**batch).backward()
            stop = torch.tensor(float(time.monotonic() > deadline))
            dist.all_reduce(stop, op=dist.ReduceOp.MAX)  # ranks meet
            if stop:
                break

    def detector(train, model, *others):
        """a monitored barrier before each forward pass, in which rank 0 names who does not come"""

        def all_are_here(*_):  # Gloo only; with NCCL, add a Gloo group: group=dist.new_group(...)
            dist.monitored_barrier(timeout=datetime.timedelta(seconds=1), wait_all_ranks=True)

        model.register_forward_pre_hook(all_are_here)
        train(model, *others)


UPDATES = 8


class LrPerMicroBatch(Bug, name="lr-per-micro-batch"):
    """A learning rate that steps per micro-batch: the schedule ends long before the training.

    With 4 micro-batches an update, the rate reaches its end after a quarter of the updates, and
    accumulation, which should change nothing but memory, changes the training.
    """

    def given(self):
        model = DistributedDataParallel(self.model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=UPDATES)
        own = self.dataset[self.rank :: self.ranks][:4]
        return model, optimizer, scheduler, [[self.batch([x]) for x in own]] * UPDATES

    def wrong(model, optimizer, scheduler, updates):
        """`scheduler.step()` after each micro-batch"""
        rates = []
        for micro_batches in updates:
            for batch in micro_batches:
                (model(**batch) / len(micro_batches)).backward()
                scheduler.step()
            rates += scheduler.get_last_lr()[:1]
            optimizer.step()
            optimizer.zero_grad()
        return optimizer, scheduler, rates

    def right(model, optimizer, scheduler, updates):
        """`scheduler.step()` after each update"""
        rates = []
        for micro_batches in updates:
            for batch in micro_batches:
                (model(**batch) / len(micro_batches)).backward()
            rates += scheduler.get_last_lr()[:1]
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return optimizer, scheduler, rates

    def symptom(self, optimizer, scheduler, rates):
        still = sum(rate == 0 for rate in rates)
        return still, f"{still} of {len(rates)} updates ran at rate 0"

    def detector(optimizer, scheduler, *rates):
        """compares the scheduler's steps with AdamW's own count of its updates"""
        updates = max(int(state["step"]) for state in optimizer.state.values())
        assert scheduler.last_epoch == updates, (
            f"{updates} updates, but the scheduler has stepped {scheduler.last_epoch} times"
        )


class SchedulerAhead(LrPerMicroBatch, name="scheduler-ahead"):
    """The scheduler steps though the scaler skipped the update: the schedule runs ahead.

    When an fp16 gradient has overflowed, `scaler.step` leaves the weights alone and `scaler.update`
    halves the scale, as in the first updates here: just when a warm-up should be slow.
    """

    def given(self):
        model, optimizer, scheduler, _ = super().given()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**21)
        return model, optimizer, scheduler, scaler, self.own_batches(1) * UPDATES

    def wrong(model, optimizer, scheduler, scaler, batches):
        """`scheduler.step()` whatever the scaler did"""
        for batch in batches:
            with torch.autocast("cpu", torch.float16):
                loss = model(**batch)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
        return optimizer, scheduler

    def right(model, optimizer, scheduler, scaler, batches):
        """only when the scale has not dropped"""
        for batch in batches:
            with torch.autocast("cpu", torch.float16):
                loss = model(**batch)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            before = scaler.get_scale()
            scaler.update()
            if scaler.get_scale() >= before:  # else the update was skipped
                scheduler.step()
            optimizer.zero_grad()
        return optimizer, scheduler

    def symptom(self, optimizer, scheduler):
        updates = max(int(state["step"]) for state in optimizer.state.values())
        ahead = scheduler.last_epoch - updates
        return ahead, f"after {updates} updates the schedule is {ahead} steps ahead"
