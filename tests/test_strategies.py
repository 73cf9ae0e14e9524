"""The same training under every strategy: the numbers of one process, each rank its share."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import re
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, TORCHRUN, run_command

import llm_ddp_parallel_training as reference
from labs import strategies

SMALL = ["--cpu", "--max-steps", "6", "--d-model", "32", "--layers", "2", "--seq-len", "32"]
LAB = [sys.executable, "-m", "labs.strategies"]


@pytest.fixture(scope="module")
def compared(tmp_path_factory) -> Path:
    """What `--compare` writes, at its defaults."""
    folder = tmp_path_factory.mktemp("compared") / "out"
    args = [*LAB, "--compare", "--cpu", "--output-dir", str(folder)]
    finished = run_command(args, timeout=280, cwd=ROOT)
    assert finished.status == 0, finished.out + finished.err
    assert (folder / "strategies.txt").read_text("utf-8") in finished.out
    return folder


@pytest.fixture(scope="module")
def reports(compared) -> dict[str, dict]:
    return {path.stem: json.loads(path.read_text("utf-8")) for path in compared.glob("*.json")}


def run_ranks(folder: Path, ranks: int, *flags: object, may_die: bool = False):
    """Exit statuses, output and report of so many ranks."""
    log, report = folder / "log.txt", folder / "report.json"
    for old in (log, report):
        old.unlink(missing_ok=True)
    argv = [*SMALL, *map(str, flags), "--ranks", str(ranks), "--report", str(report)]
    statuses = strategies.start_ranks(ranks, argv, log, may_die, patience=100)
    text = log.read_text("utf-8")
    return statuses, text, json.loads(report.read_text("utf-8")) if report.exists() else text


def held(report: dict, what: str) -> list[int]:
    return [rank[what] for rank in report["ranks"]]


def test_every_strategy_trains_as_one_process_does(reports):
    exact = reports.keys() - {"parameter-server-async"}
    assert len(exact) == 8
    for name in exact:
        assert len(reports[name]["losses"]) == 20
        assert reports[name]["gradient_difference"] <= 1e-5, name
        assert reports[name]["loss_difference"] <= 1e-4, name
        assert reports[name]["losses"] == pytest.approx(reports["one-process"]["losses"], abs=1e-4)
    losses = reports["one-process"]["losses"]
    assert losses[-1] < losses[0] - 1


def test_each_rank_holds_its_share_of_the_model(reports):
    whole = {w: held(reports["one-process"], w)[0] for w in strategies.MEMORY}
    model = reference.TinyCausalTransformer(128, 4)
    assert whole["parameters"] == 4 * sum(p.numel() for p in model.parameters())
    for what in ("parameters", "gradients", "optimizer"):
        half = whole[what] / 2
        assert held(reports["ddp"], what) == [whole[what]] * 2
        assert held(reports["fsdp"], what) == pytest.approx([half] * 2, rel=1e-3)
        # Norms and positions are on every rank.
        assert held(reports["tensor"], what) == pytest.approx([half] * 2, rel=0.02)
        assert held(reports["fsdp-tensor"], what) == pytest.approx([half / 2] * 4, rel=0.02)
        for pipeline in ("pipeline-gpipe", "pipeline-1f1b"):
            assert sum(held(reports[pipeline], what)) == whole[what]
            assert held(reports[pipeline], what) == pytest.approx([half] * 2, rel=0.05)
    assert held(reports["parameter-server-sync"], "optimizer") == [whole["optimizer"], 0, 0]
    # Half of the batch keeps half of the activations.
    assert held(reports["ddp"], "activations") == pytest.approx(
        [whole["activations"] / 2] * 2, rel=0.02
    )


def test_what_ranks_send_is_what_their_way_of_dividing_needs(reports):
    parameters = held(reports["one-process"], "parameters")[0]
    sent = {name: report["ranks"][-1]["traffic"] for name, report in reports.items()}
    loss = 8  # bytes
    assert sent["one-process"] == {}
    assert sent["ddp"].keys() == {"all-reduce"}
    assert sent["ddp"]["all-reduce"][1] == parameters + loss
    assert sent["fsdp"]["all-reduce"] == [1, loss]
    assert sent["fsdp"]["reduce-scatter"] == [5, parameters]  # four layers and the root
    layers = 4 * 12 * 128 * 128 * 4  # bytes of their matrices: gathered forward and backward
    assert sent["fsdp"]["all-gather"][0] == 9  # the root's stay
    assert sent["fsdp"]["all-gather"][1] == pytest.approx(parameters + layers, rel=0.01)
    hidden = 16 * 64 * 128 * 4  # bytes [B, T, D]
    # Forward: embedding, attention and feed-forward of four layers, three small ones for the loss.
    # Backward: attention and feed-forward, and the head.
    assert sent["tensor"]["all-reduce"][0] == 1 + 8 + 3 + 8 + 1
    assert sent["tensor"]["all-reduce"][1] == pytest.approx(18 * hidden, rel=0.01)
    assert sent["pipeline-gpipe"]["send"] == [4, hidden]  # one message a micro-batch
    assert sent["pipeline-1f1b"] == sent["pipeline-gpipe"]
    for mode in ("sync", "async"):
        assert sent[f"parameter-server-{mode}"]["send"] == [2, parameters + 32]
        server = reports[f"parameter-server-{mode}"]["ranks"][0]
        assert server["traffic"]["send"] == [4, 2 * (parameters + 32)]


def test_one_forward_one_backward_keeps_fewer_activations_for_the_same_bubble(reports):
    gpipe, alternating = reports["pipeline-gpipe"], reports["pipeline-1f1b"]
    for kept, more in zip(held(alternating, "activations"), held(gpipe, "activations")):
        assert kept < 0.7 * more
    for report in (gpipe, alternating):
        assert report["bubble"]["formula"] == pytest.approx(1 / 5)  # 2 stages, 4 micro-batches
        assert 0 < report["bubble"]["measured"] < 1


def test_staleness_is_counted_where_nobody_waits(reports):
    assert reports["parameter-server-sync"]["staleness"] == {"0": 40}
    free = reports["parameter-server-async"]
    assert len(free["losses"]) == sum(free["staleness"].values()) == 40
    assert max(map(int, free["staleness"])) >= 1
    assert free["losses"][-1] < free["losses"][0] - 1


def test_the_tables_in_the_wiki_are_those_that_comparing_writes(compared):
    def facts(text: str) -> list[list[str]]:
        """Names, ranks, bytes held and sent: the columns that no machine changes."""
        found = []
        for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
            rows = [[c.strip() for c in row.strip("|").split("|")] for row in table.splitlines()]
            kept = {"Δ gradient": 2, "parameters": 5, "all-reduce": 5}.get(rows[0][2])
            found += [row[:kept] for row in rows if kept and not row[0].startswith("-")]
        return found

    written = facts((compared / "strategies.md").read_text("utf-8"))
    assert len(written) == 10 + 14 + 10
    assert facts((ROOT / "wiki" / "Beyond-DDP.md").read_text("utf-8")) == written
    for picture in (compared / "strategies.png", ROOT / "docs" / "strategies.png"):
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_claims_about_memory_are_those_of_this_comparison(reports):
    page = " ".join((ROOT / "wiki" / "Understanding-Gradients.md").read_text("utf-8").split())
    states = ("parameters", "gradients", "optimizer")
    for name, claim in (("ddp", "{:.2f} MB on each of two ranks"), ("fsdp", "{:.2f} MB on each |")):
        parts = [held(reports[name], what)[0] / 1e6 for what in states]
        assert claim.format(sum(parts)) in page
        assert " + ".join(f"{part:.2f}" for part in parts) + " MB" in page
    sent = {kind: size / 1e6 for kind, (_, size) in reports["fsdp"]["ranks"][0]["traffic"].items()}
    assert f"{sent['all-gather']:.1f} MB of all-gathers" in page
    assert f"{sent['reduce-scatter']:.2f} MB of reduce-scatters" in page


def test_the_comparison_fits_a_terminal_of_100_columns(compared):
    text = (compared / "strategies.txt").read_text("utf-8")
    assert max(map(len, text.splitlines())) <= 100
    assert "idle " in text and "staleness of gradients" in text


def test_a_sharded_checkpoint_goes_on_on_other_numbers_of_ranks(tmp_path):
    folder = tmp_path / "sharded"
    statuses, text, two = run_ranks(tmp_path, 2, "--strategy", "fsdp", "--save", folder)
    assert statuses == [0, 0], text
    assert len([*folder.glob("*.distcp")]) == 2
    for ranks, strategy in ((1, "one"), (3, "fsdp")):
        statuses, text, on = run_ranks(tmp_path, ranks, "--strategy", strategy, "--load", folder)
        assert statuses == [0] * ranks, text
        assert on["losses"] == pytest.approx(two["losses"][3:], abs=1e-4)
    model = strategies.reference_model(folder)
    options, settings, _ = strategies.parse_options(["--strategy", "one", *SMALL])
    run = strategies.build(reference.Launch(), settings)
    batches = strategies.global_batches(run, options.global_batch)
    batch = next(itertools.islice(batches, 3, None))
    with torch.no_grad():
        loss = float(model(**reference.inputs_of(batch, torch.device("cpu"))))
    assert loss == pytest.approx(two["losses"][3], abs=1e-6)
    status, error = refused("--strategy", "fsdp", "--ranks", 2, "--save", folder)
    assert (status, "already there" in error) == (2, True)
    status, error = refused("--strategy", "one", "--load", folder, "--d-model", 64)
    assert (status, "d_model was 32 there and is 64 here" in error) == (2, True)
    (folder / "__1_0.distcp").unlink()
    status, error = refused("--strategy", "one", "--load", folder)
    assert (status, "No such file" in error) == (2, True)
    config = folder / "config.json"
    config.write_text(config.read_text("utf-8").replace('"step": 3', '"step": 6'), encoding="utf-8")
    status, error = refused("--strategy", "one", "--load", folder)
    assert (status, "--max-steps 6: the checkpoint has 6 already" in error) == (2, True)


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_checkpoint_that_would_run_code_is_refused(tmp_path, capsys):
    trap = tmp_path / "sprung"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Trap(trap)))
    (tmp_path / "config.json").write_text('{"model": "tiny"}', encoding="utf-8")
    status, error = refused("--strategy", "one", "--load", tmp_path)
    assert status == 2
    assert "no complete sharded checkpoint" in error and "mkdir" in error
    assert not trap.exists()


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_worker_that_dies_does_not_stop_the_others(tmp_path, mode):
    flags = ("--strategy", "parameter-server", "--mode", mode, "--kill-worker-after", 2)
    statuses, text, report = run_ranks(tmp_path, 3, *flags, may_die=True)
    assert statuses == [0, 0, -9], text
    assert "rank 2 is gone after update" in text
    assert report["lost_workers"].keys() == {"2"}
    assert report["ranks"][2] is None
    # Two gradients of the dead worker and all six of the other one.
    assert sum(report["staleness"].values()) == 8
    assert len(report["losses"]) == (8 if mode == "async" else 6)


def test_a_server_with_one_worker_is_one_process(tmp_path):
    statuses, text, report = run_ranks(tmp_path, 2, "--strategy", "parameter-server")
    assert statuses == [0, 0], text
    assert report["gradient_difference"] <= 1e-5
    assert report["loss_difference"] <= 1e-4


@pytest.mark.parametrize(("gradient", "loss"), [(2e-5, 0.0), (0.0, 2e-4), (float("nan"), 0.0)])
def test_other_numbers_than_those_of_one_process_fail_the_run(gradient, loss):
    report = {"strategy": "ddp", "gradient_difference": gradient, "loss_difference": loss}
    with pytest.raises(reference.RunError, match="ddp differs from one process"):
        strategies.require_equal(report)


@pytest.mark.parametrize("strategy", ["fsdp", "tensor"])
def test_qwen_is_divided_too(tmp_path, small_qwen, strategy):
    flags = ("--model", "qwen", "--base-model", small_qwen, "--strategy", strategy)
    statuses, text, report = run_ranks(tmp_path, 2, *flags)
    assert statuses == [0, 0], text
    assert report["gradient_difference"] <= 1e-5
    assert report["loss_difference"] <= 1e-4
    whole = 4 * reference_parameters(small_qwen)
    assert held(report, "parameters") == pytest.approx([whole / 2] * 2, rel=0.02)


def reference_parameters(folder: Path) -> int:
    from transformers import AutoModelForCausalLM

    return sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(folder).parameters())


def test_heads_that_cannot_be_divided_are_one_clear_line(tmp_path):
    from qwen_assets import make_model, make_tokenizer

    model = strategies.FullCausalLM(make_model(make_tokenizer()))
    four = SimpleNamespace(size=lambda: 4)  # of its 4 heads and 2 key-value heads
    with pytest.raises(
        reference.UserError, match=r"over 4 ranks.*heads \(4\), key-value heads \(2\)"
    ):
        strategies.split_matrices(model, four)
    flags = ("--strategy", "tensor", "--heads", 1)
    statuses, text, _ = run_ranks(tmp_path, 2, *flags)
    assert statuses == [2, 2]
    (line,) = [line for line in text.splitlines() if line.startswith("error: ")]
    assert "over 2 ranks" in line and "attention heads (1)" in line
    assert "Traceback" not in text


def test_the_launchers_command_works_and_bf16_halves_what_is_gathered(tmp_path, reports):
    report = tmp_path / "report.json"
    flags = "--strategy fsdp --cpu --precision bf16 --max-steps 4 --report".split()
    args = [*TORCHRUN, "--nproc_per_node=2", "-m", "labs.strategies", *flags, str(report)]
    finished = run_command(args, cwd=ROOT)
    assert finished.status == 0, finished.out + finished.err
    mixed, full = json.loads(report.read_text("utf-8")), reports["fsdp"]
    sent, whole = (r["ranks"][0]["traffic"] for r in (mixed, full))
    assert sent["all-gather"][1] * 2 == whole["all-gather"][1]
    assert sent["reduce-scatter"] == whole["reduce-scatter"]  # gradients are summed in fp32
    assert held(mixed, "parameters") == held(full, "parameters")  # the shares stay fp32
    assert mixed["losses"] == pytest.approx(full["losses"][:4], abs=0.02)
    assert mixed["losses"] != full["losses"][:4]


def refused(*flags: object) -> tuple[int, str]:
    """Exit status and message of a command line that is wrong."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as err:
        with contextlib.redirect_stderr(err), pytest.raises(SystemExit) as end:
            strategies.main([*SMALL, *map(str, flags)])
        err.seek(0)
        (line,) = err.read().splitlines()
    assert line.startswith("error: ")
    return end.value.code, line


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--strategy ddp", "2 ranks or more"),
        ("--strategy one --ranks 2", "one process"),
        ("--strategy fsdp+tensor --ranks 5", "not even"),
        ("--strategy fsdp+tensor --ranks 2", "4 ranks or more"),
        ("--strategy pipeline --ranks 3", "--layers 2"),
        ("--strategy pipeline --ranks 2 --micro-batches 5", "--micro-batches 5"),
        ("--strategy pipeline --ranks 2 --model qwen", "--model tiny"),
        ("--strategy ddp --ranks 2 --precision bf16", "--precision bf16"),
        ("--strategy tensor --ranks 2 --save x", "--save needs"),
        ("--strategy tensor --ranks 2 --load x", "--load needs"),
        ("--strategy one --load nowhere", "no complete sharded checkpoint"),
        ("--strategy one --global-batch 99", "--global-batch 99"),
        ("--strategy ddp --ranks 2 --batch-size 4", "--batch-size has no meaning"),
        ("--strategy parameter-server --ranks 2 --kill-worker-after 1", "--ranks 3"),
        ("--strategy magic", "invalid choice"),
        ("--compare --output-dir docs", "already holds strategies.png"),
        ("--compare --layers 1", "--layers 1"),
        ("--compare --output-dir README.md", "--output-dir README.md: "),
        ("--compare --output-dir README.md/x", "--output-dir README.md/x: "),
        ("--compare --save x", "--save means nothing with --compare"),
        ("--strategy one --overwrite", "need --compare"),
        ("--strategy ddp --ranks 2 --mode async", "--mode async needs"),
        ("--strategy one --report nowhere/x.json", "--report nowhere/x.json"),
        ("", "--strategy"),
    ],
)
def test_a_wrong_command_line_is_one_clear_line(flags, says, monkeypatch):
    monkeypatch.chdir(ROOT)
    status, error = refused(*flags.split())
    assert status == 2
    assert says in error
