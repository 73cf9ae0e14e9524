"""The loss of Qwen without the logits of a batch: right, small, and safe in half precision."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from qwen_assets import make_model, make_tokenizer
from qwen_tests import (
    TEXTS,
    adapted,
    batch_of,
    lora_model,
    loss_of,
    plain_loss,
    settings_of,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import llm_ddp_parallel_training as ddp
from llm_ddp_parallel_training import CausalLMWithLoss, FrozenHeadLoss

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def test_a_head_with_bias_gives_the_plain_loss_and_gradient():
    torch.manual_seed(0)
    head, hidden = nn.Linear(16, 50), torch.randn(600, 16, requires_grad=True)
    head.requires_grad_(False)
    targets = torch.randint(0, 50, (600,))
    plain = F.cross_entropy(head(hidden), targets, reduction="sum")
    loss = FrozenHeadLoss.apply(hidden, head, targets)
    assert loss.item() == pytest.approx(plain.item(), rel=1e-6)
    (want,), (got,) = torch.autograd.grad(plain, hidden), torch.autograd.grad(3 * loss, hidden)
    torch.testing.assert_close(got, 3 * want, rtol=1e-5, atol=1e-5)


def test_huge_logits_give_a_finite_loss():
    head = nn.Linear(4, 50, bias=False).requires_grad_(False)
    hidden = (torch.randn(5, 4) * 1e4).requires_grad_()
    targets = torch.arange(5)
    loss = FrozenHeadLoss.apply(hidden, head, targets)
    plain = F.cross_entropy(head(hidden), targets, reduction="sum")
    assert loss.item() == pytest.approx(plain.item(), rel=1e-5)
    assert torch.autograd.grad(loss, hidden)[0].isfinite().all()


def test_a_head_in_fp16_overflows_in_neither_loss_nor_gradient():
    torch.manual_seed(0)
    head = nn.Linear(8, 2000, bias=False).requires_grad_(False)
    with torch.no_grad():
        head.weight[:, 0] = 100  # before the division by the sum, their sum is beyond 65,504
    half = nn.Linear(8, 2000, bias=False, dtype=torch.float16).requires_grad_(False)
    half.weight.copy_(head.weight)
    hidden = torch.randn(300, 8).requires_grad_()
    targets = torch.randint(0, 2000, (300,))
    plain = F.cross_entropy(head(hidden), targets, reduction="sum")
    loss = FrozenHeadLoss.apply(hidden, half, targets)
    (want,), (got,) = torch.autograd.grad(plain, hidden), torch.autograd.grad(loss, hidden)
    assert loss.item() == pytest.approx(plain.item(), rel=2e-3)
    assert got.isfinite().all()
    # fp16 rounds by up to 2**-11 of what is added up; the common column 0 cancels.
    torch.testing.assert_close(got[:, 1:], want[:, 1:], rtol=2e-2, atol=2e-3)
    assert got[:, 0].abs().max() <= 0.2


def test_the_logits_of_a_whole_batch_never_exist_in_training(tokenizer):
    model = lora_model(tokenizer)
    batch = batch_of(tokenizer, ["rank " * 200] * 8, "--seq-len", 64)
    whole = batch["labels"].numel() * model.config.vocab_size
    assert batch["labels"].shape == (8, 64)  # and the loss takes 256 rows at a time

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(tensor, torch.Tensor):
                    self.elements = max(self.elements, tensor.numel())
            return result

    with Largest() as seen:
        plain_loss(model, batch)
    assert seen.elements >= whole  # the watch does see them
    with Largest() as seen:
        loss_of(CausalLMWithLoss(model), batch).backward()
    assert 0 < seen.elements <= 256 * model.config.vocab_size < whole


def test_bf16_changes_the_loss_by_no_more_than_its_rounding(tokenizer):
    batch = batch_of(tokenizer, TEXTS)
    settings = settings_of("--precision", "bf16")
    exact = loss_of(CausalLMWithLoss(lora_model(tokenizer)), batch)
    model = adapted(make_model(tokenizer).to(torch.bfloat16), "--lora-dropout", 0)
    module = CausalLMWithLoss(model)
    with ddp.autocast(ddp.Launch(), settings):
        rounded = loss_of(module, batch)
    assert rounded.dtype == torch.float64
    # bf16 rounds by up to 2**-9 relative; a mean over a hundred tokens stays within one such step.
    assert rounded.item() != exact.item()
    assert rounded.item() == pytest.approx(exact.item(), rel=2**-9)
