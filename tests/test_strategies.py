"""The same training under every strategy: the numbers of one process, each rank its share."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import tempfile
from pathlib import Path

import pytest
from conftest import ROOT, TORCHRUN, run_command

import llm_ddp_parallel_training as reference
from labs.shared.ranks import watch_ranks
from labs.strategies import __main__ as lab
from labs.strategies import compare, report, traffic

SMALL = ["--cpu", "--max-steps", "6", "--d-model", "32", "--layers", "2", "--seq-len", "32"]


@pytest.fixture(scope="module")
def compared(tmp_path_factory) -> tuple[Path, str]:
    """What `--compare` writes, at its defaults, and what it prints."""
    folder = tmp_path_factory.mktemp("compared") / "out"
    command = [sys.executable, "-m", "labs.strategies", "--compare", "--cpu", "--output-dir"]
    finished = run_command([*command, str(folder)], timeout=500, cwd=ROOT)
    assert finished.status == 0, finished.out + finished.err
    assert (folder / "strategies.txt").read_text("utf-8") in finished.out
    return folder, finished.out


@pytest.fixture(scope="module")
def reports(compared) -> dict[str, dict]:
    return json.loads((compared[0] / "strategies.json").read_text("utf-8"))


def run_ranks(folder: Path, ranks: int, *flags: object) -> dict:
    """The report of so many small ranks."""
    path = folder / "report.json"
    lab.main([*SMALL, *map(str, flags), "--ranks", str(ranks), "--report", str(path)])
    return json.loads(path.read_text("utf-8"))


def refused(*flags: object) -> str:
    """The message for a command line that is wrong."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as err:
        with contextlib.redirect_stderr(err), pytest.raises(SystemExit) as end:
            lab.main([*SMALL, *map(str, flags)])
        err.seek(0)
        (line,) = err.read().splitlines()
    assert end.value.code == 2 and line.startswith("error: ")
    return line


def held(report: dict, what: str) -> list[int]:
    return [rank[what] for rank in report["ranks"]]


def test_every_strategy_trains_as_one_process_does(reports):
    exact = reports.keys() - {"server, async"}
    assert len(exact) == 8
    losses = reports["one process"]["losses"]
    assert len(losses) == 8 and losses[-1] < losses[0] - 1
    for name in exact:
        assert reports[name]["gradient_difference"] <= 1e-5, name
        assert reports[name]["loss_difference"] <= 1e-4, name
        assert reports[name]["losses"] == pytest.approx(losses, abs=1e-4)


def test_each_rank_holds_its_share_of_the_model(reports):
    whole = {
        w: held(reports["one process"], w)[0] for w in ("parameters", "gradients", "optimizer")
    }
    model = reference.TinyCausalTransformer(128, 4)
    assert whole["parameters"] == 4 * sum(p.numel() for p in model.parameters())
    for what, size in whole.items():
        half = size / 2
        assert held(reports["DDP"], what) == [size] * 2
        assert held(reports["FSDP"], what) == pytest.approx([half] * 2, rel=1e-3)
        # Norms and positions are on every rank.
        assert held(reports["tensor"], what) == pytest.approx([half] * 2, rel=0.02)
        assert held(reports["FSDP + tensor"], what) == pytest.approx([half / 2] * 4, rel=0.02)
        for name in ("pipeline, GPipe", "pipeline, 1F1B"):
            assert sum(held(reports[name], what)) == size
            assert held(reports[name], what) == pytest.approx([half] * 2, rel=0.05)
    assert held(reports["server, sync"], "optimizer") == [whole["optimizer"], 0, 0]


def test_half_of_the_batch_keeps_half_of_the_activations_and_gathered_layers_are_apart(reports):
    half = held(reports["one process"], "activations")[0] / 2
    for name in ("DDP", "FSDP"):
        assert held(reports[name], "activations") == pytest.approx([half] * 2, rel=0.02)
    assert {name for name, r in reports.items() if any(held(r, "gathered"))} == {
        "FSDP", "FSDP + tensor",
    }  # fmt: skip
    parameters = held(reports["one process"], "parameters")[0]
    layer = 12 * 128 * 128 * 4  # bytes: at least one is whole, and never all of them with copies
    assert layer < held(reports["FSDP"], "gathered")[0] < parameters


def test_what_crosses_a_link_is_what_the_way_of_dividing_needs(reports):
    parameters = held(reports["one process"], "parameters")[0]
    sent = {name: report["ranks"][-1]["traffic"] for name, report in reports.items()}
    loss = 8  # bytes
    assert sent["one process"] == {}
    assert sent["DDP"].keys() == {"all-reduce"}
    # In a ring of two, an all-reduce sends all of it once, the other two half of it.
    assert sent["DDP"]["all-reduce"][1:] == [parameters + loss] * 2
    assert sent["FSDP"]["all-reduce"] == [1, loss, loss]
    assert sent["FSDP"]["reduce-scatter"] == [5, parameters, parameters / 2]  # 4 layers, the root
    layers = 4 * 12 * 128 * 128 * 4  # bytes of their matrices: gathered forward and backward
    count, size, link = sent["FSDP"]["all-gather"]
    assert (count, link) == (9, size / 2)  # the root's stay
    assert size == pytest.approx(parameters + layers, rel=0.01)
    hidden = 16 * 64 * 128 * 4  # bytes [B, T, D]
    # Forward: embedding, attention and feed-forward of four layers, three small ones for the loss.
    # Backward: attention and feed-forward, and the head.
    assert sent["tensor"]["all-reduce"][0] == 1 + 8 + 3 + 8 + 1
    assert sent["tensor"]["all-reduce"][2] == pytest.approx(18 * hidden, rel=0.01)
    # Of four ranks, pairs reduce the activations of half of the batch.
    assert sent["FSDP + tensor"]["all-reduce"][2] == pytest.approx(9 * hidden, rel=0.01)
    assert sent["pipeline, GPipe"]["send"] == [4, hidden, hidden]  # one message a micro-batch
    assert sent["pipeline, 1F1B"] == sent["pipeline, GPipe"]
    for mode in ("sync", "async"):
        to_server = parameters + 24
        assert sent[f"server, {mode}"]["send"] == [2, to_server, to_server]
        server = reports[f"server, {mode}"]["ranks"][0]
        assert server["traffic"]["send"] == [4, 2 * to_server, 2 * to_server]


def test_a_ring_of_many_sends_nearly_twice_what_it_reduces():
    assert traffic.over_a_link("all-reduce", 4) == pytest.approx(2 * 3 / 4)
    assert traffic.over_a_link("all-gather", 4) == pytest.approx(3 / 4)
    assert traffic.over_a_link("send", 4) == 1


def test_one_forward_one_backward_keeps_fewer_activations(reports):
    gpipe, alternating = reports["pipeline, GPipe"], reports["pipeline, 1F1B"]
    for kept, more in zip(held(alternating, "activations"), held(gpipe, "activations")):
        assert kept < 0.7 * more


def test_staleness_is_counted_where_nobody_waits(reports):
    assert reports["server, sync"]["staleness"] == {"0": 16}
    free = reports["server, async"]
    assert len(free["losses"]) == sum(free["staleness"].values()) == 16
    assert max(map(int, free["staleness"])) >= 1
    assert free["losses"][-1] < free["losses"][0] - 1


def test_the_tables_in_the_wiki_are_those_that_comparing_writes(compared):
    page = (ROOT / "wiki" / "Beyond-DDP.md").read_text("utf-8")
    tables = (compared[0] / "strategies.txt").read_text("utf-8").split("\n\n")[:2]
    for table in tables:
        assert without_differences(table) in without_differences(page)


def without_differences(text: str) -> str:
    """Without the columns of rounding errors, which every machine has its own of."""
    return re.sub(r"\b\de-\d\d\b", "", text)


def test_the_claims_about_memory_are_those_of_this_comparison(reports):
    page = " ".join((ROOT / "wiki" / "Understanding-Gradients.md").read_text("utf-8").split())
    for name in ("DDP", "FSDP"):
        parts = [held(reports[name], w)[0] / 1e6 for w in ("parameters", "gradients", "optimizer")]
        assert f"{' + '.join(f'{part:.2f}' for part in parts)} MB" in page
    sent = {kind: link / 1e6 for kind, (*_, link) in reports["FSDP"]["ranks"][0]["traffic"].items()}
    assert f"{sent['all-gather']:.2f} MB of all-gathers" in page
    assert f"{sent['reduce-scatter']:.2f} MB of reduce-scatters" in page


def test_the_comparison_fits_a_screen_and_ends_with_a_conclusion(compared):
    folder, out = compared
    lines = [line for line in out.splitlines() if not line.startswith("written to ")]
    assert len(lines) < 60 and max(map(len, lines)) <= 100
    assert "16 updates, each from the 1/2 of a batch" in " ".join(out.split())
    assert "hold 50% and 51% of DDP's" in " ".join(out.split())
    assert (folder / "strategies.png").read_bytes().startswith(b"\x89PNG")


def test_a_sharded_checkpoint_goes_on_on_other_numbers_of_ranks(tmp_path):
    folder = tmp_path / "sharded"
    two = run_ranks(tmp_path, 2, "--strategy", "fsdp", "--save", folder)
    assert len([*folder.glob("*.safetensors")]) == 2
    for ranks, strategy in ((1, "one"), (3, "fsdp")):
        on = run_ranks(tmp_path, ranks, "--strategy", strategy, "--load", folder)
        assert on["losses"] == pytest.approx(two["losses"][3:], abs=1e-4)
        assert on["losses"] != pytest.approx(two["losses"][:3], abs=0.01)
    assert "already there" in refused("--strategy", "fsdp", "--ranks", 2, "--save", folder)
    assert "d_model was 32 there and is 64 here" in refused(
        "--strategy", "one", "--load", folder, "--d-model", 64
    )
    index = folder / "index.json"
    content = index.read_text("utf-8")
    index.write_text(content.replace('"step": 3', '"step": 6'), encoding="utf-8")
    says = refused("--strategy", "one", "--load", folder)
    assert "--max-steps 6: the checkpoint has 6 already" in says
    index.write_text(content, encoding="utf-8")
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:100])
    assert f"--load {folder}: " in refused("--strategy", "one", "--load", folder)
    shard.unlink()
    assert f"{shard.name} is missing" in refused("--strategy", "one", "--load", folder)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_worker_that_dies_does_not_stop_the_others(tmp_path, mode):
    flags = ["--strategy", "parameter-server", "--mode", mode, "--kill-worker-after", "2"]
    log = tmp_path / "log.txt"
    server, worker, dead = watch_ranks(
        compare.a_rank, 3, ([*SMALL, *flags],), go_on=True, log=log, seconds=100
    )
    assert "rank 2 is gone after update" in log.read_text("utf-8")
    assert (server.failure, worker.failure, dead.status) == (None, None, -9)
    assert server.value["lost_workers"].keys() == {2}
    # Two gradients of the dead worker and all six of the other one.
    assert sum(server.value["staleness"].values()) == 8
    assert len(server.value["losses"]) == (8 if mode == "async" else 6)
    text = report.as_text({"server": report.combined([server.value, worker.value, dead.value])})
    assert "gone" in text and "gradient_difference" not in server.value


def test_a_server_with_one_worker_is_one_process(tmp_path):
    found = run_ranks(tmp_path, 2, "--strategy", "parameter-server")
    assert found["gradient_difference"] <= 1e-5
    assert found["loss_difference"] <= 1e-4


@pytest.mark.parametrize(("gradient", "loss"), [(2e-5, 0.0), (0.0, 2e-4), (float("nan"), 0.0)])
def test_other_numbers_than_those_of_one_process_fail_the_run(gradient, loss):
    found = {"strategy": "ddp", "gradient_difference": gradient, "loss_difference": loss}
    with pytest.raises(reference.RunError, match="ddp differs from one process"):
        report.require_equal(found)


def test_the_launchers_command_works_and_bf16_halves_what_is_gathered(tmp_path, reports):
    path = tmp_path / "report.json"
    flags = "--strategy fsdp --cpu --precision bf16 --max-steps 4 --report".split()
    args = [*TORCHRUN, "--nproc_per_node=2", "-m", "labs.strategies", *flags, str(path)]
    finished = run_command(args, cwd=ROOT)
    assert finished.status == 0, finished.out + finished.err
    mixed, full = json.loads(path.read_text("utf-8")), reports["FSDP"]
    sent, whole = (r["ranks"][0]["traffic"] for r in (mixed, full))
    assert sent["all-gather"][1] * 2 == whole["all-gather"][1]
    assert sent["reduce-scatter"] == whole["reduce-scatter"]  # gradients are summed in fp32
    assert held(mixed, "parameters") == held(full, "parameters")  # the shares stay fp32
    assert mixed["losses"] == pytest.approx(full["losses"][:4], abs=0.02)
    assert mixed["losses"] != full["losses"][:4]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--strategy ddp", "2 ranks or more"),
        ("--strategy one --ranks 2", "one process"),
        ("--strategy fsdp+tensor --ranks 5", "not even"),
        ("--strategy fsdp+tensor --ranks 2", "4 ranks or more"),
        ("--strategy tensor --ranks 2 --heads 1", "--heads 1: cannot be divided over 2 ranks"),
        ("--strategy pipeline --ranks 3", "--layers 2"),
        ("--strategy pipeline --ranks 2 --micro-batches 5", "--micro-batches 5"),
        ("--strategy ddp --ranks 2 --model qwen", "--model has no meaning"),
        ("--strategy ddp --ranks 2 --precision bf16", "--precision bf16"),
        ("--strategy tensor --ranks 2 --save x", "--save needs"),
        ("--strategy tensor --ranks 2 --load x", "--load needs"),
        ("--strategy one --load nowhere", "no complete sharded checkpoint"),
        ("--strategy one --global-batch 99", "--global-batch 99"),
        ("--strategy ddp --ranks 2 --global-batch 1", "--global-batch 1 for 2 parts"),
        ("--strategy ddp --ranks 2 --batch-size 4", "--batch-size has no meaning"),
        ("--strategy parameter-server --ranks 2 --kill-worker-after 1", "--ranks 3"),
        ("--strategy magic", "invalid choice"),
        ("--compare --output-dir wiki/images", "already holds strategies.png"),
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
    monkeypatch.setattr(compare, "run_ranks", None)  # nothing may be started
    assert says in refused(*flags.split())
