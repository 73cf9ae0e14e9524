"""When gradients are sent: DDP decides in its forward pass."""

import torch
from torch.nn.parallel import DistributedDataParallel

from labs.break_it.bug import Bug, Stop, weights_differ
from labs.break_it.detectors import same_gradients


class NoSyncOnLast(Bug, name="no-sync-on-last"):
    """no_sync on the last micro-batch, too: nothing is ever sent.

    Inside no_sync gradients stay local. The last micro-batch of an update must be outside, with
    its forward pass, for there DDP decides whether the backward pass will synchronize.
    """

    def given(self):
        model = DistributedDataParallel(self.model)
        return model, torch.optim.AdamW(model.parameters(), lr=3e-4), self.own_batches(2)

    def wrong(model, optimizer, micro_batches):
        """all micro-batches are inside no_sync"""
        with model.no_sync():
            for batch in micro_batches:
                model(**batch).backward()
        optimizer.step()
        return model

    def right(model, optimizer, micro_batches):
        """forward and backward of a micro-batch stand together, those of the last one outside"""
        with model.no_sync():
            for batch in micro_batches[:-1]:
                model(**batch).backward()
        model(**micro_batches[-1]).backward()
        optimizer.step()
        return model

    symptom = weights_differ
    detector = same_gradients


class ForwardInNoSync(NoSyncOnLast, name="forward-in-no-sync"):
    """The forward pass inside no_sync, the backward pass outside: nothing is sent either.

    DDP decides in the forward pass whether the backward pass will synchronize. One backward pass
    over the sum of all losses, outside no_sync, looks as if it did; it does not.
    """

    def wrong(model, optimizer, micro_batches):
        """forward inside no_sync, backward outside"""
        with model.no_sync():
            losses = [model(**batch) for batch in micro_batches]
        sum(losses).backward()
        optimizer.step()
        return model


class PastTheWrapper(NoSyncOnLast, name="past-the-wrapper"):
    """Training through `model.module`: the forward pass goes past DDP, and nothing is sent.

    DDP prepares its all-reduces in its own forward pass. Who calls the module inside, for a method
    of it or out of habit from saving, gets local gradients, and replicas that drift apart.
    """

    def wrong(model, optimizer, micro_batches):
        """`model.module(x)` in training"""
        for batch in micro_batches:
            model.module(**batch).backward()
        optimizer.step()
        return model

    def right(model, optimizer, micro_batches):
        """`model(x)`, the wrapper"""
        for batch in micro_batches:
            model(**batch).backward()
        optimizer.step()
        return model


class StaticGraphNoSync(Stop, name="static-graph-no-sync"):
    """static_graph, and the first backward pass inside no_sync: an internal assertion fails.

    With `static_graph=True` DDP learns from the first backward pass which parameters take part, and
    inside no_sync it does not look. The message speaks of a bug in PyTorch and names no reason.
    """

    def given(self):
        return self.model, self.own_batches(2)

    def wrong(model, micro_batches):
        """`static_graph=True`, and accumulation from the first micro-batch on"""
        wrapped = DistributedDataParallel(model, static_graph=True)
        with wrapped.no_sync():
            wrapped(**micro_batches[0]).backward()
        wrapped(**micro_batches[1]).backward()

    def right(model, micro_batches):
        """no `static_graph`, or the first update of a run synchronizes each micro-batch"""
        wrapped = DistributedDataParallel(model)
        with wrapped.no_sync():
            wrapped(**micro_batches[0]).backward()
        wrapped(**micro_batches[1]).backward()
