"""Data: which rank sees what."""

import itertools

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from labs.break_it.bug import Bug, Stop
from labs.break_it.detectors import gathered


def record_ids(samples):
    """A batch of which only the record ids are wanted."""
    return [record for record, _ in samples]


class NoSetEpoch(Bug, name="no-set-epoch"):
    """No set_epoch: every epoch comes in the same order.

    A distributed sampler shuffles by seed and epoch, and only the loop can tell it the epoch.
    Without that, the same samples share a batch for ever, and the model sees a fixed cycle.
    """

    def given(self):
        sampler = DistributedSampler(self.dataset)
        return sampler, DataLoader(self.dataset, 4, sampler=sampler, collate_fn=record_ids)

    def wrong(sampler, loader):
        """the sampler is never told the epoch"""
        orders = []
        for _ in range(2):
            orders.append([record for batch in loader for record in batch])
        return orders

    def right(sampler, loader):
        """`sampler.set_epoch(epoch)` before each epoch"""
        orders = []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            orders.append([record for batch in loader for record in batch])
        return orders

    def symptom(self, orders):
        same = sum(a == b for a, b in zip(*orders)) / len(orders[0])
        return same, f"{same:.0%} of the samples came at the same place in both epochs"

    def detector(orders):
        """compares the orders of two epochs"""
        assert orders[0] != orders[1], "two epochs in the same order: is set_epoch called?"


class NoSampler(Bug, name="no-sampler"):
    """No DistributedSampler: every rank trains on the same data.

    With equal seeds all ranks shuffle alike, so N ranks compute one and the same gradient N times.
    It is right, and it costs N times what one process would cost. With unequal seeds the batches
    differ, but an epoch still shows every sample N times.
    """

    def given(self):
        return (self.dataset[:28],)

    def wrong(dataset):
        """each rank shuffles the whole dataset"""
        torch.manual_seed(0)
        loader = DataLoader(dataset, 4, shuffle=True, collate_fn=record_ids)
        return [record for batch in loader for record in batch]

    def right(dataset):
        """`sampler=DistributedSampler(dataset)`"""
        sampler = DistributedSampler(dataset, seed=0)
        loader = DataLoader(dataset, 4, sampler=sampler, collate_fn=record_ids)
        return [record for batch in loader for record in batch]

    def symptom(self, records):
        seen = [record for own in gathered(records) for record in own]
        times = len(seen) / len(set(seen))
        return times, f"an epoch trained {times:.2g} × on each of {len(set(seen))} records"

    def detector(records):
        """gathers the record ids of an epoch"""
        seen = [record for own in gathered(records) for record in own]
        repeats = len(seen) - len(set(seen))
        padding = dist.get_world_size() - 1  # at most, with which the sampler makes shares even
        assert repeats <= padding, f"{repeats} of {len(seen)} records of the epoch came again"


class UnequalBatches(Stop, name="unequal-batches"):
    """Unequal numbers of batches: one rank is done while the other waits for its gradients.

    17 samples in batches of 4 are three batches on rank 0 and two on rank 1. `DistributedSampler`
    makes shares even; who divides the data in another way has to agree on a number, or to use
    `model.join()`, with which ranks that are done send zeros.
    """

    def given(self):
        share = self.dataset[:17][self.rank :: self.ranks]
        return DistributedDataParallel(self.model), DataLoader(share, 4, collate_fn=self.batch)

    def wrong(model, loader):
        """each rank trains until its own data ends"""
        for batch in loader:
            model(**batch).backward()

    def right(model, loader):
        """all ranks stop with the one that has the fewest batches"""
        fewest = torch.tensor(len(loader))
        dist.all_reduce(fewest, op=dist.ReduceOp.MIN)  # ranks meet
        for batch in itertools.islice(loader, int(fewest)):
            model(**batch).backward()

    def detector(train, model, loader):
        """`Join` with `throw_on_early_termination`"""
        with Join([model], throw_on_early_termination=True):
            train(model, loader)
