"""Measured scaling: the arithmetic on made-up measurements, and one real run."""

from __future__ import annotations

import csv
import math
import sys

import numpy as np
import pytest
from conftest import ROOT, Finished, run_command

from labs import scaling

SMALL = ("--batch-size", "4", "--d-model", "32", "--heads", "2")


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> tuple[Finished, list[dict], object]:
    """One real run on one and two ranks: how it ended, scaling.csv, its folder."""
    folder = tmp_path_factory.mktemp("scaling") / "results"
    command = [sys.executable, "-m", "labs.scaling", "--ranks", "1,2", "--rounds", "3",
               "--output-dir", str(folder), *SMALL]  # fmt: skip
    finished = run_command(command, cwd=ROOT, timeout=120)
    assert finished.status == 0, finished.out + finished.err
    with open(folder / "scaling.csv", encoding="utf-8", newline="") as file:
        return finished, list(csv.DictReader(file)), folder


def row(rows: list[dict], what: str, ranks: int) -> dict:
    (found,) = [r for r in rows if (r["scaling"], int(r["ranks"])) == (what, ranks)]
    return {key: float(value) for key, value in found.items() if value and key != "scaling"}


def test_the_table_has_weak_and_strong_scaling_and_independent_processes(measured):
    _, rows, _ = measured
    for what, ranks, batch in (
        ("weak", 1, 4), ("weak", 2, 4), ("independent", 2, 4), ("no_sync", 2, 4),
        ("strong", 1, 8), ("strong", 2, 4),
    ):  # fmt: skip
        found = row(rows, what, ranks)
        assert found["batch_per_rank"] == batch
        assert 0 < found["slowest_round"] <= found["tokens_per_second"] <= found["fastest_round"]
        assert found["efficiency"] == pytest.approx(found["speedup"] / ranks)


def test_a_full_step_of_the_batch_is_what_the_tokens_are_counted_from(measured):
    # The windows of the built-in document are full: 63 predicted tokens in each of 4 sequences.
    found = row(measured[1], "weak", 1)
    # Between slowest and fastest round: on a busy machine they are far apart.
    tokens = [found[which] * found["step_ms"] / 1e3 for which in ("slowest_round", "fastest_round")]
    assert tokens[0] / 1.35 < 4 * 63 < 1.35 * tokens[1]


def test_two_ranks_say_what_was_lost_to_ddp_and_how_uneven_they_were(measured):
    found = row(measured[1], "weak", 2)
    assert 0 < found["of_independent"] < 2
    assert -1 < found["all_reduce_share"] < 1
    assert found["jitter"] >= 0


def test_the_report_says_what_is_shared_and_what_the_prediction_assumes(measured):
    out = measured[0].out
    assert "one memory bus" in out
    assert "2 independent processes reach " in out
    assert "prediction (weak scaling), if" in out
    assert len([line for line in out.splitlines() if "(measured: " in line]) == 2


def test_the_picture_is_a_picture(measured):
    from PIL import Image

    with Image.open(measured[2] / "scaling.png") as picture:
        assert picture.format == "PNG"
        assert picture.width > 1000


class MadeUp:
    """A team whose steps take as long as we say: 8 ms alone, 9 without gradients sent, 12 with."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def call(self, method: str, *arguments) -> list:
        if method == "all_reduce":
            seconds = 2 * (self.ranks - 1) * (1e-4 + arguments[0] / self.ranks / 1e9)
            return [[seconds] * arguments[1]] * self.ranks
        how, batch, count, _ = arguments
        step = {"alone": 0.008, "no_sync": 0.009, "ddp": 0.012}[how] * batch / 8
        return [{"seconds": [step] * count, "tokens": 63 * batch * count}] * self.ranks


@pytest.fixture
def made_up() -> tuple[dict, list]:
    teams = {ranks: MadeUp(ranks) for ranks in (1, 2)}
    return scaling.measure(teams, size=350_000, batch=8, rounds=3, threads=1, cores=2)


def test_shares_and_efficiencies_follow_from_the_steps(made_up):
    weak = scaling.row_of("weak", 2, made_up[0])
    assert weak["tokens_per_second"] == pytest.approx(2 * 63 * 8 / 0.012)
    assert weak["efficiency"] == pytest.approx(8 / 12)
    assert weak["of_independent"] == pytest.approx(8 / 12)
    assert weak["all_reduce_share"] == pytest.approx(3 / 12)
    assert weak["waiting_share"] == pytest.approx(1 / 12)
    assert weak["jitter"] == 0
    assert scaling.row_of("strong", 2, made_up[0])["speedup"] == pytest.approx(16 / 12)


def test_the_prediction_gives_back_what_was_measured_and_grows_with_the_ring(made_up):
    blocks, links = made_up
    latency, bandwidth = scaling.fit_link(links)
    assert (latency, bandwidth) == pytest.approx((1e-4, 1e9))
    prediction = scaling.Prediction(blocks, 2, 350_000, links, cores=2)
    assert prediction.step(1) == pytest.approx(0.008)
    assert prediction.step(2) == pytest.approx(0.012)
    # The gradients added 3 ms and a plain all-reduce takes 0.55: all of it shows, the rest stays.
    rest = 0.012 - 0.008 - 2 * (1e-4 + 16e-9) - 2 * (1e-4 + 175e-6)
    expected = 0.008 + 30 * (1e-4 + 2e-9) + 30 * (1e-4 + 21.875e-6) + rest
    assert prediction.step(16) == pytest.approx(expected)
    # Two cores: sixteen ranks take eight turns.
    assert prediction.here(16) == pytest.approx(16 * 0.008 / (expected + 7 * 0.008))


def test_the_expected_slowest_of_two_dice_throws():
    dice = np.arange(1.0, 7.0)
    assert scaling.expected_slowest(dice, 1) == pytest.approx(3.5)
    assert scaling.expected_slowest(dice, 2) == pytest.approx(161 / 36)


def test_a_bandwidth_too_high_to_be_seen_is_left_out():
    latency, bandwidth = scaling.fit_link([(2, 4096, 2e-3), (2, 350_000, 1.9e-3)])
    assert bandwidth == math.inf
    assert latency == pytest.approx(1e-3, rel=0.05)


@pytest.mark.parametrize(
    "flags",
    [
        ("--ranks", "0"), ("--ranks", "x"), ("--ranks", "1,,2"), ("--ranks", "1.5"), (),
        ("--ranks", "1,2", "--rounds", "0"), ("--ranks", "1,2", "--heads", "3"),
        ("--ranks", "1,2", "--resume", "runs/x"), ("--ranks", "1,2", "--save-every", "9"),
        ("--ranks", "1,2", "--no-such-flag"), ("--ranks", "1,2", "--corpus-file", "missing.txt"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_nonsense_is_one_clear_line_and_nothing_is_written(capsys, tmp_path, monkeypatch, flags):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        scaling.main(list(flags))
    captured = capsys.readouterr()
    assert end.value.code == 2
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_said_before_anything_is_measured(capsys, tmp_path):
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(SystemExit) as end:
            scaling.main(["--ranks", "1", "--output-dir", str(place)])
        assert end.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: --output-dir {place}: ")
    assert (tmp_path / "file").read_text("utf-8") == "mine"


def test_earlier_results_are_kept_unless_told_otherwise(capsys, tmp_path):
    (tmp_path / "scaling.csv").write_text("mine", encoding="utf-8")
    with pytest.raises(SystemExit) as end:
        scaling.main(["--ranks", "1,2", "--output-dir", str(tmp_path)])
    assert end.value.code == 2
    assert "--overwrite" in capsys.readouterr().err
    assert (tmp_path / "scaling.csv").read_text("utf-8") == "mine"
