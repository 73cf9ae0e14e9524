"""labs/ddp_in_100_lines.py: copied, edited and launched as a learner would, it stays exact."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import os
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, largest_difference, run_command, settings_of
from quick import job
from torch import nn
from torch.utils.data import DistributedSampler

import llm_ddp_parallel_training as reference

SCRIPT = ROOT / "labs" / "ddp_in_100_lines.py"
SOURCE = SCRIPT.read_text("utf-8")
CHECKPOINT = "ddp_in_100_lines.pt"
SIZE = 31  # a prime: neither ranks nor batch nor accumulation divide it
GLOBAL_BATCH, EPOCHS, LEARNING_RATE, CLIP, SEED = 12, 2, 1e-2, 0.5, 1
LAYOUTS = [(1, 12, 1), (2, 6, 1), (3, 4, 1), (1, 4, 3), (2, 2, 3)]  # ranks, batch, accumulation
ACCUMULATING = 4  # the last of them
SPLIT, SMALL = "SAMPLES[10:100], SAMPLES[:10]", f"SAMPLES[10:{10 + SIZE}], SAMPLES[:9]"


def main(arguments: list[str]) -> None:
    """What each rank of a job does, see `quick.job`: it runs the copy that the last flag names."""
    copy = Path(arguments[-1])
    os.chdir(copy.parent)
    torch.set_num_threads(1)
    runpy.run_path(copy.name, run_name="__main__")


def edited(source: str, *changes: tuple[str, str]) -> str:
    """The source with each old text, which must be there once, replaced by the new one."""
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


@dataclasses.dataclass
class Ran:
    """What a run printed: one number an update, one an epoch; and the checkpoint it left."""

    out: str
    losses: list[float]
    validation: list[float]
    saved: dict


def run(
    folder: Path, ranks: int = 2, batch: int = 2, accumulate: int = 3, *changes: tuple[str, str],
    epochs: int = EPOCHS, dropout: float = 0.0, split: str = SMALL, status: int = 0,
) -> Ran:  # fmt: skip
    """Runs an edited copy in `folder`, which may hold the checkpoint of an earlier one."""
    source = edited(
        SOURCE.replace(":.6f}", ":.17g}"),  # losses with all their digits
        ("= 3, 1e-2, 1.0\n", f"= {epochs}, {LEARNING_RATE}, {CLIP}\n"),
        ("BATCH, ACCUMULATE = 4, 2 ", f"BATCH, ACCUMULATE = {batch}, {accumulate} "),
        ("DROPOUT, SEED = 0.1, 1 ", f"DROPOUT, SEED = {dropout}, {SEED} "),
        (SPLIT, split),
        *changes,
    )
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(source, encoding="utf-8")
    endings = job(ranks, folder / "train.py", module=__name__, CUDA_VISIBLE_DEVICES="")
    assert [ending.status for ending in endings] == [status] * ranks, endings
    assert not any(ending.out for ending in endings[1:])  # rank 0 speaks for all
    out = endings[0].out

    def printed(what: str) -> list[float]:
        return [float(loss) for loss in re.findall(rf"^epoch \d+: {what} (.+)$", out, re.M)]

    saved = torch.load(folder / CHECKPOINT, weights_only=True)
    return Ran(out, printed("loss"), printed("validation loss"), saved)


class AsReference(nn.Module):
    """The model of the hundred lines, with the signature of the reference's models."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.logits = nn.Sequential(nn.Embedding(256, 64), nn.Dropout(0), nn.Linear(64, 256))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.logits(input_ids).flatten(0, 1), labels[:, 1:].flatten())


@pytest.fixture(scope="module")
def expected() -> list[float]:
    """The losses of the reference's training_step on the same samples, in one process."""
    samples = runpy.run_path(str(SCRIPT))["SAMPLES"][10 : 10 + SIZE]
    counts = [int((targets != reference.IGNORE).sum()) for _, targets in samples]
    assert max(counts) > 20 * min(counts)  # samples of very different lengths
    model, losses = AsReference(), []
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    settings = settings_of("--batch-size", GLOBAL_BATCH, "--clip", CLIP, "--precision", "fp32")
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    places = -(-SIZE // GLOBAL_BATCH) * GLOBAL_BATCH  # rounded up to whole updates
    for epoch in range(EPOCHS):
        order = DistributedSampler(range(places), num_replicas=1, rank=0, seed=SEED)
        order.set_epoch(epoch)
        for update in torch.tensor(list(order)).split(GLOBAL_BATCH):
            inputs, targets = zip(*(samples[i] for i in update if i < SIZE))
            labels = F.pad(torch.stack(targets), (1, 0), value=reference.IGNORE)
            batch = {"input_ids": torch.stack(inputs), "labels": labels}
            losses.append(
                reference.training_step(
                    model, optimizer, scaler, [batch], reference.Launch(), settings
                ).loss
            )
    return losses


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Ran]:
    """One run for each layout of the same global batch."""
    folder = tmp_path_factory.mktemp("layouts")
    return [run(folder / str(number), *layout) for number, layout in enumerate(LAYOUTS)]


# --- Exactness ---


def test_any_number_of_ranks_and_micro_batches_has_the_losses_of_the_reference(runs, expected):
    assert len(expected) == EPOCHS * 3
    for ran in runs:
        assert ran.losses == pytest.approx(expected, rel=1e-6)


def test_validation_and_final_weights_do_not_depend_on_the_number_of_ranks(runs):
    for ran in runs[1:]:
        assert ran.validation == pytest.approx(runs[0].validation, rel=1e-6)
        assert largest_difference(ran.saved["model"], runs[0].saved["model"]) < 1e-6


FAULTS = {
    "mean of means": [
        ("loss.backward()", "(loss / max(1, (targets != IGNORE).sum()) / ACCUMULATE).backward()"),
        ("*= RANKS / n", "*= 1"),
    ],
    "set_epoch forgotten": [("sampler.set_epoch(epoch)", "pass")],
    "repeated samples count": [("[EMPTY] *", "TRAIN[:1] *")],
    "ranks never synchronized": [("j < ACCUMULATE", "j <= ACCUMULATE")],
    "first micro-batch synchronized": [("j < ACCUMULATE", "j > 1")],
    "DDP's average not undone": [("*= RANKS / n", "*= 1 / n")],
    "gradients not clipped": [("model.parameters(), CLIP)", "model.parameters(), 1e9)")],
    "loss of rank 0": [("        distributed.all_reduce(sums)", "        pass")],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_classic_bug_would_show_in_the_losses(fault, tmp_path, expected):
    ran = run(tmp_path, *LAYOUTS[ACCUMULATING], *FAULTS[fault])
    assert len(ran.losses) == len(expected)
    assert ran.losses != pytest.approx(expected, rel=1e-5)


def test_a_validation_that_repeats_samples_would_show(runs, tmp_path):
    own, shared = (
        "range(RANK, len(VALIDATION), RANKS)",
        "DistributedSampler(VALIDATION, RANKS, RANK)",
    )
    ran = run(tmp_path, *LAYOUTS[ACCUMULATING], (f"sampler={own}", f"sampler={shared}"))
    assert ran.losses == runs[ACCUMULATING].losses
    assert ran.validation != pytest.approx(runs[0].validation, rel=1e-5)


def test_fewer_samples_than_ranks(tmp_path):
    """One sample to train on, one to validate on: the second rank has neither."""
    one, two = (
        run(tmp_path / str(ranks), ranks, 2 // ranks, 1, split="SAMPLES[12:13], SAMPLES[:1]")
        for ranks in (1, 2)
    )
    assert len(one.losses) == EPOCHS
    assert one.losses == pytest.approx(two.losses, rel=1e-6)
    assert one.validation == pytest.approx(two.validation, rel=1e-6)


# --- Going on, seeds, files ---


def test_a_run_stopped_after_an_epoch_and_resumed_is_the_uninterrupted_one(tmp_path):
    whole = run(tmp_path / "whole", epochs=3, dropout=0.3)
    first = run(tmp_path / "parts", epochs=1, dropout=0.3)
    rest = run(tmp_path / "parts", epochs=3, dropout=0.3)
    assert first.losses + rest.losses == whole.losses
    assert first.validation + rest.validation == whole.validation
    assert largest_difference(rest.saved["model"], whole.saved["model"]) == 0
    for number, state in whole.saved["optimizer"]["state"].items():
        for name, value in state.items():
            assert torch.equal(rest.saved["optimizer"]["state"][number][name], value)
    assert rest.saved["epochs"] == 3
    again = run(tmp_path / "parts", epochs=3, dropout=0.3)
    assert again.losses == []  # nothing is left to do, and nothing is lost


def test_a_kill_while_saving_leaves_the_checkpoint_as_it_was(tmp_path):
    run(tmp_path, 1, epochs=1)
    before = hashlib.sha256((tmp_path / CHECKPOINT).read_bytes()).digest()
    kill = ("            os.replace(", "            os._exit(9)\n            os.replace(")
    run(tmp_path, 1, 2, 3, kill, epochs=2, status=9)
    assert hashlib.sha256((tmp_path / CHECKPOINT).read_bytes()).digest() == before
    assert run(tmp_path, 1, epochs=2).saved["epochs"] == 2


def test_the_checkpoint_holds_the_bare_model(runs):
    for ran in runs:
        assert ran.saved["model"].keys() == AsReference().logits.state_dict().keys()


def test_ranks_begin_with_equal_weights_and_draw_different_dropout_in_every_epoch(tmp_path):
    """Also without DDP, which would send rank 0's weights to all."""
    weights = "    optimizer = torch.optim"
    note = "open(f'{what}{RANK}', 'a').write(f'{number}\\n')"
    draw = "RANK)  # but another dropout on each rank\n"
    changes = [
        (
            weights,
            f"    what, number = 'weights', float(bare[2].weight.sum())\n    {note}\n{weights}",
        ),
        (draw, f"{draw}        what, number = 'draws', float(torch.rand(()))\n        {note}\n"),
    ]
    run(tmp_path, 2, 2, 3, *changes)
    lines = {path.name: path.read_text().split() for path in tmp_path.glob("*[01]")}
    assert lines["weights0"] == lines["weights1"]
    assert len({*lines["draws0"], *lines["draws1"]}) == 2 * EPOCHS


def test_another_model_and_frozen_parameters_in_the_marked_place(tmp_path):
    old = "nn.Sequential(nn.Embedding(256, 64), nn.Dropout(DROPOUT), nn.Linear(64, 256))"
    assert SOURCE.index("# YOUR MODEL") < SOURCE.index(old)
    new = "nn.Sequential(nn.Embedding(256, 8).requires_grad_(False), nn.Linear(8, 256))"
    one, two = (run(tmp_path / str(ranks), ranks, 4 // ranks, 1, (old, new)) for ranks in (1, 2))
    assert one.losses == pytest.approx(two.losses, rel=1e-6)
    assert one.losses[-1] < one.losses[0]


def test_another_dataset_and_classes_instead_of_tokens(tmp_path):
    """Images, say: one target a sample; the Dataset is no list."""
    old = SOURCE[SOURCE.index("LINES = ") : SOURCE.index("TRAIN, VALIDATION")]
    new = """\
INPUTS = torch.randn(40, 5, generator=torch.Generator().manual_seed(3))
SAMPLES = torch.utils.data.TensorDataset(INPUTS, (INPUTS.sum(1) > 0).long())
"""
    model = "nn.Sequential(nn.Embedding(256, 64), nn.Dropout(DROPOUT), nn.Linear(64, 256))"
    part = "torch.utils.data.Subset(SAMPLES, range({}))"
    changes = [(old, new), (model, "nn.Linear(5, 2)")]
    one, two = (
        run(
            tmp_path / str(ranks), ranks, 4 // ranks, 1, *changes,
            split=f"{part.format('10, 33')}, {part.format('7')}",
        )
        for ranks in (1, 2)
    )  # fmt: skip
    assert one.losses == pytest.approx(two.losses, rel=1e-6)
    assert one.validation == pytest.approx(two.validation, rel=1e-6)


# --- To copy, and to read ---


def test_the_documented_commands_train_and_save(tmp_path):
    """One process, and the launcher with its two, with the settings of the file."""
    (tmp_path / "labs").mkdir()
    shutil.copy(SCRIPT, tmp_path / "labs")
    commands = [line.split() for line in ast.get_docstring(ast.parse(SOURCE)).splitlines()]
    commands = [words for words in commands if words[:1] == ["python"]]
    assert len(commands) == 2
    for words in commands:
        finished = run_command([sys.executable, *words[1:]], cwd=tmp_path)
        assert finished.status == 0, finished.err
        lines = finished.out.splitlines()
        assert len([line for line in lines if "validation" in line]) == 3
        assert float(lines[-1].split()[-1]) < float(lines[0].split()[-1]) - 1
        (tmp_path / CHECKPOINT).unlink()
    assert [path.name for path in tmp_path.iterdir()] == ["labs"]


def test_it_is_short_plain_and_stands_alone():
    lines = SOURCE.splitlines()
    assert len(lines) <= 100
    assert max(map(len, lines)) <= 100
    assert not re.search(r"fmt: ?(off|skip)|noqa|;\n", SOURCE)
    tree = ast.parse(SOURCE)
    imported = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module]
        )
    }
    assert imported <= {*sys.stdlib_module_names, "torch"}


def test_every_place_where_ranks_meet_is_marked():
    meeting = r"init_process_group\(|DistributedDataParallel\(|\.backward\(|all_reduce\(|barrier\("
    lines = [line for line in SOURCE.splitlines() if re.search(rf"\b{meeting}", line)]
    lines = [line for line in lines if not line.startswith('"""')]
    assert len(lines) == 4
    assert all("# ranks meet" in line for line in lines)
