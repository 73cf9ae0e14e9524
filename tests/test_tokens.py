"""Samples as tokens: batches, cutting to length, packing, storage, and the batch they become."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from itertools import compress

import numpy as np
import pytest
import torch
from qwen_assets import make_tokenizer
from qwen_tests import (
    CHAT,
    TEXTS,
    assert_same,
    batch_of,
    first_turns,
    gradients,
    lora_model,
    loss_of,
    plain_loss,
    sample_of,
    settings_of,
)

import llm_ddp_parallel_training as ddp
from llm_ddp_parallel_training import IGNORE, CausalLMWithLoss

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def tokenized(tokenizer, contents, *flags, counts=None):
    """A data set of these texts and conversations, in this order."""
    counts = Counter() if counts is None else counts
    settings = settings_of(*flags)
    return ddp.TokenizedSamples(contents, range(len(contents)), tokenizer, settings, counts, False)


# Tokens


def test_a_batch_is_tokenized_like_each_text_alone(tokenizer):
    source = random.Random(0)
    letters = [*"aé😀 \n\t", "rank ", "<|im_end|>", "  ", "\r\n", "of the group", "\u2028", "한"]
    texts = ["".join(source.choices(letters, k=source.randrange(0, 40))) for _ in range(1500)]
    chats = [
        {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]}
        for a, b in zip(texts[:300], texts[300:600])
    ]
    contents = [*texts, *(chat | {"tools": None} for chat in chats)]
    source.shuffle(contents)
    together = ddp.tokenize(tokenizer, contents, Counter())
    for content, row in zip(contents, together, strict=True):
        ids, learned = sample_of(tokenizer, content)
        assert (ids, learned) == row[0]
        if isinstance(content, str):
            own = tokenizer(content)["input_ids"]
            end = [] if own and own[-1] == tokenizer.eos_token_id else [tokenizer.eos_token_id]
            assert ids == [*own, *end] and all(learned)
        else:
            answer = content["messages"][1]["content"]
            assert tokenizer.decode([*compress(ids, learned)]) == answer + "<|im_end|>"


def test_an_eos_that_the_tokenizer_adds_is_not_doubled(tokenizer):
    ids, _ = sample_of(tokenizer, "A rank.<|im_end|>")
    assert ids.count(tokenizer.eos_token_id) == 1


@pytest.mark.parametrize("overlong", ["truncate", "drop", "split"])
def test_long_samples_are_treated_as_told_and_counted(tokenizer, overlong):
    counts = Counter()
    samples = [sample_of(tokenizer, text)[0] for text in TEXTS]
    long = [ids for ids in samples if len(ids) > 10]
    assert 0 < len(long) < len(samples)
    items = tokenized(tokenizer, TEXTS, "--seq-len", 10, "--overlong", overlong, counts=counts)
    seen = [items[i][1][0][0].tolist() for i in range(len(items))]
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


@pytest.mark.parametrize("flags", [(), ("--pack",)], ids=["", "packed"])
def test_tokens_are_held_flat_and_come_back_as_they_were(tokenizer, monkeypatch, flags):
    monkeypatch.setattr(ddp.TokenizedSamples, "AT_ONCE", 7)  # so that there are several batches
    contents = [*TEXTS * 4, CHAT, *TEXTS, first_turns(CHAT, 2)]
    items = tokenized(tokenizer, contents, "--seq-len", 200, *flags)
    pieces = [piece for i in range(len(items)) for piece in items[i][1]]
    expected = [sample_of(tokenizer, content) for content in contents]
    if not flags:
        assert [items[i][0] for i in range(len(items))] == list(range(len(contents)))
    assert sorted((ids.tolist(), learned.tolist()) for ids, learned in pieces) == sorted(expected)
    assert {(str(a.dtype), str(b.dtype)) for a, b in pieces} == {("uint32", "bool")}
    with pytest.raises(IndexError):
        items[len(items)]


def test_a_token_is_held_in_five_bytes_at_most(tokenizer):
    contents = [" ".join(TEXTS) + str(i) for i in range(2000)]
    items = tokenized(tokenizer, contents)
    tokens = sum(len(items[i][1][0][0]) for i in range(len(items)))
    arrays = [value for value in vars(items).values() if isinstance(value, np.ndarray)]
    assert tokens > 50 * len(items) and arrays
    assert sum(array.nbytes for array in arrays) <= 5 * tokens
    others = {name for name, value in vars(items).items() if not isinstance(value, np.ndarray)}
    assert all(isinstance(getattr(items, name), range) for name in others)


def test_samples_that_teach_nothing_are_counted_and_cost_nothing(tokenizer):
    counts = Counter()
    contents = [CHAT, first_turns(CHAT, 1), TEXTS[0]]
    items = tokenized(tokenizer, contents, counts=counts)
    assert len(items) == 2 and counts["unlabelled"] == 1
    model = lora_model(tokenizer)
    module = CausalLMWithLoss(model)
    both = batch_of(tokenizer, [TEXTS[0], first_turns(CHAT, 1)])
    alone = batch_of(tokenizer, TEXTS[:1])
    assert_same(model, lambda: loss_of(module, alone), lambda: loss_of(module, both), 1e-6)


# Batches


def test_padding_is_not_learned_but_the_eos_is_even_where_it_is_also_the_padding():
    tokenizer = make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    batch = batch_of(tokenizer, TEXTS)
    for name in ("input_ids", "attention_mask", "labels"):
        assert batch[name].dtype == torch.int64 and batch[name].shape == batch["input_ids"].shape
    width = batch["input_ids"].shape[1]
    assert width == max(len(tokenizer(t)["input_ids"]) for t in TEXTS) + 1
    for row, text in enumerate(TEXTS):
        ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        assert batch["input_ids"][row, : len(ids)].tolist() == ids
        assert batch["labels"][row, 1 : len(ids)].tolist() == ids[1:]
        assert (batch["labels"][row, len(ids) :] == IGNORE).all()
        mask = [1] * len(ids) + [0] * (width - len(ids))
        assert batch["attention_mask"][row].tolist() == mask
    assert batch["record_ids"].tolist() == [0, 1, 2, 3, 4]
    assert batch["tokens"] == ddp.valid_targets(batch["labels"])


def test_a_tokenizer_without_padding_token_pads_with_eos():
    tokenizer = make_tokenizer()
    tokenizer.pad_token = None
    batch = batch_of(tokenizer, TEXTS)
    assert (batch["input_ids"][1, 8:] == tokenizer.eos_token_id).all()
    assert int(batch["attention_mask"][1].sum()) < 8


def test_tokens_that_are_only_read_are_counted_beside_the_learned_ones(tokenizer):
    batch = batch_of(tokenizer, [CHAT, TEXTS[0]])
    chat, text = (sample_of(tokenizer, content) for content in (CHAT, TEXTS[0]))
    assert batch["tokens"] == len(chat[0]) - 1 + len(text[0]) - 1
    assert ddp.valid_targets(batch["labels"]) == sum(chat[1]) + len(text[0]) - 1
    assert len(batch["inputs"]["targets"]) == ddp.valid_targets(batch["labels"])


@pytest.mark.parametrize("flags", [(), ("--pack",)], ids=["", "packed"])
def test_a_rank_without_samples_computes_a_loss_of_zero_and_zero_gradients(tokenizer, flags):
    model = lora_model(tokenizer)
    batch = batch_of(tokenizer, [], *flags)
    loss = loss_of(CausalLMWithLoss(model), batch)
    assert loss.item() == 0 and ddp.valid_targets(batch["labels"]) == 0
    got = gradients(model, loss)
    assert got and all((g == 0).all() for g in got.values())


LONG = " ".join(TEXTS * 2)  # so many tokens that such a batch stays padded
BATCHES = {
    "one row": [*TEXTS, CHAT],
    "padded": [*TEXTS, CHAT, *(LONG[i:] for i in range(0, 160, 8))],
    "no padding": [TEXTS[0]] * 3,
}


@pytest.mark.parametrize("kind", BATCHES)
def test_every_sample_has_the_loss_in_its_batch_that_it_has_alone(tokenizer, kind):
    contents = BATCHES[kind]
    module = CausalLMWithLoss(lora_model(tokenizer))
    batch = batch_of(tokenizer, contents)
    rows = {"one row": 1, "padded": len(contents), "no padding": 3}[kind]
    assert len(batch["inputs"]["input_ids"]) == rows
    total = count = 0
    for content in contents:
        alone = batch_of(tokenizer, [content])
        learned = ddp.valid_targets(alone["labels"])
        total, count = total + loss_of(module, alone).item() * learned, count + learned
    assert count == ddp.valid_targets(batch["labels"])
    assert loss_of(module, batch).item() == pytest.approx(total / count, abs=1e-5)


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_loss_and_gradient_equal_those_of_the_plain_logits(tokenizer, monkeypatch, kind, tied):
    monkeypatch.setattr(ddp.FrozenHeadLoss, "CHUNK", 7)
    model = lora_model(tokenizer, tied=tied)
    batch, module = batch_of(tokenizer, BATCHES[kind]), CausalLMWithLoss(model)
    assert_same(model, lambda: plain_loss(model, batch), lambda: loss_of(module, batch), 1e-5)
    assert model.get_base_model().lm_head.weight.grad is None


# Packing


def test_packing_keeps_every_sample_and_fills_the_windows():
    rng = random.Random(0)
    lengths = [rng.randint(4, 60) for _ in range(20_000)]
    windows = ddp.best_fit(lengths, 256)
    assert sorted(itertools.chain(*windows)) == list(range(len(lengths)))
    assert max(sum(lengths[i] for i in window) for window in windows) <= 256
    assert sum(lengths) / (len(windows) * 256) > 0.99
    assert ddp.best_fit([], 8) == []
    assert sorted(map(sorted, ddp.best_fit([8, 3, 8, 5], 8))) == [[0], [1, 3], [2]]


@pytest.mark.parametrize("rows", ["several", "one"])
def test_packed_loss_and_gradient_equal_those_of_separate_samples(tokenizer, rows):
    contents = [*TEXTS, first_turns(CHAT, 2), *TEXTS[::-1], CHAT]
    length = 100 if rows == "several" else 500
    counts = Counter()
    items = tokenized(tokenizer, contents, "--pack", "--seq-len", length, counts=counts)
    assert not counts["overlong"]
    assert len(items) == 1 if rows == "one" else 2 < len(items) < len(contents)
    packed = batch_of(tokenizer, [items[i][1] for i in range(len(items))], "--pack")
    batch = batch_of(tokenizer, contents)
    assert ddp.valid_targets(packed["labels"]) == ddp.valid_targets(batch["labels"])
    assert packed["tokens"] == batch["tokens"]
    model = lora_model(tokenizer)
    module = CausalLMWithLoss(model)
    assert_same(model, lambda: plain_loss(model, batch), lambda: loss_of(module, packed), 1e-5)


@pytest.mark.parametrize("alone", [True, False], ids=["one row", "two rows"])
def test_packed_samples_cannot_see_each_other(tokenizer, alone):
    module = CausalLMWithLoss(lora_model(tokenizer))
    samples = [sample_of(tokenizer, text) for text in TEXTS]

    def loss_of_second(first: int, then: int) -> float:
        """The loss of sample 1 between two others that count for nothing."""
        window = [samples[first], samples[1], samples[then]]
        window = [(ids, [ids is samples[1][0]] * len(ids)) for ids, _ in window]
        rows = [window] if alone else [window, [(samples[3][0], [False] * len(samples[3][0]))] * 5]
        return loss_of(module, batch_of(tokenizer, rows, "--pack")).item()

    expected = loss_of(module, batch_of(tokenizer, TEXTS[1:2])).item()
    assert loss_of_second(0, 3) == pytest.approx(expected, abs=1e-5)
    assert loss_of_second(2, 4) == pytest.approx(expected, abs=1e-5)


def test_windows_of_a_long_document_predict_every_token_once(tokenizer, tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("\n".join(TEXTS * 20), encoding="utf-8")
    flags = ("--corpus-file", path, "--corpus-format", "document", "--seq-len", 32)
    data = ddp.build_data(settings_of(*flags, "--val-fraction", 0), tokenizer)
    rows = [data.train[i][1] for i in range(len(data.train))]
    batch = batch_of(tokenizer, rows, "--pack")
    ids, _ = sample_of(tokenizer, "\n".join(TEXTS * 20))
    assert ddp.valid_targets(batch["labels"]) == len(ids) - 1
    assert batch["input_ids"].shape[1] <= 32
