"""The classic bugs: each wrong version shows its symptom, each right one does not."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
import time
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, Finished, clean_environment, run_command

import llm_ddp_parallel_training as ddp
from labs import break_it
from labs.break_it import __main__ as lab
from labs.break_it import detectors
from labs.break_it.gradients import ClipBeforeUnscale
from labs.break_it.weights import SameDropout
from labs.shared.ranks import run_ranks

# What a user sees as a number: (wrong version, right version), as conditions.
SYMPTOMS = {
    "no-set-epoch": (lambda x: x == 1, lambda x: x < 0.5),
    "no-sampler": (lambda x: x == 2, lambda x: x == 1),
    "mean-of-means": (lambda x: x > 0.1, lambda x: x < 1e-6),
    "mean-of-micro-batches": (lambda x: x > 0.1, lambda x: x < 1e-6),
    "sum-not-mean": (lambda x: abs(x - 2) < 1e-5, lambda x: abs(x - 1) < 1e-5),
    "no-sync-on-last": (lambda x: x > 1e-5, lambda x: x == 0),
    "forward-in-no-sync": (lambda x: x > 1e-5, lambda x: x == 0),
    "past-the-wrapper": (lambda x: x > 1e-5, lambda x: x == 0),
    "clip-before-unscale": (lambda x: abs(x * 655_360 - 1) < 1e-3, lambda x: abs(x - 0.1) < 1e-5),
    "different-weights": (lambda x: x > 1e-2, lambda x: x == 0),
    "same-dropout": (lambda x: x == 1, lambda x: 0.64 < x < 0.72),  # 0.8² + 0.2² = 0.68
    "same-worker-noise": (lambda x: x == 1, lambda x: 0.64 < x < 0.72),
    "unfrozen-late": (lambda x: x > 1e-5, lambda x: x == 0),
    "batchnorm-per-rank": (lambda x: x > 0.01, lambda x: x < 1e-6),
    "scheduler-ahead": (lambda x: 0 < x < 8, lambda x: x == 0),
    "lr-per-micro-batch": (lambda x: x == 7, lambda x: x == 0),
    "validation-padding": (lambda x: x > 1e-4, lambda x: x < 1e-7),
    "module-keys": (lambda x: x == 10, lambda x: x == 0),
    "every-rank-saves": (lambda x: x >= 5, lambda x: x == 0),
    # ranks that wait for ever, or get an error
    "unequal-batches": (lambda x: x == 2, lambda x: x == 0),
    "rank-0-collective": (lambda x: x == 2, lambda x: x == 0),
    "validate-through-wrapper": (lambda x: x == 2, lambda x: x == 0),
    "one-rank-decides": (lambda x: x == 2, lambda x: x == 0),
    "unused-on-one-rank": (lambda x: x == 2, lambda x: x == 0),
    "static-graph-no-sync": (lambda x: x == 2, lambda x: x == 0),
    "detached-bucket-views": (lambda x: x == 2, lambda x: x == 0),
}

ON_PAPER = {"no-set-device"}  # needs two GPUs

# Of what hangs: where rank 0 waits, in its own line of code; rank 1 is at the end of the job.
WAITS = {
    "unequal-batches": ("DDP's all-reduce of the gradients", "model(**batch).backward()"),
    "one-rank-decides": (
        "DDP's agreement on the order of its buckets",
        "model(**batch).backward()",
    ),
    "rank-0-collective": ("all_reduce", "dist.all_reduce(loss)"),
    "validate-through-wrapper": ("DDP's broadcast of the buffers", "float(model(**batch))"),
}


@pytest.fixture(scope="module")
def everything(tmp_path_factory) -> tuple[dict, str, int, Path]:
    """`--all` run once: the findings, the report, the lab's process group, the picture."""
    path = tmp_path_factory.mktemp("findings") / "findings.json"
    process = subprocess.Popen(
        [sys.executable, "-m", "labs.break_it", "--all", "--json", path,
         "--picture", path.with_suffix(".png")], cwd=ROOT, text=True,
        encoding="utf-8", stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=clean_environment(), start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=180)
    finally:
        process.kill()
    assert process.returncode == 0, out + err
    return json.loads(path.read_text("utf-8")), out, process.pid, path.with_suffix(".png")


def test_all_bugs_are_made_and_detected(everything):
    findings, out, *_ = everything
    assert findings.keys() == SYMPTOMS.keys() == break_it.BUGS.keys() - ON_PAPER
    assert "\n26 of 26 bugs made and detected." in out


def test_six_of_them_are_drawn(everything):
    from PIL import Image

    with Image.open(everything[3]) as picture:
        picture.load()
        assert picture.width > 1000


def test_it_ends_with_a_table_of_all_bugs(everything):
    out = everything[1]
    rows = out.partition("\nAll bugs\n")[2].splitlines()
    parts = [line.split()[:2] for line in rows if line and not line.startswith(" " * 30)]
    names = [words[0] for words in parts if words[0] in break_it.BUGS]
    assert names == list(break_it.BUGS)
    for name in names:
        at = next(i for i, row in enumerate(rows) if row.startswith(f"{name} "))
        heads = [row[26:34].strip() for row in rows[at:] if row[26:34].strip()][:4]
        assert heads == ["wrong", "symptom", "detector", "right"]
    assert out.splitlines()[0].endswith("about a minute")  # and it says how long it takes


@pytest.mark.parametrize("name", SYMPTOMS)
def test_the_wrong_version_shows_its_symptom_and_the_right_one_does_not(everything, name):
    found = everything[0][name]
    shows, is_fine = SYMPTOMS[name]
    assert shows(found["wrong"]["number"]), found["wrong"]
    assert is_fine(found["right"]["number"]), found["right"]


@pytest.mark.parametrize("name", SYMPTOMS)
def test_the_detector_speaks_to_the_wrong_version_and_is_silent_on_the_right_one(everything, name):
    found = everything[0][name]
    assert found["wrong"]["detected"]
    assert found["right"]["detected"] is None


CLAIMS = {7: "no-sync-on-last", 8: "mean-of-means"}  # sections of wiki/Understanding-Gradients.md


def shows(text: str, measured: float) -> bool:
    """Whether the text holds this figure, in one of the ways in which pages write figures."""
    ways = [f"{measured:.0%}".replace("%", " %"), f"{measured:.2f}", f"{measured:.2g}"]
    ways += [re.sub(r"e-0?", "e-0?", f"{measured:.{digits}e}") for digits in (0, 1)]
    return any(re.search(rf"(?<![\d.]){way}(?![\d.]*\d)", text) for way in ways)


def test_the_figures_of_the_page_on_bugs_are_those_that_the_lab_measures(everything):
    page = (ROOT / "wiki" / "Common-Bugs.md").read_text("utf-8")
    rows = {row.split("`")[1]: row for row in re.findall(r"^\| `.*", page, re.MULTILINE)}
    for name in SYMPTOMS.keys() - {"every-rank-saves"}:  # which is a race
        wrong, _, right = rows[name].split(" | ")[2].rpartition("; ")
        wrong = wrong.replace("both ranks", "2 ranks")
        assert shows(wrong, everything[0][name]["wrong"]["number"]), (name, wrong)
        number = everything[0][name]["right"]["number"]
        right = right.replace("once", "1").replace("none", "0")
        assert shows(right, number) or (number < 1e-6 and "-" in right), name


def test_the_figures_of_the_claims_are_those_that_the_lab_measures(everything):
    page = (ROOT / "wiki" / "Understanding-Gradients.md").read_text("utf-8")
    for claim, name in CLAIMS.items():
        (section,) = re.findall(rf"^## {claim}\. .*?(?=^## )", page, re.MULTILINE | re.DOTALL)
        number = section.partition("*Number:*")[2]
        assert shows(number, everything[0][name]["wrong"]["number"]), (claim, number)


@pytest.mark.parametrize("name", WAITS)
def test_of_a_hang_the_collective_and_the_line_are_named_for_each_rank(everything, name):
    first, second = everything[0][name]["wrong"]["symptom"].split("; ")
    collective, line = WAITS[name]
    assert first.startswith(f"rank 0 waits in {collective}, at `")
    assert line in first
    assert second == 'rank 1 waits in all_gather, at `gathered("the end of the job")`'


def test_mismatched_collectives_are_named_with_their_ranks(everything):
    message = everything[0]["rank-0-collective"]["wrong"]["detected"]
    assert "OpType=ALLREDUCE" in message
    assert "OpType=ALLGATHER" in message


@pytest.mark.parametrize("name", break_it.BUGS)
def test_the_code_that_is_printed_is_the_code_that_runs(everything, name):
    out = everything[1]
    section = out[out.index(f"\n{name}\n=") :].partition("\nsymptom\n")[0].splitlines()
    for mark, version in (("-", "wrong"), ("+", "right")):
        lines = [line[6:] for line in section if line.startswith((f"    {mark} ", "      "))]
        source = inspect.getsource(getattr(break_it.BUGS[name], version))
        shown = textwrap.dedent(source).splitlines()
        assert lines[-len(shown) :] == shown
        for helper in helpers_of(getattr(break_it.BUGS[name], version)):
            assert inspect.getsource(helper).splitlines()[0] in lines


def helpers_of(function) -> list:
    """What a function uses of the lab itself."""
    used = [function.__globals__.get(name) for name in function.__code__.co_names]
    return [x for x in used if getattr(x, "__module__", "").startswith("labs.")]


@pytest.mark.parametrize("name", break_it.BUGS)
@pytest.mark.parametrize("part", ["wrong", "right", "detector"])
def test_the_code_can_be_copied_it_needs_nothing_but_pytorch_and_what_is_printed(name, part):
    functions = [getattr(break_it.BUGS[name], part)]
    for function in functions:
        for used in map(function.__globals__.get, function.__code__.co_names):
            home = getattr(used, "__module__", None) or getattr(used, "__name__", "")
            if home.startswith("labs.break_it"):
                functions += [used] if inspect.isfunction(used) else []
            elif used is not ddp.TinyCausalTransformer:  # a model, to be replaced by another
                assert home.split(".")[0] != ddp.__name__, (used, home)
                assert used is None or home, f"{used} is a constant of the module"


def test_no_process_is_left_behind(everything):
    until = time.monotonic() + 30
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < until:
            os.killpg(everything[2], 0)
            time.sleep(0.1)


def unequal_draws(seeded_by_rank: bool) -> str | None:
    """On a rank: what the detector of equal dropout says when rank 1 has drawn once more."""
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank() if seeded_by_rank else 0)
    torch.rand(1 + dist.get_rank())
    try:
        SameDropout.detector()
    except AssertionError as error:
        return str(error)


def test_equal_seeds_are_found_though_the_ranks_drew_unequal_amounts():
    for said in run_ranks(unequal_draws, 2, (False,)):
        assert said == "the ranks draw from the seeds [0, 0]"
    assert run_ranks(unequal_draws, 2, (True,)) == [None, None]


class Foreign(torch.nn.Module):
    """A model of another library: other inputs, and an object that has its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> types.SimpleNamespace:
        return types.SimpleNamespace(loss=(self.layer(x) - y).square().mean())


def judge_foreign(rows: int) -> list[str | None]:
    """On a rank: what both shared detectors say when rank 0 has so many rows and rank 1 has 4."""
    dist.init_process_group("gloo")
    said = []
    for wrap in (True, False):
        model = torch.nn.parallel.DistributedDataParallel(Foreign()) if wrap else Foreign()
        torch.manual_seed(dist.get_rank())
        count = rows if dist.get_rank() == 0 else 4
        batch = {"x": torch.randn(count, 3), "y": torch.randn(count, 1)}
        model(**batch).loss.backward()
        for detect in (
            lambda model, _: detectors.same_gradients(model), detectors.like_one_process,
        ):  # fmt: skip
            try:
                said.append(detect(model, [batch]))
            except AssertionError as error:
                said.append(str(error))
    return said


@pytest.mark.parametrize("rows", [4, 1])
def test_the_shared_detectors_take_any_model(rows):
    for same, alike, same_bare, alike_bare in run_ranks(judge_foreign, 2, (rows,)):
        assert same is None  # DDP averages
        assert (alike is None) == (rows == 4)  # but a mean of unequal means is off
        assert "layer.weight: norm" in same_bare
        assert "off that of the joined batch" in alike_bare


@pytest.mark.parametrize("scale", [1.0, 2.0, 65536.0])
@pytest.mark.parametrize("limit", [1e-3, 1e9])
def test_clipping_is_judged_by_the_unscaled_norm_whatever_the_scale(scale, limit):
    """A scale of 1 changes nothing, so there is nothing to find; any other is found."""
    for version in ("wrong", "right"):
        torch.manual_seed(0)
        model = ddp.TinyCausalTransformer(d_model=8, heads=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        batch = ddp.tiny_collator([(0, "some text")], seq_len=16)
        batch = {"input_ids": batch["input_ids"], "labels": batch["labels"]}
        outcome = getattr(ClipBeforeUnscale, version)(model, optimizer, scaler, batch, limit)
        expected = pytest.raises(AssertionError, match="clipping left")
        with expected if version == "wrong" and scale > 1 else contextlib.nullcontext():
            ClipBeforeUnscale.detector(*outcome)


def here(capsys, *flags: str) -> Finished:
    """The lab in this process."""
    status = 0
    try:
        lab.main(list(flags))
    except SystemExit as end:
        status = end.code
    return Finished(status, *capsys.readouterr())


@pytest.mark.parametrize("flags", [(), ("--list",)], ids=str)
def test_the_list_has_a_line_for_each_bug(capsys, flags):
    finished = here(capsys, *flags)
    assert finished.status == 0
    lines = [line for line in finished.out.splitlines() if not line.startswith(" ")]
    assert [line.split()[0] for line in lines[: len(break_it.BUGS)]] == list(break_it.BUGS)


@pytest.mark.parametrize(
    "flags",
    [
        ("--bug",),
        ("--bug", "nope"),
        ("--all", "--list"),
        ("--no",),
        ("--all", "--json", "no/where.json"),
        ("--all", "--json", "."),
    ],
    ids=" ".join,
)
def test_nonsense_is_one_clear_line(capsys, flags):
    finished = here(capsys, *flags)
    assert finished.status == 2
    (line,) = finished.err.splitlines()
    assert line.startswith("error: ")
    if "nope" in flags:
        assert all(name in line for name in break_it.BUGS)


def test_under_a_launcher_it_says_how_to_start_it():
    command = [sys.executable, "-m", "labs.break_it", "--list"]
    finished = run_command(command, cwd=ROOT, env=clean_environment(RANK="0", WORLD_SIZE="2"))
    assert finished.status == 2
    assert finished.err.splitlines() == [
        "error: the lab starts its own ranks: run it with python -m labs.break_it"
    ]
