"""The scaler of fp16: the order of its calls, overflows, updates that are left out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import losses
from qwen_tests import (
    adapter_of,
    built,
    run_here,
)
from torch import nn

import llm_ddp_parallel_training as ddp

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT


class OrderedScaler(torch.amp.GradScaler):
    """A real scaler, on the CPU, that notes what it is asked and the gradient it then sees."""

    def __init__(self, overflows=0):
        super().__init__("cpu", init_scale=2.0**10)
        self.calls, self.norms, self.overflows = [], [], overflows

    def norm(self, optimizer):
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        return float(nn.utils.get_total_norm(grads))

    def scale(self, outputs):
        self.calls.append("scale")
        return super().scale(outputs)

    def unscale_(self, optimizer):
        self.calls.append("unscale_")
        if self.overflows:
            self.overflows -= 1
            optimizer.param_groups[0]["params"][0].grad[0, 0] = torch.inf
        self.norms.append(self.norm(optimizer))
        super().unscale_(optimizer)

    def step(self, optimizer):
        self.calls.append("step")
        self.norms.append(self.norm(optimizer))
        return super().step(optimizer)

    def update(self, new_scale=None):
        self.calls.append("update")
        super().update(new_scale)


def test_gradients_are_unscaled_then_clipped_once_an_update(small_qwen):
    run, launch, settings = built(small_qwen, "--clip", 1e-3, "--batch-size", 4)
    settings.grad_accum = 2
    optimizer, scaler = ddp.build_optimizer(run.model, settings), OrderedScaler()
    batches = [run.collate([run.data.train[4 * j + i] for i in range(4)]) for j in range(2)]
    result = ddp.training_step(run.model, optimizer, scaler, batches, launch, settings)
    assert scaler.calls == ["scale", "scale", "unscale_", "step", "update"]
    assert result.grad_norm > 1e-2  # so there is something to clip
    capacity = 8 * (settings.seq_len - 1)
    scaled, clipped = scaler.norms
    assert scaled == pytest.approx(result.grad_norm * 2**10 * result.learned / capacity, rel=1e-5)
    assert clipped == pytest.approx(1e-3, rel=1e-3)
    assert not result.skipped


def test_an_fp16_overflow_is_counted_and_the_run_goes_on(small_qwen, tmp_path, monkeypatch):
    scaler = OrderedScaler(overflows=2)
    monkeypatch.setattr(torch.amp, "GradScaler", lambda *args, **options: scaler)
    flags = ("--base-model", small_qwen, "--max-steps", 4, "--log-every", 1)
    ended = run_here(*flags, "--output-dir", tmp_path / "run")
    assert ended.status == 0, ended.err
    steps = [line for line in ended.out.splitlines() if line.startswith("step ") and "lr" in line]
    assert ["fp16 overflows 1" in s or "fp16 overflows 2" in s for s in steps] == [True] * 4
    assert steps[0].endswith("fp16 overflows 1") and steps[-1].endswith("fp16 overflows 2")
    first, second, third, fourth = losses(tmp_path / "run")
    assert np.isfinite([first, second, third, fourth]).all()
    tensors = adapter_of(tmp_path / "run")
    assert all(t.isfinite().all() and (t != 0).any() for t in tensors.values())


def test_a_skipped_update_leaves_the_weights_alone(small_qwen):
    run, launch, settings = built(small_qwen)
    optimizer, scaler = ddp.build_optimizer(run.model, settings), OrderedScaler(overflows=1)
    batch = run.collate([run.data.train[i] for i in range(8)])
    before = ddp.parameter_digest(run.model)
    result = ddp.training_step(run.model, optimizer, scaler, [batch], launch, settings)
    assert result.skipped and np.isfinite(result.loss)
    assert ddp.parameter_digest(run.model) == before
    result = ddp.training_step(run.model, optimizer, scaler, [batch], launch, settings)
    assert not result.skipped and ddp.parameter_digest(run.model) != before
