"""labs/explain_step: what it says about a step is what the step did."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TORCHRUN, Finished, digest_line, run_command, settings_of
from quick import hashes, here, job

import llm_ddp_parallel_training as ddp
from labs.explain_step import __main__ as lab
from labs.explain_step.step import covered, norms

LAB = "labs.explain_step"
RUN = f"{LAB}.__main__"
MODEL = ("--d-model", 32, "--layers", 1, "--seq-len", 96, "--batch-size", 3)
DATA = ("--val-fraction", 0)  # all 32 samples are trained on


def explanation(folder: Path) -> dict:
    return json.loads((folder / "explain.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> tuple[Finished, Path]:
    """Two ranks, launched as the docstring says: accumulation, and buckets of about 20 kB."""
    folder = tmp_path_factory.mktemp("explain") / "two"
    flags = (*MODEL, *DATA, "--grad-accum", 2, "--clip", 0.5, "--bucket-cap-mb", 0.02)
    args = [*TORCHRUN, "--nproc_per_node=2", "-m", LAB, "--cpu", *map(str, flags)]
    finished = run_command([*args, "--steps", "2", "--output-dir", str(folder)], cwd=ROOT)
    assert finished.status == 0, finished.err
    return finished, folder


@pytest.fixture(scope="module")
def three(tmp_path_factory) -> tuple[Finished, Path]:
    """Three ranks with dropout; the last update has 5 samples, so one rank has a single one."""
    folder = tmp_path_factory.mktemp("explain") / "three"
    flags = (
        *MODEL,
        *DATA,
        "--dropout",
        0.2,
        "--clip",
        0,
        "--steps",
        4,
        "--output-dir",
        folder,
    )
    endings = job(3, *flags, module=RUN)
    assert [(e.status, e.err) for e in endings] == [(0, "")] * 3
    return endings[0], folder


@pytest.fixture(scope="module")
def qwen(tmp_path_factory, small_qwen) -> tuple[Finished, Path]:
    """Two ranks, a small Qwen2 with LoRA dropout."""
    folder = tmp_path_factory.mktemp("explain") / "qwen"
    flags = ("--model", "qwen", "--base-model", small_qwen, "--batch-size", 2, "--steps", 2)
    endings = job(2, *flags, "--bucket-cap-mb", 0.002, "--output-dir", folder, module=RUN)
    assert [e.status for e in endings] == [0, 0], endings
    return endings[0], folder


@pytest.fixture(scope="module")
def default(tmp_path_factory) -> tuple[Finished, Path]:
    """Two ranks without any flag about the model, as the README has it."""
    folder = tmp_path_factory.mktemp("explain") / "default"
    endings = job(2, "--steps", 2, "--output-dir", folder, module=RUN)
    assert [(e.status, e.err) for e in endings] == [(0, "")] * 2
    return endings[0], folder


@pytest.fixture(params=["two", "three", "qwen"])
def any_run(request) -> tuple[Finished, dict]:
    finished, folder = request.getfixturevalue(request.param)
    return finished, explanation(folder)


def test_ddp_by_hand_and_one_process_give_the_same_loss_gradient_and_weights(any_run):
    finished, content = any_run
    for step in content["steps"]:
        for way in ("DDP", "one all-reduce per parameter"):
            apart = step["proof"][way]
            assert apart["loss_relative"] <= 1e-6
            assert apart["gradient_relative"] <= 1e-6
            # AdamW divides a gradient by its own size, and so enlarges the rounding of tiny ones.
            assert apart["weights_largest"] <= 0.05 * step["learning_rate"]
    assert "one process agree to 1e-06" in finished.out


def test_ranks_begin_equal_differ_in_their_gradients_and_end_equal(any_run):
    _, content = any_run
    last = None
    for step in content["steps"]:
        digests = [rank["digests"] for rank in step["ranks"]]
        distinct = {what: len({d[what] for d in digests}) for what in digests[0]}
        assert distinct == {
            "weights before": 1, "local gradient": len(digests), "averaged gradient": 1,
            "weights after": 1,
        }  # fmt: skip
        assert last in (None, digests[0]["weights before"])
        last = digests[0]["weights after"]


def test_the_local_losses_with_their_weights_give_the_loss_of_the_step(any_run):
    _, content = any_run
    for step in content["steps"]:
        ranks = step["ranks"]
        assert sum(rank["tokens"] for rank in ranks) == step["tokens"]
        assert [rank["weight"] for rank in ranks] == [r["tokens"] / step["tokens"] for r in ranks]
        mean = sum(rank["weight"] * rank["local_loss"] for rank in ranks)
        assert mean == pytest.approx(step["loss"], rel=1e-7)


def test_the_buckets_hold_every_trained_parameter_once_and_come_in_order(any_run):
    _, content = any_run
    for number, step in enumerate(content["steps"], 1):
        for rank in step["ranks"]:
            buckets = rank["buckets"]
            names = [name for bucket in buckets for name in bucket["parameters"]]
            assert len(set(names)) == len(names) > 1
            assert sum(bucket["bytes"] for bucket in buckets) == content["trained_bytes"]
            assert [b["parameters"] for b in buckets] == [
                b["parameters"] for b in step["ranks"][0]["buckets"]
            ]
            assert number > 1 or len(buckets) == 1  # DDP learns the order in the first pass
            phases = {name: (begin, end) for name, begin, end in rank["phases"]}  # the last of each
            begin, end = phases["backward"][0], phases["wait for all-reduce"][1]
            for bucket in buckets:
                assert begin <= bucket["ready"] <= bucket["sent"] <= bucket["done"] <= end
            assert [b["ready"] for b in buckets] == sorted(b["ready"] for b in buckets)
            over = rank["overlap"]
            assert 0 <= over["hidden"] <= over["under_way"] <= end - begin
            assert over["hidden"] <= over["backward"]
            assert len(buckets) > 1 or over["hidden"] == 0  # the only one is ready at the end


def test_time_that_several_all_reduces_share_counts_once():
    assert covered([(3, 4), (0, 2), (1, 2), (1, 3.5)]) == 4
    assert covered([(0, 1), (5, 6)]) == 2
    assert covered([]) == 0


def test_a_small_cap_makes_several_buckets_from_the_second_update_on(two, qwen):
    for _, folder in (two, qwen):
        assert len(explanation(folder)["steps"][1]["ranks"][0]["buckets"]) >= 3
    # The loss is computed from the head's output, so its gradient is the first to arrive.
    assert explanation(two[1])["steps"][1]["ranks"][0]["buckets"][0]["parameters"][0] == (
        "lm_head.weight"
    )


def test_by_default_several_buckets_are_seen_to_hide_behind_the_backward_pass(default):
    finished, folder = default
    for rank in explanation(folder)["steps"][-1]["ranks"]:
        assert len(rank["buckets"]) == 4
        assert rank["overlap"]["hidden"] > 0
    assert finished.out.count("hidden behind") == 2


def test_by_default_it_says_how_long_it_takes_fits_a_screen_or_two_and_concludes(default):
    out, whole = default[0].out, (default[1] / "explain.txt").read_text("utf-8")
    assert "This takes about ten seconds." in " ".join(out.split("\n\n")[0].split())
    assert len(out.splitlines()) <= 70
    assert whole in out
    last = " ".join(out.rpartition("\n\n")[2].split())
    assert "the average is that of one process with all samples" in last
    assert last.count(". ") + 1 <= 3  # sentences


def test_the_norms_are_those_of_gradients_computed_without_the_lab(two):
    content = explanation(two[1])
    launch, settings = ddp.Launch(), settings_of(*MODEL, *DATA, "--clip", 0.5)
    run = ddp.build_tiny(launch, settings)
    step = content["steps"][0]
    texts = run.data.train.texts

    def gradient(ranks: list[dict]) -> dict[str, torch.Tensor]:
        """Of the mean over all tokens of these ranks' samples, in one batch."""
        samples = [sample for rank in ranks for sample in rank["samples"]]
        records = [sample["record"] for sample in samples]
        assert [sample["text"] for sample in samples] == [texts[i][:80] for i in records]
        batch = run.collate([(i, texts[i]) for i in records])
        run.model.zero_grad()
        run.model(**ddp.inputs_of(batch, launch.device)).backward()
        return {name: p.grad.clone() for name, p in ddp.trained_parameters(run.model)}

    for rank in step["ranks"]:
        own = gradient([rank])
        assert rank["local_gradient_norms"] == pytest.approx(norms(own), rel=1e-5)
    averaged = gradient(step["ranks"])
    assert step["gradient_norms"] == pytest.approx(norms(averaged), rel=1e-5)
    length = math.sqrt(sum(float(g.square().sum()) for g in averaged.values()))
    assert step["gradient_norms"]["total"] == pytest.approx(length, rel=1e-5)
    assert step["clip_factor"] == pytest.approx(0.5 / length, rel=1e-4)
    # The first step of AdamW moves each weight by the learning rate, whatever its gradient.
    moved = sum(int((g != 0).sum()) for g in averaged.values())
    assert step["update_norms"]["total"] == pytest.approx(3e-4 * math.sqrt(moved), rel=0.05)


@pytest.mark.parametrize("which", ["two", "qwen"])
def test_looking_on_changes_nothing(which, request, tmp_path, small_qwen):
    """The reference's own run with the same flags ends with the same weights, bit for bit."""
    folder = request.getfixturevalue(which)[1]
    flags = (*MODEL, *DATA, "--grad-accum", 2, "--clip", 0.5)
    if which == "qwen":
        flags = ("--model", "qwen", "--base-model", small_qwen, "--batch-size", 2)
    plain = job(2, *flags, "--max-steps", 2, "--output-dir", tmp_path / "plain")
    after = explanation(folder)["steps"][-1]["ranks"][0]["digests"]["weights after"]
    assert after == digest_line(plain[0])


def test_the_report_shows_each_ranks_samples_and_the_arithmetic(two):
    finished, folder = two
    content = explanation(folder)
    report = (folder / "explain.txt").read_text("utf-8")
    assert report in finished.out
    assert max(map(len, report.splitlines())) <= 100
    step = content["steps"][-1]
    for rank in step["ranks"]:
        first = rank["samples"][0]
        start = first["text"][:60]
        assert f'rank {rank["rank"]}   record {first["record"]:<5} "{start}' in report
        assert rank["weight"] != 0.5
        weight = f"{rank['tokens']} / {step['tokens']} = {rank['weight']:.6f}"
        assert f"{rank['local_loss']:.6f}" in report and weight in report
    assert "Together they are the 12 samples" in report
    text = " ".join(report.split())
    assert "c = batch × accumulation × (seq_len − 1) = 3 × 2 × 95 = 570" in text


def test_a_rank_whose_samples_run_out_first_counts_with_what_it_has(three):
    content = explanation(three[1])
    sizes = [[len(rank["samples"]) for rank in step["ranks"]] for step in content["steps"]]
    assert sizes == [[3, 3, 3], [3, 3, 3], [3, 3, 3], [2, 2, 1]]
    for step in content["steps"]:
        union = sorted(x["record"] for rank in step["ranks"] for x in rank["samples"])
        assert union == step["expected_records"]


def test_the_picture_opens_in_its_viewer(two):
    _, folder = two
    from PIL import Image

    with Image.open(folder / "explain.png") as picture:
        picture.load()
        assert picture.width > 1000


def test_one_process_says_in_one_line_what_is_missing(tmp_path):
    ended = here(*MODEL, "--steps", 1, "--output-dir", tmp_path / "one", main=lab.main)
    assert ended.status == 0, ended.err
    (line,) = [line for line in ended.out.splitlines() if line.startswith("One process:")]
    assert "needs two ranks" in line
    (step,) = explanation(tmp_path / "one")["steps"]
    assert step["ranks"][0]["buckets"] == [] and step["proof"] == {}
    assert step["ranks"][0]["local_gradient_norms"] == step["gradient_norms"]
    assert {path.name for path in (tmp_path / "one").iterdir()} >= set(lab.OUTPUTS)


def test_a_step_that_takes_the_mean_of_means_is_found_out(tmp_path):
    flags = (*MODEL, "--steps", 1, "--output-dir", tmp_path / "wrong")
    endings = job(2, *flags, faults=[{"kind": "mean of means"}], module=RUN)
    assert [e.status for e in endings] == [1, 1]
    assert "one process do NOT agree" in endings[0].out
    (line,) = endings[0].error_lines()
    assert "update 1" in line and "do not agree to 1e-06" in line
    (step,) = explanation(tmp_path / "wrong")["steps"]
    assert step["proof"]["DDP"]["gradient_relative"] > 1e-4
    assert step["proof"]["DDP"]["loss_relative"] > 1e-6


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (("--steps", 0), "--steps"),
        (("--steps", 3, "--max-steps", 2), "--steps 3"),
        (("--bucket-cap-mb", -1), "--bucket-cap-mb"),
        (("--resume", "runs/x"), "--resume has no meaning"),
        (("--no-such-flag",), "--no-such-flag"),
        (("--output-dir", "EXISTING"), "already holds"),
    ],
    ids=lambda value: str(value[0]) if isinstance(value, tuple) else "",
)
def test_wrong_input_is_one_clear_line_and_overwrites_nothing(flags, names, tmp_path, two):
    existing = two[1]
    before = hashes(existing)
    flags = [existing if flag == "EXISTING" else flag for flag in flags]
    if existing not in flags:
        flags += ["--output-dir", tmp_path / "new"]
    ended = here(*MODEL, *flags, main=lab.main)
    assert ended.status == 2
    assert names in ended.error_lines()[0] and len(ended.err.splitlines()) == 1
    assert hashes(existing) == before
    assert not (tmp_path / "new" / "explain.json").exists()
