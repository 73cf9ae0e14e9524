"""Invariants 1 to 4: the numbers do not depend on how the work is divided."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
from conftest import (
    ROOT,
    largest_difference,
    losses,
    metrics,
    train,
    weights,
)


@pytest.fixture(scope="module")
def uneven_lines(tmp_path_factory):
    """101 lines of very different lengths."""
    random.seed(0)
    lengths = [random.choice([3, 5, 9, 30, 70, 120]) for _ in range(101)]
    lines = ["".join(random.choice("abcdefgh ") for _ in range(n)) + "x\n" for n in lengths]
    path = tmp_path_factory.mktemp("corpus") / "uneven.txt"
    path.write_text("".join(lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def one_rank_of_eight(uneven_lines, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "one"
    train(1, folder, "--corpus-file", uneven_lines, "--batch-size", 8, *LONG)
    return folder


LONG = ("--max-steps", 20, "--log-every", 1, "--eval-every", 10)


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
        assert a.get("lr") == b.get("lr")
        assert a.get("tokens") == b.get("tokens")


def test_starting_loads_no_compiler_and_the_optimizer_is_still_pytorchs():
    code = """
import sys, torch
import llm_ddp_parallel_training as ddp

torch.manual_seed(0)
ours, theirs = (ddp.TinyCausalTransformer() for _ in range(2))
theirs.load_state_dict(ours.state_dict())
lean = ddp.build_optimizer(ours, ddp.parse_settings(["--cpu"]))

def train(model, optimizer):
    for k in range(3):
        ids = torch.arange(64).roll(k)[None]
        model(ids, ids).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.load_state_dict(optimizer.state_dict())
    assert not any(p.grad is not None for p in model.parameters())

train(ours, lean)
assert "torch._dynamo" not in sys.modules, "an import as long as that of torch"
plain = torch.optim.AdamW(
    [{**g, "params": [p]} for g, p in zip(
        [lean.param_groups[0 if p.ndim >= 2 else 1] for p in theirs.parameters()],
        theirs.parameters())]
)
train(theirs, plain)
assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters()))
assert isinstance(lean, torch.optim.AdamW) and lean.param_groups[0]["fused"]
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
