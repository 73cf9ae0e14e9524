"""What a training step does on a GPU, shown on the CPU: what it reads back, which attention it asks
for, what fp16 can hold.

Tensors of the device "meta" have shapes and no data: reading one raises. So a step that runs there
up to its one reading waits for no GPU before. How often a real one is waited for, which attention
kernel it takes, and whether two runs are equal bit for bit (flash attention's backward pass adds
with atomics), the rows of `tests/gpu` say.
"""

from __future__ import annotations

import contextlib
import types

import pytest
import torch
from conftest import settings_of
from qwen_assets import make_tokenizer
from readings import Readings, readings_of_a_step
from torch import nn

import llm_ddp_parallel_training as ddp

TEXT = "Each rank computes gradients on its own batch, and an all-reduce averages them."
BATCHES = {  # name: (flags, texts of a batch)
    "padded": ("", [TEXT, "a"]),
    "full windows": ("", [TEXT, TEXT]),
    "packed": ("--pack", [TEXT, TEXT]),
    "no sample left": ("", []),
    "checkpointing": ("--gradient-checkpointing", [TEXT, TEXT]),
    "selective": ("--gradient-checkpointing selective", [TEXT, "a"]),
}


def qwen(small_qwen, flags, texts, rows=2):
    """(model, batch, settings) of a small Qwen."""
    flags = f"--model qwen --cpu --precision fp32 --seq-len 16 --batch-size {rows} {flags}"
    settings = settings_of(*flags.split(), "--base-model", small_qwen)
    base, tokenizer = ddp.load_base(settings)
    model = ddp.CausalLMWithLoss(ddp.add_lora(base, settings)).train()
    items = [(i, text) for i, text in enumerate(texts)]
    if settings.pack:  # two samples in each window
        pieces = [ddp.tokenize(tokenizer, [text[:12]], {})[0][0] for text in texts]
        items = [(i, [piece, piece]) for i, piece in enumerate(pieces)]
    return model, ddp.qwen_collator(tokenizer, settings)(items), settings


def tiny(rows=2):
    settings = settings_of("--cpu", "--precision", "fp32", "--batch-size", rows, "--seq-len", 64)
    batch = ddp.tiny_collator([(i, TEXT) for i in range(rows)], 64)
    return ddp.TinyCausalTransformer(dropout=0.1), batch, settings


# ------------------------------------------------------------------------------------------
# Synchronizations
# ------------------------------------------------------------------------------------------


def step_without_data(monkeypatch, model, batch, settings):
    """One update of two micro-batches on "meta"; returns the sizes of what it read back."""
    readings, tolist, autocast = [], torch.Tensor.tolist, torch.autocast

    def read(tensor):
        if tensor.device.type != "meta":
            return tolist(tensor)
        readings.append(tensor.numel())
        return [1.0, 1.0, 1.0, 0.0, 1.0]  # loss, targets, tokens, stop wishes, norm

    def no_autocast(device, **options):
        return contextlib.nullcontext() if device == "meta" else autocast(device, **options)

    monkeypatch.setattr(torch.Tensor, "tolist", read)
    monkeypatch.setattr(torch, "autocast", no_autocast)  # it does not know "meta"
    model = model.to("meta")
    optimizer = torch.optim.SGD([p for _, p in ddp.trained_parameters(model)])  # AdamW reads a step
    scaler = torch.amp.GradScaler("cuda", enabled=False)
    launch = ddp.Launch(device=torch.device("meta"))
    ddp.training_step(model, optimizer, scaler, [batch, batch], launch, settings)
    return readings


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("case", BATCHES)
def test_an_update_of_qwen_waits_for_the_gpu_once_whatever_its_batches(
    monkeypatch, small_qwen, case
):
    model, batch, settings = qwen(small_qwen, *BATCHES[case])
    assert step_without_data(monkeypatch, model, batch, settings) == [5]


def test_an_update_of_the_tiny_model_waits_for_the_gpu_once(monkeypatch):
    assert step_without_data(monkeypatch, *tiny()) == [5]


@pytest.mark.parametrize("enabled", [False, True], ids=["fp32", "with the scaler of fp16"])
def test_optimizer_and_scaler_read_nothing_back(enabled):
    """The scaler hands its verdict to the fused kernel (torch/amp/grad_scaler.py, `step`)."""
    model, batch, settings = tiny()
    optimizer, scaler = (
        ddp.build_optimizer(model, settings),
        torch.amp.GradScaler("cpu", enabled=enabled),
    )
    arguments = (model, optimizer, scaler, [batch, batch], ddp.Launch(), settings)
    ddp.training_step(*arguments)  # the first one makes the optimizer's state
    with readings_of_a_step() as seen:
        result = ddp.training_step(*arguments)
    assert (seen, result.skipped) == (["tolist"], False)


def test_a_validation_reads_back_once(monkeypatch):
    model, batch, settings = tiny()
    launch = ddp.Launch(device=torch.device("meta"))
    model, readings = model.to("meta"), []
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: readings.append(t.numel()) or [1.0, 1.0])
    ddp.evaluate(model, [batch] * 3, launch, settings)
    assert readings == [2]


def test_readings_are_counted():
    with Readings() as readings:
        flags = torch.tensor([True, False])
        if flags.any():
            flags.nonzero()
        flags.float()[flags] = 2.0
    assert readings.seen == ["_local_scalar_dense", "nonzero", "index_put_"]


# ------------------------------------------------------------------------------------------
# fp16
# ------------------------------------------------------------------------------------------


def test_an_overflow_of_fp16_leaves_the_weights_alone_and_lowers_the_scale():
    model, batch, settings = tiny()
    optimizer, scaler = ddp.build_optimizer(model, settings), torch.amp.GradScaler("cpu", 2.0**16)
    model.lm_head.weight.register_hook(lambda gradient: torch.full_like(gradient, float("inf")))
    before = ddp.parameter_digest(model)
    result = ddp.training_step(model, optimizer, scaler, [batch], ddp.Launch(), settings)
    assert result.skipped and ddp.parameter_digest(model) == before
    assert scaler.get_scale() == 2.0**15


def test_a_norm_that_overflows_alone_does_not_spoil_the_optimizer():
    """Every gradient is finite, and the sum of their squares is not."""
    settings = settings_of("--cpu", "--precision", "fp32", "--batch-size", 1, "--seq-len", 2)

    class Steep(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, input_ids, labels):
            return (self.weight * 1e25).sum()

    model, batch = Steep(), {"input_ids": torch.zeros(1, 2).long(), "labels": torch.zeros(1, 2)}
    optimizer, scaler = ddp.build_optimizer(model, settings), torch.amp.GradScaler("cpu", 1.0)
    result = ddp.training_step(model, optimizer, scaler, [batch], ddp.Launch(), settings)
    assert result.skipped and bool((model.weight == 1).all())
    for state in optimizer.state.values():
        assert bool(torch.isfinite(state["exp_avg_sq"]).all())


def test_the_loss_over_a_large_vocabulary_fits_into_fp16():
    """Equal logits: exponentials of 1, whose product with the head sums up 70,000 of them."""
    rows, width, vocabulary = 3, 2, 70_000  # fp16 ends at 65,504
    head = nn.Linear(width, vocabulary, bias=False).half().requires_grad_(False)
    nn.init.ones_(head.weight)
    hidden = torch.zeros(rows, width, dtype=torch.float16, requires_grad=True)
    targets = torch.arange(rows)
    total = ddp.FrozenHeadLoss.apply(hidden, head, targets)
    total.backward()
    assert total.item() == pytest.approx(rows * torch.tensor(float(vocabulary)).log().item())
    # The rows of the head are equal, so their mean under the softmax is each of them.
    torch.testing.assert_close(hidden.grad, torch.zeros_like(hidden), rtol=0, atol=1e-2)


# ------------------------------------------------------------------------------------------
# Attention
# ------------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch):
    """What PyTorch's attention is asked for: (heads of the keys, enable_gqa, with a mask)."""
    calls, attention = [], torch.nn.functional.scaled_dot_product_attention

    def noted(query, key, value, attn_mask=None, *rest, **options):
        mask = options.get("attn_mask", attn_mask)
        calls.append((key.shape[1], bool(options.get("enable_gqa")), mask is not None))
        return attention(query, key, value, attn_mask, *rest, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    return calls


@pytest.mark.parametrize("case", ["full windows", "padded", "packed"])
def test_attention_never_falls_to_the_kernel_that_keeps_all_scores(small_qwen, asked, case):
    """Keys shared among query heads are a matter of flash kernels: fp32, T4 and V100 have none, and
    the memory-efficient kernel refuses them (ATen/native/transformers/cuda/sdp_utils.cpp,
    `can_use_mem_efficient_attention`: supports_gqa is false). With a mask, transformers repeats
    them.
    """
    flags, texts = BATCHES[case]
    model, batch, _ = qwen(small_qwen, flags, texts)
    asked.clear()
    model(**ddp.inputs_of(batch, torch.device("cpu"))).backward()
    assert set(asked) == {(4, False, True)}


# ------------------------------------------------------------------------------------------
# What would end in a device-side assertion, and what compiles twice
# ------------------------------------------------------------------------------------------


def test_token_ids_beyond_the_embedding_are_refused_before_a_gpu_sees_them(tmp_path):
    from qwen_assets import make_model

    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    model.resize_token_embeddings(len(tokenizer) - 5)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    settings = settings_of("--model", "qwen", "--precision", "fp32", "--base-model", tmp_path)
    with pytest.raises(ddp.UserError) as error:
        ddp.load_base(settings)
    assert f"has token {len(tokenizer) - 1}" in str(error.value)
    assert f"its embedding {len(tokenizer) - 5} rows" in str(error.value)


class Notes(nn.Module):
    """Notes whether it is called under autocast, which --compile makes a variant for."""

    def __init__(self):
        super().__init__()
        self.weight, self.seen = nn.Parameter(torch.ones(2, 2)), []

    def forward(self, input_ids, labels):
        self.seen.append(torch.is_autocast_enabled("cpu"))
        return self.weight.sum()


def test_validation_and_resuming_run_under_the_autocast_of_the_training_step():
    _, batch, settings = tiny()
    settings.precision, model, launch = "bf16", Notes(), ddp.Launch()
    optimizer = ddp.build_optimizer(model, settings)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    ddp.training_step(model, optimizer, scaler, [batch], launch, settings)
    ddp.evaluate(model, [batch], launch, settings)
    trainer = types.SimpleNamespace(
        launch=ddp.Launch(world_size=2), progress=ddp.Progress(), bare=model, model=model,
        settings=settings, optimizer=optimizer, scaler=scaler,
        loader=types.SimpleNamespace(collate_fn=lambda items: ddp.tiny_collator(items, 64)),
    )  # fmt: skip
    state = {"model": dict(ddp.trained_parameters(model)), "optimizer": optimizer.state_dict()}
    ddp.restore(trainer, {**state, "scaler": {}, "random": []})
    assert model.seen == [True, True, True]
