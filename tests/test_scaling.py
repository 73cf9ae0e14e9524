"""Measured scaling: the arithmetic on made-up measurements, and one real run."""

from __future__ import annotations

import csv
import sys

import pytest
from conftest import ROOT, Finished, run_command

from labs.scaling import __main__ as lab
from labs.scaling import measured, report, team

SMALL = ("--batch-size", "4", "--d-model", "32", "--heads", "2")


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> tuple[Finished, list[dict], object]:
    """One real run on one and two ranks: how it ended, scaling.csv, its folder."""
    folder = tmp_path_factory.mktemp("scaling") / "results"
    command = [sys.executable, "-m", "labs.scaling", "--ranks", "1,2", "--rounds", "3",
               "--output-dir", str(folder), *SMALL]  # fmt: skip
    finished = run_command(command, cwd=ROOT, timeout=240)
    assert finished.status == 0, finished.out + finished.err
    with open(folder / "scaling.csv", encoding="utf-8", newline="") as file:
        return finished, list(csv.DictReader(file)), folder


def row(rows: list[dict], what: str, ranks: int) -> dict:
    (found,) = [r for r in rows if (r["scaling"], int(r["ranks"])) == (what, ranks)]
    return {key: float(value) for key, value in found.items() if value and key != "scaling"}


def test_the_table_has_weak_and_strong_scaling_and_independent_processes(real):
    _, rows, _ = real
    for what, ranks, batch in (
        ("weak", 1, 4), ("weak", 2, 4), ("independent", 2, 4), ("no_sync", 2, 4),
        ("strong", 1, 8), ("strong", 2, 4),
    ):  # fmt: skip
        found = row(rows, what, ranks)
        assert found["batch_per_rank"] == batch
        assert 0 < found["slowest_round"] <= found["tokens_per_second"] <= found["fastest_round"]
        assert found["efficiency"] == pytest.approx(found["speedup"] / ranks)


def test_a_full_step_of_the_batch_is_what_the_tokens_are_counted_from(real):
    # The windows of the built-in document are full: 63 predicted tokens in each of 4 sequences.
    found = row(real[1], "weak", 1)
    # Between slowest and fastest round: on a busy machine they are far apart.
    tokens = [found[which] * found["step_ms"] / 1e3 for which in ("slowest_round", "fastest_round")]
    assert tokens[0] / 1.35 < 4 * 63 < 1.35 * tokens[1]


def test_two_ranks_say_what_was_lost_to_ddp(real):
    found = row(real[1], "weak", 2)
    assert found["of_independent"] > 0
    assert found["all_reduce_share"] < 1


def test_the_report_fits_a_screen_and_ends_with_a_conclusion(real):
    lines = real[0].out.splitlines()
    assert len(lines) <= 60
    assert max(len(line) for line in lines if not line.startswith("written to ")) <= 100
    assert "about " in lines[0] and lines[0].endswith(" s")
    out = " ".join(real[0].out.split())
    conclusion = out[out.index("DDP on 2 ranks ") :]
    assert "2 processes that know nothing of each other reach " in conclusion


def test_the_picture_is_a_picture(real):
    from PIL import Image

    with Image.open(real[2] / "scaling.png") as picture:
        assert picture.format == "PNG"
        assert picture.width > 1000


def make_up(steps: dict[str, float]) -> dict:
    """Measurements by (what, ranks) in which a step of 8 sequences takes as long as we say.

    `steps`: seconds "alone", "no_sync", which is without gradients sent, and "ddp".
    """
    blocks = team.plan((1, 2), batch=8, threads=1, cores=2)
    how = {"weak": "ddp", "strong": "ddp", "no_sync": "no_sync"}
    results = []
    for ranks in (1, 2, 2):
        found = {}
        for block in (block for block in blocks if block.ranks == ranks):
            seconds = (
                steps[how.get(block.what, "alone") if ranks > 1 else "alone"] * block.batch / 8
            )
            found[block] = [{"seconds": [seconds] * 4, "tokens": 63 * block.batch * 4}] * 3
        results.append(found)
    return measured.by_block(blocks, results)


@pytest.fixture
def made_up() -> dict:
    return make_up({"alone": 0.008, "no_sync": 0.009, "ddp": 0.012})


def test_shares_and_efficiencies_follow_from_the_steps(made_up):
    weak = measured.row_of("weak", 2, made_up)
    assert weak["tokens_per_second"] == pytest.approx(2 * 63 * 8 / 0.012)
    assert weak["efficiency"] == pytest.approx(8 / 12)
    assert weak["of_independent"] == pytest.approx(8 / 12)
    assert weak["all_reduce_share"] == pytest.approx(3 / 12)
    assert weak["waiting_share"] == pytest.approx(1 / 12)
    assert measured.row_of("strong", 2, made_up)["speedup"] == pytest.approx(16 / 12)


@pytest.mark.parametrize(
    ("ddp", "says"),
    [(0.009, "is worth it here: 1.78 times"), (0.016, "makes no difference here: 1.00 times"),
     (0.02, "does not pay here: 0.80 times")],
)  # fmt: skip
def test_the_conclusion_says_whether_ddp_pays_beside_the_better_single_process(ddp, says):
    found = make_up({"alone": 0.008, "no_sync": 0.0085, "ddp": ddp})
    rows = [measured.row_of(what, ranks, found) for what, ranks in found]
    assert f"DDP on 2 ranks {says}" in report.conclusion(rows, 2, 2)
    assert "busy" not in report.conclusion(rows, 2, 2)
    # If one process with both threads were twice as fast, it would be the one to beat.
    for fast in rows:
        if "of_all_cores" in fast:
            fast["of_all_cores"] /= 2
    (weak,) = [row for row in rows if (row["scaling"], row["ranks"]) == ("weak", 2)]
    assert report.verdict(weak)[1] == pytest.approx(0.008 / ddp)
    rows[0]["slowest_round"] /= 3
    assert "rounds differ by up to 3.0 times" in report.conclusion(rows, 2, 2)


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
        lab.main(list(flags))
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
            lab.main(["--ranks", "1", "--output-dir", str(place)])
        assert end.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: --output-dir {place}")
    assert (tmp_path / "file").read_text("utf-8") == "mine"


def test_earlier_results_are_kept_unless_told_otherwise(capsys, tmp_path):
    (tmp_path / "scaling.csv").write_text("mine", encoding="utf-8")
    with pytest.raises(SystemExit) as end:
        lab.main(["--ranks", "1,2", "--output-dir", str(tmp_path)])
    assert end.value.code == 2
    assert "--overwrite" in capsys.readouterr().err
    assert (tmp_path / "scaling.csv").read_text("utf-8") == "mine"
