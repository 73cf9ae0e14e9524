"""labs/ddp_in_100_lines.py: copied, edited and launched as a learner would, it stays exact."""

from __future__ import annotations

import ast
import dataclasses
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, TORCHRUN, largest_difference, run_command, settings_of
from torch import nn
from torch.utils.data import DistributedSampler

import llm_ddp_parallel_training as reference

SOURCE = (ROOT / "labs" / "ddp_in_100_lines.py").read_text("utf-8")
SIZE = 31  # a prime: neither ranks nor batches nor accumulation divide it
GLOBAL_BATCH, EPOCHS, LEARNING_RATE, CLIP, SEED = 12, 2, 1e-2, 0.6, 1
LAYOUTS = [(1, 12, 1), (2, 6, 1), (3, 4, 1), (1, 4, 3), (2, 2, 3)]  # ranks, batch, accumulation


def edited(source: str, *changes: tuple[str, str]) -> str:
    """The source with each old text, which must be there once, replaced by the new one."""
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


@dataclasses.dataclass
class Ran:
    """What a run printed, in order, and the checkpoint it left."""

    losses: list[float]
    validation: list[float]
    saved: dict


def run(
    folder: Path, ranks: int, batch: int, accumulate: int, *changes: tuple[str, str],
    epochs: int = EPOCHS, dropout: float = 0.0, train: str = f"10:{10 + SIZE}", status: int = 0,
) -> Ran:  # fmt: skip
    """Runs a copy with these settings in `folder`; it prints losses with all their digits."""
    source = edited(
        SOURCE.replace(":.6f}", ":.17g}"),
        ("= 3, 1e-2, 1.0\n", f"= {epochs}, {LEARNING_RATE}, {CLIP}\n"),
        ("BATCH, ACCUMULATE = 4, 2 ", f"BATCH, ACCUMULATE = {batch}, {accumulate} "),
        ("DROPOUT, SEED = 0.1, 1 ", f"DROPOUT, SEED = {dropout}, {SEED} "),
        ("SAMPLES[10:100], SAMPLES[:10]", f"SAMPLES[{train}], SAMPLES[:9]"),
        *changes,
    )
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(source, encoding="utf-8")
    start = [sys.executable] if ranks == 1 else [*TORCHRUN, f"--nproc_per_node={ranks}"]
    finished = run_command([*start, "train.py"], cwd=folder)
    assert finished.status == status, finished.err
    return Ran(
        [float(loss) for loss in re.findall(r"^epoch \d+: loss (.+)$", finished.out, re.M)],
        [
            float(loss)
            for loss in re.findall(r"^epoch \d+: validation loss (.+)$", finished.out, re.M)
        ],
        torch.load(folder / "ddp_in_100_lines.pt", weights_only=True),
    )


class AsReference(nn.Module):
    """The default model of the 100 lines, called as the reference calls its models."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.logits = nn.Sequential(nn.Embedding(256, 64), nn.Dropout(0), nn.Linear(64, 256))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.logits(input_ids).flatten(0, 1), labels[:, 1:].flatten())


@pytest.fixture(scope="module")
def expected() -> list[float]:
    """The losses of the reference's training_step on the same samples, in one process."""
    from labs import ddp_in_100_lines as hundred

    samples = hundred.SAMPLES[10 : 10 + SIZE]
    counts = [int((targets != hundred.IGNORE).sum()) for _, targets in samples]
    assert max(counts) > 20 * min(counts)  # samples of very different lengths
    model, losses = AsReference(), []
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    settings = settings_of("--batch-size", GLOBAL_BATCH, "--clip", CLIP)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for epoch in range(EPOCHS):
        order = DistributedSampler(range(-(-SIZE // GLOBAL_BATCH) * GLOBAL_BATCH), 1, 0, seed=SEED)
        order.set_epoch(epoch)
        for indices in torch.tensor(list(order)).split(GLOBAL_BATCH):
            inputs, targets = zip(*(samples[i] for i in indices if i < SIZE))
            labels = F.pad(torch.stack(targets), (1, 0), value=reference.IGNORE)
            batch = {"input_ids": torch.stack(inputs), "labels": labels}
            step = reference.training_step(
                model, optimizer, scaler, [batch], reference.Launch(), settings
            )
            losses.append(step.loss)
    return losses


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Ran]:
    """One run for each layout of the same global batch."""
    folder = tmp_path_factory.mktemp("layouts")
    return [run(folder / f"{number}", *layout) for number, layout in enumerate(LAYOUTS)]


def test_any_number_of_ranks_and_micro_batches_has_the_losses_of_the_reference(runs, expected):
    assert len(expected) == 6
    for ran in runs:
        assert ran.losses == pytest.approx(expected, rel=1e-6)


def test_validation_and_final_weights_do_not_depend_on_the_number_of_ranks(runs):
    for ran in runs[1:]:
        assert ran.validation == pytest.approx(runs[0].validation, rel=1e-6)
        assert largest_difference(ran.saved["model"], runs[0].saved["model"]) < 1e-5


FAULTS = {
    "mean of means": [
        ("loss.backward()", "(loss / max(1, (targets != IGNORE).sum()) / ACCUMULATE).backward()"),
        ("*= RANKS / n", "*= 1"),
    ],
    "order of the first epoch in every epoch": [("sampler.set_epoch(epoch)", "pass")],
    "repeated samples count": [("[EMPTY] *", "TRAIN[:1] *")],
    "sum of the ranks' gradients missing": [("j < ACCUMULATE", "j <= ACCUMULATE")],
    "average of the ranks' gradients not undone": [("RANKS / n", "1 / n")],
    "not clipped": [("model.parameters(), CLIP)", "model.parameters(), 1e9)")],
    "no shuffling": [("RANK, seed=SEED)", "RANK, seed=SEED, shuffle=False)")],
    "loss of rank 0": [
        ("if RANKS > 1:\n        distributed.all_reduce(sums)", "if False:\n        pass")
    ],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_classic_bug_would_show_in_the_losses(fault, tmp_path, expected):
    ran = run(tmp_path, 2, 2, 3, *FAULTS[fault])
    print(fault, [a / b - 1 for a, b in zip(ran.losses, expected)])
    assert ran.losses != pytest.approx(expected, rel=1e-4)


def test_validation_with_repeated_samples_would_show(runs, tmp_path):
    repeat = (
        "sampler=range(RANK, len(VALIDATION), RANKS)",
        "sampler=DistributedSampler(VALIDATION, RANKS, RANK)",
    )
    ran = run(tmp_path, 2, 2, 3, repeat)
    assert ran.losses == pytest.approx(runs[-1].losses, rel=1e-6)
    assert ran.validation != pytest.approx(runs[-1].validation, rel=1e-4)
