"""Qwen with LoRA: what is learned from which tokens, the loss, the adapter, and whole runs.

Everything is offline: a small Qwen2 of random weights, and a tokenizer made here.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import (
    ROOT,
    Finished,
    clean_environment,
    command,
    digest_line,
    largest_difference,
    losses,
    metrics,
    run_command,
)
from qwen_assets import full_config, make_model, make_tokenizer, save_folder  # before the script
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import llm_ddp_parallel_training as ddp
from llm_ddp_parallel_training import IGNORE, CausalLMWithLoss, FrozenHeadLoss, UserError

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT

TEXTS = [
    "Each rank computes gradients on its own batch.",
    "A rank.",
    "What is a rank? A rank is one process of the group.\nIt has a number.",
    "The sampler gives every rank a different part of the data.",
    "ü – a system",
]
CHAT = [
    {"role": "user", "content": "What is a rank?"},
    {"role": "assistant", "content": "A rank is one process.\n"},
    {"role": "user", "content": "And a group?"},
    {"role": "assistant", "content": "\n\nAll of them."},
]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Looking up a host fails the test; torchrun's launches are processes of their own."""

    def refuse(host, *args, **kwargs):
        raise AssertionError(f"network used: {host}")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def settings_of(*flags):
    settings = ddp.parse_settings(["--model", "qwen", "--cpu", *map(str, flags)])
    settings.precision = "fp32" if settings.precision == "auto" else settings.precision
    return settings


def adapted(model, *flags, trained=True):
    """The model with LoRA as the script adds it; `trained`: B is no longer zero."""
    model = ddp.add_lora(model, settings_of("--lora-r", 4, "--lora-alpha", 8, *flags))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if trained and "lora_B" in name:
            nn.init.normal_(parameter, 0, 0.1)
    return model.train()


def lora_model(tokenizer, *flags, tied=True, trained=True):
    flags = flags or ("--lora-dropout", 0)
    return adapted(make_model(tokenizer, tied), *flags, trained=trained)


def padded(tokenizer, samples, *flags):
    return ddp.qwen_collator(tokenizer, settings_of(*flags))(list(enumerate(samples)))


def loss_of(module, batch):
    return module(**ddp.inputs_of(batch, torch.device("cpu")))


def plain_loss(model, batch):
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits.float()
    targets = batch["labels"][:, 1:].flatten()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets, ignore_index=IGNORE)


def gradients(module, loss):
    loss.backward()
    got = {n: p.grad.clone() for n, p in module.named_parameters() if p.requires_grad}
    module.zero_grad()
    return got


def assert_same(module, loss_a, loss_b, tolerance):
    """Both functions give the same loss, and the same gradients relative to the largest one."""
    a, b = loss_a(), loss_b()
    assert a.item() == pytest.approx(b.item(), abs=tolerance)
    grad_a, grad_b = gradients(module, a), gradients(module, b)
    scale = max(float(g.abs().max()) for g in grad_a.values())
    assert scale > 0
    assert largest_difference(grad_a, grad_b) <= tolerance * max(scale, 1)


def kept_bytes(function):
    """Bytes of what a forward pass keeps for the backward pass, parameters included."""
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor  # held, so no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


# ---------------------------------------------------------------- tokens and labels


def test_padding_is_not_learned_but_the_eos_is_even_where_it_is_also_the_padding():
    tokenizer = make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    batch = padded(tokenizer, TEXTS)
    for name in ("input_ids", "attention_mask", "labels"):
        assert batch[name].dtype == torch.int64 and batch[name].shape == batch["input_ids"].shape
    for row, text in enumerate(TEXTS):
        ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        assert batch["input_ids"][row, : len(ids)].tolist() == ids
        assert batch["labels"][row, 1 : len(ids)].tolist() == ids[1:]
        assert (batch["labels"][row, len(ids) :] == IGNORE).all()
        assert batch["attention_mask"][row].tolist() == [1] * len(ids) + [0] * (
            len(batch["input_ids"][row]) - len(ids)
        )
    assert batch["record_ids"].tolist() == [0, 1, 2, 3, 4]
    assert batch["input_ids"].shape[1] == max(len(tokenizer(t)["input_ids"]) for t in TEXTS) + 1


def test_a_tokenizer_without_padding_token_pads_with_eos():
    tokenizer = make_tokenizer()
    tokenizer.pad_token = None
    batch = padded(tokenizer, TEXTS)
    assert (batch["input_ids"][1, 8:] == tokenizer.eos_token_id).all()
    assert int(batch["attention_mask"][1].sum()) < 8


def test_an_eos_that_the_tokenizer_adds_is_not_doubled(tokenizer):
    ids, _ = ddp.tokenize(tokenizer, "A rank.<|im_end|>")
    assert ids.tolist().count(tokenizer.eos_token_id) == 1


@pytest.mark.parametrize("overlong", ["truncate", "drop", "split"])
def test_long_samples_are_treated_as_told_and_counted(tokenizer, overlong):
    settings, counts = settings_of("--seq-len", 10, "--overlong", overlong), Counter()
    samples = [ddp.tokenize(tokenizer, text)[0].tolist() for text in TEXTS]
    long = [ids for ids in samples if len(ids) > 10]
    assert 0 < len(long) < len(samples)
    items = ddp.TokenizedSamples(enumerate(TEXTS), tokenizer, settings, counts)
    seen = [pieces[0][0].tolist() for _, pieces in items]
    assert all(len(ids) <= 10 for ids in seen)
    assert counts["overlong"] == len(long)
    if overlong == "truncate":
        assert seen == [ids[:10] for ids in samples]
        assert counts["lost"] == sum(len(ids) - 10 for ids in long)
    elif overlong == "drop":
        assert seen == [ids for ids in samples if len(ids) <= 10]
        assert counts["lost"] == sum(map(len, long))
    else:
        predicted = [token for ids in seen for token in ids[1:]]
        assert predicted == [token for ids in samples for token in ids[1:]]


def test_only_the_assistant_is_learned_including_its_end_of_turn(tokenizer):
    assert "generation" not in tokenizer.chat_template.replace("add_generation_prompt", "")
    ids, labels = ddp.tokenize(tokenizer, CHAT)
    learned = tokenizer.decode(labels[labels != IGNORE])
    assert learned == "A rank is one process.\n<|im_end|>\n\nAll of them.<|im_end|>"
    assert ids.tolist() == tokenizer.apply_chat_template(CHAT, tokenize=True)["input_ids"]
    assert all(label in (IGNORE, token) for token, label in zip(ids, labels))


def test_an_answer_that_is_also_in_the_question_is_learned_only_as_the_answer(tokenizer):
    twice = [{"role": "user", "content": "rank"}, {"role": "assistant", "content": "rank"}]
    ids, labels = ddp.tokenize(tokenizer, twice)
    assert tokenizer.decode(ids).count("rank") == 2
    assert tokenizer.decode(labels[labels != IGNORE]) == "rank<|im_end|>"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            "{% for m in messages %}{{ m.role if not loop.last else m.content }}{% endfor %}",
            "the chat template rewrites what stands before message 2, so its answer cannot be "
            "found; use a template that only appends",
        ),
        (None, "chat data needs a tokenizer with a chat template: an -Instruct model"),
        (
            "{{ raise_exception('roles must alternate') }}",
            "the chat template refuses a conversation: roles must alternate",
        ),
    ],
    ids=["rewrites", "none", "refuses"],
)
def test_a_template_that_cannot_be_used_is_one_line(template, expected):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(UserError) as error:
        ddp.tokenize(tokenizer, CHAT)
    assert str(error.value) == expected


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"messages": [{"role": "user"}]}', "another shape"),
        ('{"messages": [{"role": "user", "content": 5}]}', "another shape"),
        ('{"messages": "just a text"}', "another shape"),
        ('{"messages": {"role": "user", "content": "x"}}', "another shape"),
        ('{"messages": ["x"]}', "another shape"),
        ('{"messages": []}', "another shape"),
        ('{"prompt": "x"}', "another shape"),
        ('{"messages": [', "Expecting value"),
    ],
)
def test_a_malformed_conversation_is_one_line_that_names_its_place(
    small_qwen, tmp_path, line, reason
):
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": CHAT}) + "\n\n" + line + "\n", encoding="utf-8")
    ended = run_here("--base-model", small_qwen, "--corpus-file", path, "--dry-run")
    assert ended.status == 2
    assert ended.err == (
        f'error: {path}, line 3: not a JSON object like {{"text": "..."}} or '
        f'{{"messages": [...]}} ({reason})\n'
    )


def test_samples_that_teach_nothing_are_counted_and_cost_nothing(tokenizer, tmp_path):
    path = tmp_path / "chat.jsonl"
    rows = [{"messages": CHAT}, {"messages": CHAT[:1]}, {"text": TEXTS[0]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data = ddp.build_data(settings_of("--corpus-file", path, "--val-fraction", 0), tokenizer)
    assert len(data.train) == 2 and data.chat
    assert data.summary == (
        "3 samples, 0 held out, 0 blank lines skipped; 1 without a token to predict left out"
    )
    model = lora_model(tokenizer)
    module = CausalLMWithLoss(model)
    both = padded(tokenizer, [TEXTS[0], CHAT[:1]])
    assert_same(
        model,
        lambda: loss_of(module, padded(tokenizer, TEXTS[:1])),
        lambda: loss_of(module, both),
        1e-6,
    )


def test_a_rank_without_samples_computes_a_loss_of_zero_and_zero_gradients(tokenizer):
    for flags in ((), ("--pack",)):
        model = lora_model(tokenizer)
        loss = loss_of(CausalLMWithLoss(model), padded(tokenizer, [], *flags))
        assert loss.item() == 0
        got = gradients(model, loss)
        assert got and all((g == 0).all() for g in got.values())


# ---------------------------------------------------------------- packing


def test_packing_keeps_every_sample_and_fills_the_windows():
    rng = random.Random(0)
    lengths = [rng.randint(4, 60) for _ in range(20_000)]
    windows = ddp.best_fit(lengths, 256)
    assert sorted(itertools.chain(*windows)) == list(range(len(lengths)))
    assert max(sum(lengths[i] for i in window) for window in windows) <= 256
    assert sum(lengths) / (len(windows) * 256) > 0.99
    assert ddp.best_fit([], 8) == []
    assert sorted(map(sorted, ddp.best_fit([8, 3, 8, 5], 8))) == [[0], [1, 3], [2]]


@pytest.fixture(scope="module")
def many(tokenizer):
    """Samples, and the same ones in packed windows of 70 tokens, as one batch."""
    samples = [*TEXTS, CHAT[:2], *TEXTS[::-1], CHAT[2:]]
    settings, counts = settings_of("--pack", "--seq-len", 70), Counter()
    items = ddp.TokenizedSamples(enumerate(samples), tokenizer, settings, counts)
    assert not counts["overlong"] and 2 < len(items) < len(samples)
    return samples, ddp.qwen_collator(tokenizer, settings)(list(items))


def test_packed_loss_and_gradient_equal_those_of_separate_samples(tokenizer, many):
    samples, packed = many
    assert "attention_mask" not in packed
    batch = padded(tokenizer, samples, "--seq-len", 70)
    assert ddp.valid_targets(packed["labels"]) == ddp.valid_targets(batch["labels"])
    model = lora_model(tokenizer)
    module = CausalLMWithLoss(model)
    assert_same(model, lambda: plain_loss(model, batch), lambda: loss_of(module, packed), 1e-5)


def test_packed_samples_cannot_see_each_other(tokenizer):
    model = lora_model(tokenizer).eval()
    samples = [ddp.tokenize(tokenizer, text) for text in TEXTS]
    collate = ddp.qwen_collator(tokenizer, settings_of("--pack"))
    length = len(samples[1][0])

    def second(first):
        batch = collate([(0, [first, samples[1]]), (1, [first, samples[1], samples[3]])])
        body = model.get_base_model().base_model
        out = body(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)
        return out.last_hidden_state[:, len(first[0]) :][:, :length]

    torch.testing.assert_close(second(samples[0]), second(samples[2]))


def test_windows_of_a_long_document_predict_every_token_once(tokenizer, tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("\n".join(TEXTS * 20), encoding="utf-8")
    flags = ("--corpus-file", path, "--corpus-format", "document", "--seq-len", 32)
    data = ddp.build_data(settings_of(*flags, "--val-fraction", 0), tokenizer)
    batch = ddp.qwen_collator(tokenizer, settings_of("--pack"))(list(data.train))
    ids, _ = ddp.tokenize(tokenizer, "\n".join(TEXTS * 20))
    assert ddp.valid_targets(batch["labels"]) == len(ids) - 1
    assert batch["input_ids"].shape[1] <= 32


# ---------------------------------------------------------------- loss


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("flatten", [0, 1024], ids=["padded", "one row"])
def test_loss_and_gradient_equal_those_of_the_plain_logits(tokenizer, monkeypatch, tied, flatten):
    monkeypatch.setattr(CausalLMWithLoss, "FLATTEN_UP_TO", flatten)
    monkeypatch.setattr(FrozenHeadLoss, "CHUNK", 7)
    model = lora_model(tokenizer, tied=tied)
    batch = padded(tokenizer, [*TEXTS, CHAT])
    module = CausalLMWithLoss(model)
    assert_same(model, lambda: plain_loss(model, batch), lambda: loss_of(module, batch), 1e-5)
    assert model.get_base_model().lm_head.weight.grad is None


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


@pytest.mark.parametrize("flatten", [0, 1024], ids=["padded", "one row"])
def test_a_sample_alone_has_the_loss_that_it_has_in_a_padded_batch(tokenizer, monkeypatch, flatten):
    monkeypatch.setattr(CausalLMWithLoss, "FLATTEN_UP_TO", flatten)
    module = CausalLMWithLoss(lora_model(tokenizer))
    alone, count = 0.0, 0
    for text in TEXTS:
        batch = padded(tokenizer, [text])
        tokens = ddp.valid_targets(batch["labels"])
        alone, count = alone + loss_of(module, batch).item() * tokens, count + tokens
    assert loss_of(module, padded(tokenizer, TEXTS)).item() == pytest.approx(alone / count, 1e-5)


def test_the_logits_of_a_whole_batch_never_exist_in_training(tokenizer):
    model = lora_model(tokenizer)
    batch = padded(tokenizer, ["rank " * 200] * 8, "--seq-len", 64)
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


def test_dropout_before_the_adapters_drops_the_share_asked_for_and_keeps_the_mean():
    rows = torch.ones(1000, 1001, requires_grad=True)  # not divisible by four
    for p in (0.05, 0.5, 0.99):
        dropout = ddp.SixteenBitDropout(p)
        torch.manual_seed(0)
        out = dropout(rows)
        share = (out == 0).double().mean().item()
        assert share == pytest.approx(p, abs=5 * (p * (1 - p) / rows.numel()) ** 0.5)
        assert out.max().item() == pytest.approx(1 / (1 - p), rel=1e-3)
        # Neighbours share a random number, and are independent all the same.
        pairs = ((out[:, :-1] == 0) & (out[:, 1:] == 0)).double().mean().item()
        assert pairs == pytest.approx(p * p, abs=5 * (p * p / rows.numel()) ** 0.5)
        (gradient,) = torch.autograd.grad(out.sum(), rows)
        assert torch.equal(gradient, out)  # of ones: what passes forward passes back
        torch.manual_seed(0)
        assert torch.equal(dropout(rows), out)  # the same random state, the same mask
        assert torch.equal(dropout.eval()(rows), rows)


def test_every_adapter_has_the_dropout_that_was_asked_for(tokenizer):
    model = lora_model(tokenizer, "--lora-dropout", 0.25, "--lora-targets", "q_proj,down_proj")
    found = [m for m in model.modules() if isinstance(m, nn.Dropout)]
    assert len(found) == 2 * model.config.num_hidden_layers
    assert all(type(m) is ddp.SixteenBitDropout and m.p == 0.25 for m in found)


def test_recomputed_gates_keep_less_and_change_neither_loss_nor_gradient(tokenizer, monkeypatch):
    batch = padded(tokenizer, TEXTS)
    flags = ("--lora-dropout", 0.1, "--lora-targets", "q_proj,v_proj,gate_proj,down_proj")
    results = []
    for plain in (False, True):
        with monkeypatch.context() as patch:
            if plain:
                patch.setattr(ddp, "recompute_gates", lambda model: None)
            module = CausalLMWithLoss(lora_model(tokenizer, *flags))

        def run(module=module):
            torch.manual_seed(3)
            return loss_of(module, batch)

        results.append((run().item(), gradients(module, run()), kept_bytes(run)))
    (loss, grads, kept), (plain_loss_, plain_grads, plain_kept) = results
    assert loss == pytest.approx(plain_loss_, abs=1e-6)
    assert largest_difference(grads, plain_grads) <= 1e-6
    tokens = int(batch["attention_mask"].sum())
    # One tensor [tokens, intermediate] of fp32 a layer goes, of two layers.
    assert plain_kept - kept >= 2 * tokens * 64 * 4


@pytest.mark.parametrize("kind", ["no activation", "residual", "swapped"])
def test_a_feed_forward_layer_that_computes_something_else_stays_as_it_is(kind):
    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj, self.up_proj = nn.Linear(8, 16), nn.Linear(8, 16)
            self.down_proj, self.act_fn = nn.Linear(16, 8), nn.SiLU()

        def forward(self, x):
            gate, up = self.gate_proj(x), self.up_proj(x)
            if kind == "no activation":
                return self.down_proj(gate * up)
            if kind == "swapped":
                return self.down_proj(gate * self.act_fn(up))
            return x + self.down_proj(self.act_fn(gate) * up)

    torch.manual_seed(0)
    model, x = nn.Sequential(Other()), torch.randn(5, 8)
    want = model(x)
    ddp.recompute_gates(model)
    assert torch.equal(model(x), want)


def test_bf16_changes_the_loss_by_no_more_than_its_rounding(tokenizer):
    batch = padded(tokenizer, TEXTS)
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


# ---------------------------------------------------------------- LoRA and precision


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_adapter_is_fp32_over_any_base_and_the_base_is_frozen(small_qwen, precision):
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    settings = settings_of("--base-model", small_qwen)
    settings.precision = precision  # fp16 is for CUDA, and choose_device says so
    model = ddp.add_lora(ddp.load_base(settings)[0], settings)
    seen = Counter()
    for name, parameter in model.named_parameters():
        lora = "lora_" in name
        seen[lora] += 1
        assert parameter.requires_grad == lora
        assert parameter.dtype == (torch.float32 if lora else dtype), name
    assert seen[True] == 8 and seen[False] > 8  # two layers, q and v, A and B


def test_parameter_counts_of_the_half_billion_model():
    from transformers import Qwen2ForCausalLM

    with torch.device("meta"):
        base = Qwen2ForCausalLM(full_config())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ddp, "recompute_gates", lambda model: None)  # it computes, meta cannot
        with torch.device("meta"):
            model = CausalLMWithLoss(ddp.add_lora(base, settings_of()))
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


def built(small_qwen, *flags):
    settings, launch = settings_of("--base-model", small_qwen, *flags), ddp.Launch()
    return ddp.build_qwen(launch, settings), launch, settings


@pytest.mark.parametrize("flags", [(), ("--gradient-checkpointing",)], ids=["plain", "checkpt."])
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


def test_checkpointing_keeps_less_from_the_first_step_on_and_gives_the_same_gradient(small_qwen):
    results = []
    for flags in ((), ("--gradient-checkpointing",)):
        run, _, _ = built(small_qwen, "--lora-dropout", 0.1, *flags)
        for name, parameter in ddp.trained_parameters(run.model):
            if "lora_B" in name:
                torch.manual_seed(len(name))
                nn.init.normal_(parameter, 0, 0.1)
        batch = run.collate([run.data.train[i] for i in range(8)])

        def step(run=run, batch=batch):
            torch.manual_seed(3)
            return loss_of(run.model, batch)

        weights = sum(p.numel() * 4 for p in run.model.parameters())
        results.append((step().item(), gradients(run.model, step()), kept_bytes(step) - weights))
    (loss, grads, kept), (loss_again, grads_again, kept_again) = results
    assert loss == pytest.approx(loss_again, abs=1e-6)
    assert largest_difference(grads, grads_again) <= 1e-6
    assert kept_again < 0.5 * kept


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
    assert scaled == pytest.approx(result.grad_norm * 2**10 * result.tokens / capacity, rel=1e-5)
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
    tensors = load_file(tmp_path / "run/adapter/adapter_model.safetensors")
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


# ---------------------------------------------------------------- the base model


def run_here(*flags) -> Finished:
    """The script's main() in this process: one rank, on the CPU. Warnings go to `err`."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    main = ddp.main.__wrapped__  # without torchrun's @record
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        with warnings.catch_warnings(record=True) as warned:
            warnings.resetwarnings()
            for quiet in (DeprecationWarning, PendingDeprecationWarning, ResourceWarning):
                warnings.simplefilter("ignore", quiet)  # as Python does outside of tests
            try:
                main(["--model", "qwen", "--cpu", *map(str, flags)])
            except SystemExit as ending:
                status = ending.code
    shown = "".join(f"{w.category.__name__}: {w.message}\n" for w in warned)
    return Finished(status, out.getvalue(), shown + err.getvalue())


def change_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")


def truncate_weights(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def remove(folder, pattern):
    files = list(folder.glob(pattern))
    assert files
    for file in files:
        file.unlink()


def masked_model(folder):
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=416, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, initializer_range=0.3,
    )  # fmt: skip
    remove(folder, "model.safetensors")
    BertForMaskedLM(config).save_pretrained(folder)


def model_with_scaled_logits(folder):
    from transformers import GraniteConfig, GraniteForCausalLM

    torch.manual_seed(0)
    config = GraniteConfig(
        vocab_size=416, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=32, logits_scaling=8.0, initializer_range=0.3,
    )  # fmt: skip
    remove(folder, "model.safetensors")
    GraniteForCausalLM(config).save_pretrained(folder)


TOO_MANY_LAYERS = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda f: remove(f, "config.json"), "the folder has no config.json"),
        (lambda f: remove(f, "*token*"), "the folder has no tokenizer"),
        (lambda f: remove(f, "model.safetensors"), ""),
        (truncate_weights, ""),
        (lambda f: change_config(f, model_type="t5"), ""),
        (lambda f: change_config(f, model_type="no-such-model"), "no-such-model"),
        (lambda f: change_config(f, **TOO_MANY_LAYERS), "the files lack the weights model"),
        (masked_model, "is not a causal model"),
        (model_with_scaled_logits, "its logits are not the plain output of its head"),
    ],
    ids=[
        "no config", "no tokenizer", "no weights", "cut weights", "T5", "unknown type",
        "missing layer", "masked", "scaled logits",
    ],
)  # fmt: skip
def test_a_folder_that_is_no_causal_model_is_one_line_and_exit_2(
    small_qwen, tmp_path, spoil, expected
):
    folder = tmp_path / "base"
    shutil.copytree(small_qwen, folder)
    spoil(folder)
    ended = run_here("--base-model", folder, "--output-dir", tmp_path / "run")
    assert ended.status == 2
    assert ended.err.startswith(f"error: --base-model {folder}: ") and expected in ended.err
    assert ended.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("no/such/folder", "no such folder"),
        ("./nowhere", "no such folder"),
        ("Qwen/Qwen2.5-0.5B-Instruct", ""),  # a hub id, not in the cache, and the hub is off
    ],
)
def test_a_base_model_that_is_not_there_says_how_to_use_a_folder(
    tmp_path, monkeypatch, name, expected
):
    monkeypatch.chdir(tmp_path)
    ended = run_here("--base-model", name)
    assert ended.status == 2
    assert ended.err.startswith(f"error: --base-model {name}: {expected}")
    assert ended.err.endswith(
        "; a folder that save_pretrained wrote needs no network: --base-model FOLDER\n"
    )
    assert ended.err.count("\n") == 1 and not any(tmp_path.iterdir())


def test_without_a_network_nobody_waits_for_the_hubs_retries(tmp_path, monkeypatch):
    lookups = []

    def unknown(host, *args, **kwargs):
        lookups.append(host)
        raise socket.gaierror(-2, "Name or service not known")

    def no_pause(seconds):
        raise AssertionError(f"waited {seconds} s to try again")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr("time.sleep", no_pause)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.chdir(tmp_path)
    ended = run_here("--base-model", "no-one/no-model")
    assert (ended.status, lookups) == (2, ["huggingface.co"])
    assert ended.err.count("\n") == 1 and "needs no network: --base-model FOLDER" in ended.err


def test_behind_a_proxy_the_hubs_name_is_for_the_proxy_to_resolve(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("urllib.request.getproxies", lambda: {"https": "http://proxy:3128"})
    assert not ddp.hub_is_unknown()  # and `no_network` would fail the test


@pytest.mark.parametrize(("rank", "order"), [(0, ["load", "meet"]), (1, ["meet", "load"])])
def test_rank_0_loads_first_so_that_a_download_happens_once(monkeypatch, rank, order):
    events = []

    def gather(value, launch):
        events.append("meet")
        return [value]

    def load(settings):
        events.append("load")
        raise UserError("stop here")

    monkeypatch.setattr(ddp, "gather", gather)
    monkeypatch.setattr(ddp, "load_base", load)
    with pytest.raises(UserError, match="stop here"):
        ddp.build_qwen(ddp.Launch(rank=rank, world_size=2), settings_of())
    assert events[:2] == order


def test_a_wrong_base_model_on_two_ranks_is_one_line_and_exit_2(tmp_path):
    (tmp_path / "empty").mkdir()
    flags = ("--model", "qwen", "--cpu", "--base-model", tmp_path / "empty")
    ended = run_command(command(2, *flags), cwd=tmp_path)
    assert len(ended.error_lines()) == 1 and "no config.json" in ended.error_lines()[0]
    assert "exitcode  : 2" in ended.err
    assert not (tmp_path / "runs").exists()


# ---------------------------------------------------------------- saving and answering


FRESH_PROCESS = """
import socket, sys, warnings
def no(*args): raise SystemExit("network used")
socket.socket.connect = socket.getaddrinfo = no
warnings.simplefilter("ignore", FutureWarning)  # PEFT uses a name that transformers renamed
import torch, transformers
transformers.logging.disable_progress_bar()
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
base, run = sys.argv[1:]
want = load_file(f"{run}/want.safetensors")
plain = AutoModelForCausalLM.from_pretrained(base)
loaded = {
    "auto": AutoPeftModelForCausalLM.from_pretrained(f"{run}/adapter"),
    "peft": PeftModel.from_pretrained(plain, f"{run}/adapter"),
    "merged": AutoModelForCausalLM.from_pretrained(f"{run}/merged"),
}
for name, model in loaded.items():
    with torch.no_grad():
        print(name, float((model.eval()(want["ids"]).logits - want["logits"]).abs().max()))
for folder in ("adapter", "merged"):
    assert AutoTokenizer.from_pretrained(f"{run}/{folder}").chat_template
"""


def logits_of(model, ids):
    with torch.no_grad():
        return model.eval()(ids).logits


def test_adapter_and_merged_model_give_the_same_logits_in_a_fresh_process(tmp_path, small_qwen):
    settings = settings_of("--base-model", small_qwen, "--lora-r", 4, "--merge")
    base, tokenizer = ddp.load_base(settings)
    model = adapted(base, "--lora-dropout", 0)
    ids = torch.tensor([ddp.tokenize(tokenizer, TEXTS[2])[0].tolist()])
    want = logits_of(model, ids)
    with model.disable_adapter():
        assert (logits_of(model, ids) - want).abs().max() > 0.1
    save_file({"ids": ids, "logits": want}, tmp_path / "want.safetensors")
    numbers = sum(p.numel() for p in model.parameters() if p.requires_grad)
    ddp.save_qwen(model, tokenizer, tmp_path, settings, chat=True)

    file = tmp_path / "adapter/adapter_model.safetensors"
    tensors = load_file(file)
    assert all("lora_" in name for name in tensors)
    assert sum(t.numel() for t in tensors.values()) == numbers
    assert 0 <= file.stat().st_size - 4 * numbers < 4096  # the rest is the header
    assert not list((tmp_path / "merged").glob("adapter*"))

    args = [sys.executable, "-c", FRESH_PROCESS, str(small_qwen), str(tmp_path)]
    fresh = run_command(args, cwd=tmp_path)
    assert fresh.status == 0 and fresh.err == "", fresh.err
    differences = {line.split()[0]: float(line.split()[1]) for line in fresh.out.splitlines()}
    assert differences.keys() == {"auto", "peft", "merged"}
    assert differences["auto"] <= 1e-6 and differences["peft"] <= 1e-6
    assert differences["merged"] <= 1e-4


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_merged_model_is_right_with_tied_and_untied_heads(tmp_path, tied):
    from transformers import AutoModelForCausalLM

    settings = settings_of("--base-model", save_folder(tmp_path / "base", tied), "--merge")
    base, tokenizer = ddp.load_base(settings)
    model = adapted(base, "--lora-dropout", 0)
    ids = torch.tensor([ddp.tokenize(tokenizer, TEXTS[2])[0].tolist()])
    want = logits_of(model, ids)
    ddp.save_qwen(model, tokenizer, tmp_path, settings, chat=False)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert (logits_of(merged, ids) - want).abs().max() <= 1e-4
    assert (merged.lm_head.weight is merged.model.embed_tokens.weight) == tied


def test_a_half_precision_base_is_merged_in_fp32_and_rounded_once(tmp_path, small_qwen):
    settings = settings_of("--base-model", small_qwen, "--merge", "--precision", "bf16")
    base, tokenizer = ddp.load_base(settings)
    model = adapted(base, "--lora-dropout", 0)
    layer = model.get_base_model().model.layers[1].self_attn.q_proj
    lora_a, lora_b = (m["default"].weight.detach() for m in (layer.lora_A, layer.lora_B))
    want = (layer.base_layer.weight.float() + 8 / 4 * lora_b @ lora_a).to(torch.bfloat16)
    ddp.save_qwen(model, tokenizer, tmp_path, settings, chat=False)
    merged = load_file(tmp_path / "merged/model.safetensors")
    assert {t.dtype for t in merged.values()} == {torch.bfloat16}
    assert torch.equal(merged["model.layers.1.self_attn.q_proj.weight"], want)


@pytest.fixture
def other_end_of_turn():
    """A tokenizer whose turns end in a special token that is not its EOS, nor named otherwise."""
    tokenizer = make_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") not in tokenizer.all_special_ids
    return tokenizer


def test_an_end_of_turn_that_is_not_the_eos_is_learned_and_nothing_behind_it(other_end_of_turn):
    labels = ddp.tokenize(other_end_of_turn, CHAT[:2])[1]
    learned = other_end_of_turn.decode(labels[labels != IGNORE])
    assert learned == "A rank is one process.\n<|im_end|>"


def test_a_merged_chat_model_stops_where_the_training_ended_a_turn(
    tmp_path, small_qwen, other_end_of_turn
):
    settings = settings_of("--base-model", small_qwen, "--merge")
    base, _ = ddp.load_base(settings)
    tokenizer = other_end_of_turn
    close, eos = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert ddp.end_tokens(tokenizer, chat=False) == [eos]
    assert ddp.end_tokens(tokenizer, chat=True) == sorted([close, eos])
    ddp.save_qwen(adapted(base), tokenizer, tmp_path, settings, chat=True)
    saved = json.loads((tmp_path / "merged/generation_config.json").read_text("utf-8"))
    assert set(saved["eos_token_id"]) == {close, eos}


def test_answers_are_repeatable_and_leave_the_model_in_training_mode(tokenizer):
    model = lora_model(tokenizer)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, 0, 1.0)
    ask = ("What is a rank?", True)
    base, new = (ddp.qwen_answer(model, tokenizer, *ask, base=b, length=12) for b in (True, False))
    assert base != new and model.training
    assert ddp.qwen_answer(model, tokenizer, *ask, base=True, length=12) == base


# ---------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    """28 lines of very different lengths: 25 to train on, so the last update has one sample."""
    rng = random.Random(0)
    words = " ".join(TEXTS).split()
    lengths = [rng.choice([1, 2, 3, 8, 20, 40]) for _ in range(28)]
    lines = [" ".join(rng.choice(words) for _ in range(n)) + "\n" for n in lengths]
    path = tmp_path_factory.mktemp("corpus") / "uneven.txt"
    path.write_text("".join(lines), encoding="utf-8")
    return path


def launch(ranks, folder, *flags, **options):
    args = command(ranks, "--model", "qwen", "--cpu", "--output-dir", folder, *flags)
    finished = run_command(args, **options)
    assert finished.status == 0, finished.out + finished.err
    return finished


def here(folder, *flags):
    finished = run_here("--output-dir", folder, *flags)
    assert finished.status == 0, finished.out + finished.err
    return finished


def adapter_of(folder):
    return load_file(folder / "adapter/adapter_model.safetensors")


def adapter_digest(folder):
    """The digest that a run prints, computed from the file that it wrote."""
    tensors = {
        "model." + name.replace(".weight", ".default.weight"): tensor
        for name, tensor in adapter_of(folder).items()
    }
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def quiet(err):
    """Nothing on standard error but torchrun's note on OMP_NUM_THREADS."""
    return not any(word in err for word in ("Warning", "warning:", "TOKENIZERS", "Traceback"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_documented_command_trains_and_saves_an_adapter(small_qwen, tmp_path, ranks):
    flags = "--model qwen --batch-size 1 --seq-len 64 --max-steps 2".split()
    args = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    args += [f"--nproc_per_node={ranks}", str(ROOT / "llm_ddp_parallel_training.py"), *flags]
    environment = clean_environment(CUDA_VISIBLE_DEVICES="")
    ended = run_command([*args, "--base-model", str(small_qwen)], cwd=tmp_path, env=environment)
    assert ended.status == 0 and quiet(ended.err), ended.err
    (folder,) = (tmp_path / "runs").iterdir()
    digest = digest_line(ended)
    assert digest == adapter_digest(folder)
    assert ("equal on all 2 ranks" in ended.out) == (ranks == 2)
    config = json.loads((folder / "adapter/adapter_config.json").read_text("utf-8"))
    assert config["base_model_name_or_path"] == str(small_qwen.resolve())
    assert (folder / "adapter/tokenizer.json").is_file()
    assert (folder / "adapter/chat_template.jinja").is_file()


EXACT = ("--lora-dropout", 0, "--lr", 1e-3, "--max-steps", 14, "--log-every", 1,
         "--eval-every", 7, "--seq-len", 48)  # fmt: skip


@pytest.fixture(scope="module")
def one_rank_of_four(small_qwen, uneven, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "one"
    here(folder, "--base-model", small_qwen, "--corpus-file", uneven, "--batch-size", 4, *EXACT)
    return folder


@pytest.mark.parametrize(("ranks", "accumulation"), [(2, 1), (1, 2)], ids=["ranks", "accumulation"])
def test_the_same_global_batch_gives_the_same_losses_and_adapter(
    small_qwen, uneven, one_rank_of_four, tmp_path, ranks, accumulation
):
    flags = ("--base-model", small_qwen, "--corpus-file", uneven, "--batch-size", 2, *EXACT)
    flags += ("--grad-accum", accumulation)
    folder = tmp_path / "run"
    launch(2, folder, *flags) if ranks == 2 else here(folder, *flags)
    expected = losses(one_rank_of_four)
    assert len(expected) == 14
    assert losses(folder) == pytest.approx(expected, abs=1e-6)
    for a, b in zip(metrics(folder), metrics(one_rank_of_four), strict=True):
        assert a.get("val_loss") == pytest.approx(b.get("val_loss"), abs=1e-6)
        assert a.get("tokens") == b.get("tokens")
    before, after = (row["val_loss"] for row in metrics(folder) if "val_loss" in row)
    assert after < before
    assert largest_difference(adapter_of(folder), adapter_of(one_rank_of_four)) <= 1e-6


def test_packed_and_checkpointed_on_two_ranks_equals_one_rank(small_qwen, uneven, tmp_path):
    flags = ("--base-model", small_qwen, "--corpus-file", uneven, "--pack", *EXACT)
    checkpointed = launch(
        2, tmp_path / "two", *flags, "--batch-size", 1, "--gradient-checkpointing"
    )
    assert quiet(checkpointed.err), checkpointed.err
    here(tmp_path / "one", *flags, "--batch-size", 2)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-6)
    difference = largest_difference(adapter_of(tmp_path / "two"), adapter_of(tmp_path / "one"))
    assert difference <= 1e-6


@pytest.fixture(scope="module")
def chat_run(small_qwen, tmp_path_factory):
    """A run on conversations, merged at the end, and what it printed."""
    path = tmp_path_factory.mktemp("corpus") / "chat.jsonl"
    rows = [{"messages": CHAT}, {"messages": CHAT[:2]}, {"messages": CHAT[2:]}] * 4
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    folder = tmp_path_factory.mktemp("runs") / "chat"
    flags = ("--base-model", small_qwen, "--corpus-file", path, "--merge", "--lr", 3e-2)
    return folder, here(folder, *flags, "--max-steps", 40, "--log-every", 20)


def test_a_chat_run_learns_and_tells_what_it_trained_and_sent(chat_run, small_qwen):
    folder, ended = chat_run
    assert losses(folder)[-1] < 0.5 * losses(folder)[0]
    assert digest_line(ended) == adapter_digest(folder)
    assert (folder / "merged/config.json").is_file()
    base, _ = ddp.load_base(settings_of("--base-model", small_qwen))
    full = sum(p.numel() for p in base.parameters())
    trained = sum(t.numel() for t in adapter_of(folder).values())
    header = {line[:10].strip(): line[11:] for line in ended.out.splitlines()}
    assert f"{trained:,} of {full + trained:,} parameters trained" in header["model"]
    assert header["gradients"].startswith(f"{4 * trained / 1e6:.2f} MB all-reduced an update")
    with_adapter = ddp.CausalLMWithLoss(ddp.add_lora(base, settings_of()))
    crc32 = ddp.frozen_checksum(with_adapter)
    assert f"weights of crc32 {crc32}, compared at the end" in ended.out
    assert header["frozen"] == f"crc32 {crc32}, unchanged"  # the last such line counts


def test_generate_shows_base_and_adapted_answers_through_the_chat_template(chat_run, small_qwen):
    folder, _ = chat_run
    ended = run_here("--resume", folder, "--generate", "What is a rank?")
    assert ended.status == 0 and ended.err == ""
    base, adapted_ = ended.out.splitlines()[0], ended.out.splitlines()[-1]
    assert base.startswith("base     ") and base != adapted_
    assert ended.out.rstrip().endswith("adapted  A rank is one process.")


def test_generate_on_a_run_without_adapter_is_one_line(chat_run, tmp_path):
    (tmp_path / "run").mkdir()
    shutil.copy(chat_run[0] / "run.json", tmp_path / "run")
    ended = run_here("--resume", tmp_path / "run", "--generate", "x")
    assert ended.status == 2
    assert (
        ended.err == f"error: {tmp_path / 'run'} has no adapter/: it is not a finished qwen run\n"
    )


def test_a_frozen_weight_that_changes_fails_the_run_and_saves_no_adapter(
    small_qwen, tmp_path, monkeypatch
):
    step = ddp.training_step

    def spoil(model, *rest):
        with torch.no_grad():
            model.model.get_base_model().model.norm.weight[3] += 1e-3
        return step(model, *rest)

    monkeypatch.setattr(ddp, "training_step", spoil)
    folder = tmp_path / "run"
    ended = run_here("--base-model", small_qwen, "--max-steps", 1, "--output-dir", folder)
    assert ended.status == 1 and ended.err == "error: the frozen weights have changed\n"
    assert not (folder / "adapter").exists()


# ---------------------------------------------------------------- stop and go on


LONG = ("--max-steps", 60, "--log-every", 1, "--lr", 1e-3, "--batch-size", 2, "--seq-len", 48)


def test_stopped_on_two_ranks_and_resumed_equals_the_uninterrupted_run(
    small_qwen, uneven, tmp_path
):
    flags = ("--base-model", small_qwen, "--corpus-file", uneven, *LONG)
    whole = launch(2, tmp_path / "whole", *flags, "--num-workers", 2)  # dropout is on
    assert quiet(whole.err), whole.err  # nor does a tokenizer complain of the forks

    folder = tmp_path / "run"
    args = command(2, "--model", "qwen", "--cpu", "--output-dir", folder, *flags)
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        args, stdout=pipe, stderr=pipe, text=True, env=clean_environment(), start_new_session=True
    )
    try:
        for line in process.stdout:
            if line.startswith("step      3/"):
                break
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert "the state is saved" in err, err
    (checkpoint,) = (folder / "checkpoints").iterdir()
    state = torch.load(checkpoint / "state.pt", weights_only=True)
    assert 3 <= state["progress"]["step"] < 60
    assert not (folder / "adapter").exists()

    resumed = launch(2, folder, "--resume", folder)
    assert digest_line(resumed) == digest_line(whole)
    assert losses(folder) == losses(tmp_path / "whole")
    final = {
        "model." + name.replace(".weight", ".default.weight"): tensor
        for name, tensor in adapter_of(folder).items()
    }
    assert final.keys() == state["model"].keys()
    for name, tensor in final.items():  # a reloaded adapter is still trained
        assert not torch.equal(tensor, state["model"][name]), name
