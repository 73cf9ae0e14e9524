"""Splitting a corpus, and cutting samples to windows: no token is lost, none is counted twice."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from corpora import data_of, refusal

import llm_ddp_parallel_training as ddp

# Splits


@pytest.mark.parametrize("size", [1, 2, 3, 10, 99, 1000])
@pytest.mark.parametrize("fraction", [0, 0.1, 0.3, 0.9])
def test_the_validation_split_has_the_asked_size_and_repeats_by_seed(size, fraction):
    held_out = ddp.hold_out(size, fraction, 5)
    assert len(held_out) == min(round(size * fraction), size - 1)
    assert held_out.tolist() == sorted(set(held_out.tolist()))
    assert all(0 <= i < size for i in held_out)
    assert held_out.tolist() == ddp.hold_out(size, fraction, 5).tolist()


def test_another_seed_holds_out_other_samples():
    assert ddp.hold_out(1000, 0.1, 0).tolist() != ddp.hold_out(1000, 0.1, 1).tolist()


def test_training_and_validation_share_no_sample_and_lose_none(tmp_path):
    texts = [f"sample {i}" for i in range(101)]
    built = data_of(tmp_path, "\n".join(texts), "--val-fraction", 0.2)
    train, validation = (
        [part[i] for i in range(len(part))] for part in (built.train, built.validation)
    )
    assert len(validation) == 20
    assert sorted(train + validation) == list(enumerate(texts))  # ids are places in the file


def test_a_document_is_validated_on_its_tail(tmp_path):
    text = "".join(chr(97 + i % 26) for i in range(1000))
    built = data_of(tmp_path, text, "--corpus-format", "document", "--val-fraction", 0.3)
    assert joined(built.train) == text[:700].encode()
    assert joined(built.validation) == text[700:].encode()


# Windows


def windows(dataset) -> list[np.ndarray]:
    """All windows in order, though read backwards: each must stand for itself."""
    items = [dataset[i] for i in reversed(range(len(dataset)))][::-1]
    assert [i for i, _ in items] == list(range(len(dataset)))
    return [tokens for _, tokens in items]


def joined(dataset) -> bytes:
    """The text that windows over one stream cover, each token once."""
    parts = windows(dataset)
    stream = np.concatenate([parts[0][:1], *(tokens[1:] for tokens in parts)])
    return bytes(stream.astype(np.uint8))


TEXTS = [("é" * (i * 7 % 23) + f"x{i}")[: 1 + i % 40] for i in range(200)]


def stream_of(texts: list[str]) -> list[int]:
    return [token for text in texts for token in (*text.encode("utf-8"), ddp.EOS)]


@pytest.mark.parametrize("seq_len", [2, 3, 16, 64, 5000, 100_000])
@pytest.mark.parametrize("form", ["document", "pack"])
def test_every_token_is_predicted_once_by_windows_that_overlap_by_one(tmp_path, seq_len, form):
    flags = ("--pack",) if form == "pack" else ("--corpus-format", "document")
    built = data_of(tmp_path, "\n".join(TEXTS), *flags, "--val-fraction", 0, "--seq-len", seq_len)
    parts = windows(built.train)
    stream = stream_of(TEXTS) if form == "pack" else list("\n".join(TEXTS).encode("utf-8"))
    assert [int(t) for t in parts[0][:1]] + [int(t) for p in parts for t in p[1:]] == stream
    assert all(a[-1] == b[0] for a, b in itertools.pairwise(parts))
    assert all(len(p) == seq_len for p in parts[:-1])
    assert 2 <= len(parts[-1]) <= seq_len


@pytest.mark.parametrize("seq_len", [2, 3, 16, 64])
def test_split_predicts_every_token_of_a_long_sample_once(tmp_path, seq_len):
    flags = ("--overlong", "split", "--val-fraction", 0, "--seq-len", seq_len)
    built = data_of(tmp_path, "\n".join(TEXTS), *flags)
    samples, current = [], []
    for tokens in windows(built.train):
        assert 2 <= len(tokens) <= seq_len
        assert not current or current[-1] == tokens[0]
        current += tokens.tolist() if not current else tokens[1:].tolist()
        if current[-1] == ddp.EOS:
            samples.append(current)
            current = []
    assert not current
    assert samples == [stream_of([text]) for text in TEXTS]


@pytest.mark.parametrize("flags", [("--pack",), ("--overlong", "split")], ids=str)
def test_windows_never_mix_training_and_validation(tmp_path, flags):
    texts = [f"{i:03}" for i in range(300)]
    built = data_of(tmp_path, "\n".join(texts), *flags, "--val-fraction", 0.3, "--seq-len", 9)
    words = [
        bytes(t for w in windows(part) for t in (w if flags[0] != "--pack" else w[1:]) if t < 256)
        for part in (built.train, built.validation)
    ]
    assert len(words[0]) + len(words[1]) == 900 - 2 * (flags[0] == "--pack")  # first of a stream
    held_out = {texts[i] for i in ddp.hold_out(300, 0.3, 0)}
    stream = "".join(text for text in texts if text in held_out)
    assert stream.endswith(words[1].decode()[-60:])
    assert len(held_out) == 90


def test_overlong_samples_are_cut_or_left_out_and_both_counts_are_logged(tmp_path):
    # 137 samples of 26 tokens with EOS, at 8 tokens a sequence: 18 too many in each.
    text = "short\n" * 50 + "abcdefghijklmnopqrstuvwxy\n" * 137
    flags = ("--seq-len", 8, "--val-fraction", 0)
    cut = data_of(tmp_path, text, *flags, "--overlong", "truncate")
    assert len(cut.train) == 187
    assert "137" in cut.summary and f"{137 * 18:,}" in cut.summary
    left = data_of(tmp_path, text, *flags, "--overlong", "drop")
    assert {left.train[i][1] for i in range(len(left.train))} == {"short"}
    assert len(left.train) == 50
    assert "137" in left.summary and f"{137 * 26:,}" in left.summary
    split = data_of(tmp_path, text, *flags, "--overlong", "split")
    assert len(split.train) == 50 + 137 * 4
    assert "137" in split.summary


def test_a_sample_that_just_fits_is_not_overlong(tmp_path):
    summary = data_of(tmp_path, "1234567\n1234567\n", "--seq-len", 8, "--overlong", "drop").summary
    assert "longer" not in summary


def test_nothing_left_after_drop_is_refused_with_the_flag_to_change(tmp_path):
    message = refusal(tmp_path, "long line\n" * 3, "--overlong", "drop", "--seq-len", 4)
    assert "--seq-len 4" in message and "3 samples" in message
