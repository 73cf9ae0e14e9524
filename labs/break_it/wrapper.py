"""The wrapper: what goes through DDP, and what must not."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labs.break_it.bug import Bug, OnPaper, Stop, weights_differ
from labs.break_it.detectors import same_gradients


class UnfrozenLate(Bug, name="unfrozen-late"):
    """Unfreezing after wrapping: DDP sends the gradients of those parameters that it found.

    DDP takes its list of parameters when it is built. What is unfrozen or added later is trained on
    each rank with its own gradient, and the replicas drift apart in that part only.
    """

    def given(self):
        self.model.lm_head.requires_grad_(False)
        return self.model, *self.own_batches(1)

    def wrong(model, batch):
        """unfrozen when DDP has its list of parameters"""
        wrapped = DistributedDataParallel(model)
        model.lm_head.requires_grad_(True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        wrapped(**batch).backward()
        optimizer.step()
        return model

    def right(model, batch):
        """unfrozen, then wrapped; later, wrap the bare model again"""
        model.lm_head.requires_grad_(True)
        wrapped = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        wrapped(**batch).backward()
        optimizer.step()
        return model

    symptom = weights_differ
    detector = same_gradients


class WithBranch(nn.Module):
    """A model with a part that only some batches need, as of pictures or of an expert."""

    def __init__(self, model):
        super().__init__()
        self.model, self.branch = model, nn.Linear(1, 1)

    def forward(self, batch, value):
        loss = self.model(**batch)
        return loss if value is None else loss + self.branch(value).square().sum()


class UnusedOnOneRank(Stop, name="unused-on-one-rank"):
    """Parameters that one rank did not use: their bucket never becomes ready there.

    The rank that left a branch, an expert or a head out sends nothing, the others wait, and it
    raises an error at its next forward pass. With `find_unused_parameters=True` DDP looks for such
    parameters after each forward pass, for a price.
    """

    debug = "INFO"

    def given(self):
        value = torch.ones(1) if self.rank == 0 else None
        return WithBranch(self.model), self.own_batches(2), value

    def wrong(model, batches, value):
        """DDP waits for the gradients of all parameters"""
        wrapped = DistributedDataParallel(model)
        for batch in batches:
            wrapped(batch, value).backward()

    def right(model, batches, value):
        """`find_unused_parameters=True`, or every parameter takes part with a weight of 0"""
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        for batch in batches:
            wrapped(batch, value).backward()

    def detector(train, *arguments):
        """`TORCH_DISTRIBUTED_DEBUG=INFO` names the parameters"""
        train(*arguments)  # the environment variable does it


class ValidateThroughWrapper(Stop, name="validate-through-wrapper"):
    """Validation through the wrapper on rank 0: its forward pass meets ranks that are elsewhere.

    Before a forward pass DDP sends rank 0's buffers to all ranks, also in eval mode and without
    gradients. What one rank does alone must use the module inside the wrapper.
    """

    def given(self):
        self.model.register_buffer("mask", torch.ones(64, 64).triu(1))  # as many models have one
        return DistributedDataParallel(self.model).eval(), *self.own_batches(1)

    def wrong(model, batch):
        """rank 0 validates with the wrapper"""
        if dist.get_rank() == 0:
            with torch.no_grad():
                print("validation loss", float(model(**batch)))

    def right(model, batch):
        """with `model.module`"""
        if dist.get_rank() == 0:
            with torch.no_grad():
                print("validation loss", float(model.module(**batch)))

    def detector(validate, model, batch):
        """a hook on the wrapper that refuses forward passes other than for training"""

        def while_training(module, _inputs):
            assert module.training, "a forward pass through the wrapper, but not to train"

        model.register_forward_pre_hook(while_training)
        validate(model, batch)


class DetachedBucketViews(Stop, name="detached-bucket-views"):
    """detach_() on gradients that are views of DDP's buckets: it is refused.

    With `gradient_as_bucket_view=True` a gradient is no tensor of its own but a part of the buffer
    that is sent, which spares a copy of all gradients. Clear such gradients with `zero_grad`.
    """

    def given(self):
        return self.model, self.own_batches(2)

    def wrong(model, micro_batches):
        """`p.grad.detach_()` and `zero_()`, as older loops have it"""
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        for batch in micro_batches:
            wrapped(**batch).backward()
            for parameter in wrapped.parameters():
                parameter.grad.detach_()
                parameter.grad.zero_()

    def right(model, micro_batches):
        """`zero_grad()`, which sets them to None"""
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        for batch in micro_batches:
            wrapped(**batch).backward()
            wrapped.zero_grad()


class NoSetDevice(OnPaper, name="no-set-device"):
    """No torch.cuda.set_device: every rank of a machine works on GPU 0.

    `.cuda()` and `"cuda"` without a number mean the current device, which is 0 in every process.
    """

    seen = (
        "with NCCL the first collective raises `Duplicate GPU detected`; without one, GPU 0 runs "
        "out of memory while the others are idle"
    )

    def wrong(model):
        """`.cuda()` alone"""
        return DistributedDataParallel(model.cuda())

    def right(model):
        """`torch.cuda.set_device(LOCAL_RANK)` before anything touches a GPU"""
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        return DistributedDataParallel(model.cuda())

    def detector(model):
        """looks where the weights are"""
        device = next(model.parameters()).device
        assert device.index == int(os.environ["LOCAL_RANK"]), f"this rank works on {device}"
