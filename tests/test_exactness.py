"""Invariants 1 to 4: the numbers do not depend on how the work is divided."""

from __future__ import annotations

import random

import pytest
from conftest import Finished, largest_difference, losses, metrics, weights
from quick import here, job


@pytest.fixture(scope="module")
def uneven_lines(tmp_path_factory):
    """101 lines of very different lengths."""
    random.seed(0)
    lengths = [random.choice([3, 5, 9, 30, 70, 120]) for _ in range(101)]
    lines = ["".join(random.choice("abcdefgh ") for _ in range(n)) + "x\n" for n in lengths]
    path = tmp_path_factory.mktemp("corpus") / "uneven.txt"
    path.write_text("".join(lines), encoding="utf-8")
    return path


LONG = ("--max-steps", 20, "--log-every", 1, "--eval-every", 10)


def train(ranks: int, folder, *flags: object) -> Finished:
    """Trains to the end; the first rank's output."""
    flags = ("--output-dir", folder, *flags)
    endings = [here(*flags)] if ranks == 1 else job(ranks, *flags)
    assert [ended.status for ended in endings] == [0] * ranks, endings
    return endings[0]


@pytest.fixture(scope="module")
def one_rank_of_eight(uneven_lines, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "one"
    train(1, folder, "--corpus-file", uneven_lines, "--batch-size", 8, *LONG)
    return folder


@pytest.mark.parametrize(
    ("ranks", "batch", "accumulation"), [(2, 4, 1), (1, 4, 2), (2, 2, 2)], ids=str
)
def test_the_same_global_batch_gives_the_same_losses_and_weights(
    uneven_lines, one_rank_of_eight, tmp_path, ranks, batch, accumulation
):
    flags = ("--batch-size", batch, "--grad-accum", accumulation)
    train(ranks, tmp_path / "run", "--corpus-file", uneven_lines, *flags, *LONG)
    expected = losses(one_rank_of_eight)
    assert len(expected) == 20
    assert losses(tmp_path / "run") == pytest.approx(expected, abs=1e-6)
    difference = largest_difference(weights(tmp_path / "run"), weights(one_rank_of_eight))
    assert difference <= 1e-6
    for a, b in zip(metrics(tmp_path / "run"), metrics(one_rank_of_eight), strict=True):
        assert a.get("val_loss") == pytest.approx(b.get("val_loss"), abs=1e-6)
        for name in ("step", "lr", "tokens", "learned_tokens"):
            assert a.get(name) == b.get(name)
