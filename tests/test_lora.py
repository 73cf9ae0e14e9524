"""The loss without logits, the adapters, activation checkpointing, attention, and fp16's scaler."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import largest_difference, losses
from qwen_assets import full_config, make_model, make_tokenizer
from qwen_tests import (
    TEXTS,
    adapted,
    adapter_of,
    batch_of,
    built,
    gradients,
    kept_bytes,
    lora_model,
    loss_of,
    plain_loss,
    run_here,
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


# The loss


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


# Adapters


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_adapter_is_fp32_over_any_base_and_the_base_is_frozen(small_qwen, precision):
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    settings = settings_of("--base-model", small_qwen)
    settings.precision = precision  # fp16 is for CUDA, and set_up says so
    model = ddp.add_lora(ddp.load_base(settings)[0], settings)
    seen = Counter()
    for name, parameter in model.named_parameters():
        lora = "lora_" in name
        seen[lora] += 1
        assert parameter.requires_grad == lora
        assert parameter.dtype == (torch.float32 if lora else dtype), name
    assert seen[True] == 8 and seen[False] > 8  # two layers, q and v, A and B


def test_every_adapter_has_the_dropout_that_was_asked_for(tokenizer):
    model = lora_model(tokenizer, "--lora-dropout", 0.25, "--lora-targets", "q_proj,down_proj")
    found = [m for m in model.modules() if isinstance(m, nn.Dropout)]
    assert len(found) == 2 * model.config.num_hidden_layers
    assert all(m.p == 0.25 for m in found)


def test_parameter_counts_of_the_half_billion_model():
    from transformers import Qwen2ForCausalLM

    with torch.device("meta"):
        model = CausalLMWithLoss(ddp.add_lora(Qwen2ForCausalLM(full_config()), settings_of()))
    assert sum(p.numel() for _, p in ddp.trained_parameters(model)) == 540_672
    assert sum(p.numel() for p in model.parameters()) == 494_573_440


@pytest.mark.parametrize(
    ("targets", "wrong"),
    [
        ("q_prj", "q_prj"),
        ("q_proj,typo", "typo"),
        (",", "(nothing)"),
        ("lm_head", "lm_head"),
        ("layers", "layers"),
    ],
)
def test_wrong_targets_list_the_names_that_exist(small_qwen, targets, wrong):
    ended = run_here("--base-model", small_qwen, "--lora-targets", targets, "--dry-run")
    assert ended.status == 2
    assert ended.err == (
        f"error: --lora-targets: no Linear layer is called {wrong}; this model has "
        "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj\n"
    )


@pytest.mark.parametrize(
    "flags", [(), ("--gradient-checkpointing",), ("--gradient-checkpointing", "selective")], ids=str
)
def test_after_one_step_every_lora_b_has_moved(small_qwen, flags):
    run, launch, settings = built(small_qwen, *flags)
    optimizer = ddp.build_optimizer(run.model, settings)
    batch = run.collate([run.data.train[i] for i in range(8)])
    scaler = torch.amp.GradScaler("cuda", enabled=False)
    ddp.training_step(run.model, optimizer, scaler, [batch], launch, settings)
    matrices = {n: p for n, p in ddp.trained_parameters(run.model) if "lora_B" in n}
    assert len(matrices) == 4
    for name, matrix in matrices.items():
        assert (matrix != 0).float().mean() > 0.99, name


def after_some_steps(run):
    """Adapters that are no longer zero."""
    for name, parameter in ddp.trained_parameters(run.model):
        if "lora_B" in name:
            torch.manual_seed(len(name))
            nn.init.normal_(parameter, 0, 0.1)
    return run.collate([run.data.train[i] for i in range(8)])


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_checkpointing_keeps_less_and_gives_the_same_loss_and_gradient(small_qwen, dropout):
    results = {}
    for how in ("none", "full", "selective"):
        flags = () if how == "none" else ("--gradient-checkpointing", how)
        run, _, _ = built(small_qwen, "--lora-dropout", dropout, *flags)
        batch = after_some_steps(run)

        def step(run=run, batch=batch):
            torch.manual_seed(3)
            return loss_of(run.model, batch)

        weights = sum(p.numel() * 4 for p in run.model.parameters())
        grads, kept = gradients(run.model, step()), kept_bytes(step) - weights
        results[how] = step().item(), grads, kept
    loss, grads, kept = results["none"]
    for how in ("full", "selective"):
        assert results[how][0] == pytest.approx(loss, abs=1e-6)
        assert largest_difference(results[how][1], grads) <= 1e-6
    assert results["full"][2] < 0.5 * kept


def test_selective_checkpointing_computes_no_product_again(small_qwen):
    """Counts the matrix products of a step; attention counts as one."""
    counted = {}
    for how in ("none", "full", "selective"):
        flags = () if how == "none" else ("--gradient-checkpointing", how)
        run, _, _ = built(small_qwen, "--lora-dropout", 0, *flags)
        run.model.model.enable_input_require_grads()  # as PEFT does it for checkpointing
        batch = after_some_steps(run)

        class Products(TorchDispatchMode):
            seen = 0

            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                name = function.name()
                self.seen += name in ("aten::mm", "aten::addmm", "aten::bmm")
                self.seen += "scaled_dot_product" in name and "backward" not in name
                return function(*args, **(kwargs or {}))

        with Products() as products:
            loss_of(run.model, batch).backward()
        counted[how] = products.seen
    assert counted["full"] > counted["none"]
    assert counted["selective"] == counted["none"]


# Attention


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("repeat", [False, True])
def test_our_attention_computes_what_sdpa_computes(masked, repeat):
    torch.manual_seed(0)
    query = torch.randn(2, 6, 10, 8, requires_grad=True)
    key, value = (torch.randn(2, 2, 10, 8, requires_grad=True) for _ in range(2))
    causal = torch.ones(10, 10, dtype=torch.bool).tril()
    mask = causal & (torch.arange(10)[:, None] % 3 == torch.arange(10) % 3) if masked else None
    repeated = (x.repeat_interleave(3, dim=1) for x in (key, value))
    plain = F.scaled_dot_product_attention(
        query, *repeated, causal if mask is None else mask, scale=0.5
    )
    mixed, _ = ddp.causal_attention(
        nn.Module(), query, key, value, mask, scaling=0.5, repeat=repeat
    )
    torch.testing.assert_close(mixed, plain.transpose(1, 2), rtol=1e-5, atol=1e-6)
    for tensor in (query, key, value):
        (want,) = torch.autograd.grad(plain.pow(2).sum(), tensor, retain_graph=True)
        (got,) = torch.autograd.grad(mixed.pow(2).sum(), tensor, retain_graph=True)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_a_model_with_our_attention_says_what_it_says_with_transformers_own(small_qwen):
    settings, launch = settings_of("--base-model", small_qwen), ddp.Launch()
    ours, _ = ddp.load_base(settings, ddp.attention_for(launch, "fp32"))
    theirs, tokenizer = ddp.load_base(settings)
    assert ours.config._attn_implementation != theirs.config._attn_implementation
    ids = tokenizer(TEXTS[2], return_tensors="pt")["input_ids"]
    for use_cache in (False, True):
        with torch.no_grad():
            want, got = (m(ids, use_cache=use_cache).logits for m in (theirs, ours))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    generated = [m.generate(input_ids=ids, **options).tolist() for m in (theirs, ours)]
    assert generated[0] == generated[1]


# The scaler of fp16


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
