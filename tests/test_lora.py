"""Adapters over a frozen base, activation checkpointing, and attention."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from conftest import largest_difference
from qwen_assets import full_config, make_tokenizer
from qwen_tests import (
    built,
    gradients,
    kept_bytes,
    lora_model,
    loss_of,
    run_here,
    settings_of,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import llm_ddp_parallel_training as ddp
from llm_ddp_parallel_training import CausalLMWithLoss

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


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
