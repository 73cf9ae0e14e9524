"""The model, its loss, and one training step: what the numbers of a run are made of."""

from __future__ import annotations

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import metrics, settings_of, train_here
from torch import nn
from torch.utils.data import DataLoader

import llm_ddp_parallel_training as ddp

TEXTS = ["a", "It is.", "gradients add up", "ü" * 20, "the ranks meet in the backward pass", "No"]


def model_of(**shape) -> ddp.TinyCausalTransformer:
    torch.manual_seed(0)
    return ddp.TinyCausalTransformer(**shape)


def batch_of(*texts: str, seq_len: int = 64) -> dict:
    return ddp.tiny_collator(list(enumerate(texts)), seq_len)


def loss_of(model: nn.Module, batch: dict) -> torch.Tensor:
    return model(batch["input_ids"], batch["labels"])


# The collator


def test_a_batch_is_padded_and_only_padding_is_left_out_of_the_loss():
    batch = ddp.tiny_collator([(7, "hi"), (3, "grün"), (9, "much too long")], 6)
    assert {name: value.dtype for name, value in batch.items()} == {
        "input_ids": torch.int64, "labels": torch.int64, "record_ids": torch.int64,
    }  # fmt: skip
    assert batch["record_ids"].tolist() == [7, 3, 9]
    assert batch["input_ids"].tolist() == [
        [*b"hi", 257, 256, 256, 256],
        [*"grün".encode(), 257],
        [*b"much t"],
    ]
    assert batch["labels"].tolist() == [
        [*b"hi", 257, -100, -100, -100],
        [*"grün".encode(), 257],
        [*b"much t"],
    ]


def test_a_zero_byte_is_text_and_not_padding():
    batch = ddp.tiny_collator([(0, "\0\0")], 4)
    assert batch["labels"].tolist() == [[0, 0, 257, -100]]


# The model


def test_the_members_and_shapes_that_others_build_on_are_there():
    model = model_of()
    assert isinstance(model.token_emb, nn.Embedding) and isinstance(model.encoder, nn.Module)
    assert isinstance(model.encoder, nn.TransformerEncoder) and model.encoder.num_layers == 1
    assert tuple(model.token_emb.weight.shape) == (258, 64)
    assert model.pos_emb.weight.shape[1] == 64
    assert isinstance(model.norm, nn.LayerNorm)
    assert (model.lm_head.in_features, model.lm_head.out_features) == (64, 258)
    ids = torch.randint(0, 256, (3, 10))
    assert model.logits(ids).shape == (3, 10, 258)
    assert model(ids, ids).shape == ()


def test_the_attention_mask_is_true_above_the_diagonal():
    model, masks = model_of(), []
    forward = model.encoder.forward

    def watched(hidden, mask=None, **options):
        masks.append(mask)
        assert hidden.shape == (2, 5, 64)
        return forward(hidden, mask=mask, **options)

    model.encoder.forward = watched
    model.logits(torch.zeros(2, 5, dtype=torch.int64))
    (mask,) = masks
    assert mask.dtype == torch.bool
    assert mask.tolist() == [[j > i for j in range(5)] for i in range(5)]


@pytest.mark.parametrize("training", [True, False])
def test_changing_a_later_token_never_changes_an_earlier_prediction(training):
    model = model_of(d_model=32, layers=2, seq_len=16).train(training)
    torch.manual_seed(1)
    ids = torch.randint(0, 256, (2, 16))
    before = model.logits(ids)
    for position in range(1, 16):
        other = ids.clone()
        other[:, position:] = torch.randint(0, 258, (2, 16 - position))
        other[:, position] = (ids[:, position] + 1) % 256
        after = model.logits(other)
        assert torch.equal(after[:, :position], before[:, :position])
        assert not torch.equal(after[:, position], before[:, position])


@pytest.mark.parametrize("shape", [{}, {"d_model": 128, "layers": 4, "seq_len": 32}], ids=str)
def test_the_first_loss_is_that_of_a_guess(shape):
    model = model_of(**shape)
    loss = loss_of(model, batch_of(*TEXTS, seq_len=shape.get("seq_len", 64)))
    assert loss.item() == pytest.approx(math.log(258), abs=0.15)


def test_the_loss_is_the_cross_entropy_of_the_next_byte():
    model, batch = model_of(), batch_of(*TEXTS)
    logits = model.logits(batch["input_ids"])
    expected = F.cross_entropy(
        logits[:, :-1].reshape(-1, 258), batch["labels"][:, 1:].reshape(-1), ignore_index=-100
    )
    assert loss_of(model, batch).item() == pytest.approx(expected.item(), abs=1e-6)


@pytest.mark.parametrize("i", range(len(TEXTS)))
def test_padding_and_neighbours_do_not_change_the_loss_of_a_sample(i):
    model, batch = model_of(layers=2), batch_of(*TEXTS)
    length = len(TEXTS[i].encode()) + 1
    alone = batch_of(TEXTS[i], seq_len=length)  # no padding at all
    assert ddp.PAD not in alone["input_ids"]
    others = torch.arange(len(TEXTS)) != i
    batch["labels"][others] = -100
    expected = loss_of(model, alone).item()
    assert loss_of(model, batch).item() == pytest.approx(expected, abs=1e-5)


def test_a_batch_without_labels_has_loss_0_and_no_gradient():
    model, batch = model_of(), batch_of("abc")
    loss = model(batch["input_ids"], torch.full_like(batch["labels"], -100))
    loss.backward()
    assert loss.item() == 0
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())


def test_the_weights_digest_depends_on_every_name_and_value():
    model = model_of(d_model=8, heads=2, seq_len=4)
    digest = ddp.parameter_digest(model)
    assert digest == ddp.parameter_digest(model_of(d_model=8, heads=2, seq_len=4))
    for parameter in model.parameters():
        with torch.no_grad():
            value = float(parameter.flatten()[-1])
            parameter.flatten()[-1] = math.nextafter(value, 10) + 1e-6
            assert ddp.parameter_digest(model) != digest
            parameter.flatten()[-1] = value
        assert ddp.parameter_digest(model) == digest
    layers = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    one, two = nn.ModuleDict({"a": layers[0]}), nn.ModuleDict({"b": layers[0]})
    assert ddp.parameter_digest(one) != ddp.parameter_digest(two)
    frozen = nn.ModuleDict({"a": layers[0], "z": layers[1].requires_grad_(False)})
    assert ddp.parameter_digest(frozen) == ddp.parameter_digest(one)


# Optimizer and learning rate


def test_weight_decay_pulls_on_matrices_and_on_nothing_else():
    model = model_of(layers=2)
    optimizer = ddp.build_optimizer(model, settings_of("--weight-decay", 0.5))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups
             for p in group["params"]}  # fmt: skip
    assert len(decay) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        assert decay[id(parameter)] == (0.5 if parameter.ndim >= 2 else 0), name
    assert 0 in decay.values() and 0.5 in decay.values()


def rates(*flags: object, updates: int = 100) -> list[float]:
    settings = settings_of("--lr", 1e-2, *flags)
    return [ddp.learning_rate(update, settings, updates) for update in range(updates)]


def test_the_learning_rate_warms_up_and_falls_as_asked():
    assert rates() == [1e-2] * 100
    warm = rates("--warmup-steps", 10)
    assert warm[:10] == pytest.approx([1e-3 * (i + 1) for i in range(10)])
    assert warm[10:] == [1e-2] * 90
    for schedule in ("linear", "cosine"):
        trace = rates("--schedule", schedule, "--warmup-steps", 10)
        assert trace[:10] == pytest.approx(warm[:10])
        assert max(trace) == pytest.approx(1e-2)
        assert trace[9:] == sorted(trace[9:], reverse=True)
        assert 0 < trace[-1] < 2e-4
        assert trace[55] == pytest.approx(0.5e-2, rel=0.02)  # half-way
    assert all(rate > 0 for rate in rates("--schedule", "cosine", "--warmup-steps", 200))


def test_the_learning_rate_of_a_run_does_not_follow_the_micro_batches(tmp_path):
    flags = ("--max-steps", 12, "--log-every", 1, "--schedule", "cosine", "--warmup-steps", 3)
    traces = []
    for accumulation in (1, 4):
        folder = tmp_path / str(accumulation)
        train_here(folder, *flags, "--batch-size", 2, "--grad-accum", accumulation)
        traces.append([row["lr"] for row in metrics(folder) if "lr" in row])
    assert traces[0] == traces[1] == rates_of_run(12)


def rates_of_run(updates: int) -> list[float]:
    settings = settings_of("--schedule", "cosine", "--warmup-steps", 3)
    return [ddp.learning_rate(update, settings, updates) for update in range(updates)]


# The training step


def step(model, batches: list[dict], *flags: object, rate: float = 1.0) -> ddp.StepResult:
    """One update by plain gradient descent, so that the weights move by rate × gradient."""
    settings = settings_of("--cpu", *flags)
    settings.precision = "fp32"
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    scaler = torch.amp.GradScaler("cuda", enabled=False)
    return ddp.training_step(model, optimizer, scaler, batches, ddp.Launch(), settings)


def snapshot(model) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def moved(before: list[torch.Tensor], model) -> list[torch.Tensor]:
    return [a - b.detach() for a, b in zip(before, model.parameters(), strict=True)]


def true_gradient(model, texts: list[str]) -> list[torch.Tensor]:
    """Of the mean over all valid tokens of the texts in one batch."""
    return list(torch.autograd.grad(loss_of(model, batch_of(*texts)), list(model.parameters())))


def norm_of(tensors: list[torch.Tensor]) -> float:
    return math.sqrt(sum(float(t.double().pow(2).sum()) for t in tensors))


MICRO_BATCHES = [["a", "No"], ["ü" * 31], ["It is.", "the ranks meet"], ["x"]]


def test_a_step_follows_the_mean_over_all_tokens_and_shows_its_norm_and_loss():
    model = model_of()
    texts = [text for micro_batch in MICRO_BATCHES for text in micro_batch]
    gradient, loss = true_gradient(model, texts), loss_of(model, batch_of(*texts)).item()
    before = snapshot(model)
    batches = [batch_of(*micro_batch) for micro_batch in MICRO_BATCHES]
    result = step(model, batches, "--batch-size", 2, "--grad-accum", 4, "--clip", 0)
    assert result.loss == pytest.approx(loss, abs=1e-6)
    # EOS for the first byte; a text is learned as a whole.
    assert result.tokens == result.learned == sum(len(text.encode()) for text in texts)
    assert result.grad_norm == pytest.approx(norm_of(gradient), rel=1e-5)
    for a, b in zip(moved(before, model), gradient, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


def test_four_micro_batches_give_the_step_of_one_batch_of_all():
    texts = ["a", "longer than that", "ü" * 31, "It is.", "the ranks meet", "x", "yes", "no"]
    one, four = model_of(), model_of()
    start = snapshot(one)
    step(one, [batch_of(*texts)], "--batch-size", 8)
    batches = [batch_of(*texts[i : i + 2]) for i in range(0, 8, 2)]
    step(four, batches, "--batch-size", 2, "--grad-accum", 4)
    for a, b in zip(moved(start, one), moved(start, four), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


def test_clipping_shortens_the_global_gradient_and_shows_its_true_length():
    model = model_of()
    gradient = true_gradient(model, TEXTS)
    before = snapshot(model)
    result = step(model, [batch_of(*TEXTS)], "--clip", 0.01)
    assert result.grad_norm == pytest.approx(norm_of(gradient), rel=1e-5)
    assert result.grad_norm > 0.1
    change = moved(before, model)
    assert norm_of(change) == pytest.approx(0.01, rel=1e-3)
    for a, b in zip(change, gradient, strict=True):
        torch.testing.assert_close(a, b * (0.01 / norm_of(gradient)), atol=1e-7, rtol=1e-3)


def test_a_step_leaves_no_gradient_for_the_next_one():
    model = model_of()
    step(model, [batch_of(*TEXTS)])
    gradient, before = true_gradient(model, ["another"]), snapshot(model)
    step(model, [batch_of("another")], "--clip", 0)
    for a, b in zip(moved(before, model), gradient, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_stops_before_it_spoils_the_weights(value):
    model = model_of()
    with torch.no_grad():
        model.lm_head.weight[0, 0] = value
    before = snapshot(model)
    with pytest.raises(ddp.Diverged):
        step(model, [batch_of(*TEXTS)])
    for a, b in zip(before, model.parameters(), strict=True):
        assert torch.equal(a.nan_to_num(), b.detach().nan_to_num())


# Validation and sampling


def validation(model, texts: list[str], batch_size: int) -> float:
    loader = DataLoader(
        ddp.IndexedTextDataset(texts), batch_size=batch_size,
        collate_fn=functools.partial(ddp.tiny_collator, seq_len=64), generator=torch.Generator(),
    )  # fmt: skip
    settings = settings_of("--cpu", "--batch-size", batch_size)
    settings.precision = "fp32"
    return ddp.evaluate(model, loader, ddp.Launch(), settings)


@pytest.mark.parametrize("size", [1, 5, 7])
def test_the_validation_loss_does_not_depend_on_the_batch_size(size):
    model = model_of(dropout=0.5)
    texts = [text * (i + 1) for i, text in enumerate(["a", "bc", "def", "g", "hi", "jkl", "m"])]
    values = [validation(model, texts[:size], batch_size) for batch_size in (1, 3, 8)]
    expected = loss_of(model.eval(), batch_of(*texts[:size])).item()
    assert values == pytest.approx([expected] * 3, abs=1e-6)


def test_watching_a_model_changes_neither_its_mode_nor_the_random_numbers_of_the_training():
    model = model_of(dropout=0.5).train()
    state = torch.get_rng_state()
    validation(model, TEXTS, 2)
    assert model.training
    text = ddp.generate(model, "The ", 20, seed=3)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(5)
    assert ddp.generate(model, "The ", 20, seed=3) == text
    assert ddp.generate(model, "The ", 20, seed=4) != text


def test_a_prompt_longer_than_the_window_is_continued():
    text = ddp.generate(model_of(seq_len=8), "A prompt of more than 8 bytes: ü", 12, seed=0)
    assert 0 < len(text) <= 12


def test_text_beyond_the_window_does_not_come_from_a_position_that_was_never_trained():
    model, seen = model_of(seq_len=8), []
    model.encoder.register_forward_hook(lambda _, inputs, output: seen.append(output.shape[1]))
    labels = torch.randint(0, 256, (2, 8))
    model(labels, labels).backward()
    (trained,) = model.pos_emb.weight.grad.abs().sum(1).nonzero(as_tuple=True)
    ddp.generate(model, "The ", 12, seed=0)
    assert max(seen[1:]) == len(trained) == 7


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_written_out_layer_computes_what_pytorchs_layer_computes(dropout):
    torch.manual_seed(0)
    arguments = (32, 4, 128, dropout, "gelu")
    options = {"batch_first": True, "norm_first": True, "bias": False}
    plain = torch.nn.TransformerEncoderLayer(*arguments, **options)
    ours = ddp.CausalLayer(*arguments, **options)
    ours.load_state_dict(plain.state_dict())
    hidden = torch.randn(3, 10, 32)
    mask = torch.ones(10, 10, dtype=torch.bool).triu(1)
    for layer in (plain, ours):
        layer.train(dropout == 0.0)  # masks of dropout are drawn in another order
    expected = plain(hidden, src_mask=mask, is_causal=True)
    assert torch.allclose(ours(hidden), expected, atol=1e-6)
