"""`labs.planner`: what it predicts is measured, counted or compared with published figures."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from quick import here
from torch.utils.checkpoint import CheckpointPolicy

import llm_ddp_parallel_training as reference
from labs import planner
from labs.planner import faults, memory
from labs.planner import time as planner_time
from labs.planner.__main__ import main
from labs.planner.choose import layouts
from labs.planner.models import model_of_size, tiny_model
from labs.planner.report import report
from labs.strategies.pipeline import Stage
from labs.strategies.tensor import split_matrices
from labs.strategies.traffic import nbytes

sys.path.insert(0, str(ROOT / "tests/benchmarks"))

import planner_memory
import planner_published

EXERCISE = "--params 13e9 --data 200GB --gpu a100-80gb --nodes 4 --gpus-per-node 8"


SHAPE = (64, 3, 4, 32)  # of a tiny model: width, layers, heads, tokens a sequence


def plan_of(flags: str) -> dict:
    return planner.make_plan(planner.flag_parser().parse_args(flags.split()))


@pytest.fixture(scope="module")
def exercise() -> dict:
    return plan_of(EXERCISE)


# ---------------------------------------------------------------- predicted, then measured

LIBC, LIBC_VERSION = platform.libc_ver()
GLIBC = tuple(map(int, LIBC_VERSION.split("."))) if LIBC == "glibc" else None


def peak_of(*flags: str) -> dict:
    """Predicted and measured memory of a training in a process of its own."""
    command = [sys.executable, planner_memory.__file__, *flags, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)[0]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_training_takes_the_memory_that_was_predicted():
    row = peak_of("--only", "tiny-256", "--without-heap")
    assert row["predicted"] == pytest.approx(row["measured"], rel=0.15), row


@pytest.mark.skipif(
    GLIBC is None or GLIBC >= (2, 38),
    reason="the share that the heap loses was measured with glibc 2.36; 2.38 reuses blocks better",
)
def test_a_training_takes_the_memory_that_was_predicted_with_what_the_heap_loses():
    # 400 MB: where blocks come to lie differs from run to run by 2 % of it, and by 10 % of 60 MB.
    row = peak_of("--only", "tiny-256")
    assert row["predicted"] == pytest.approx(row["measured"], rel=0.15), row


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("how", ["none", "full", "selective"])
def test_a_layer_with_adapters_keeps_the_values_that_the_plan_says(mixed, how):
    """Counted in transformers' Qwen2 layer with PEFT's adapters, as autograd keeps them."""
    width, heads, kv_heads, ffn = SMALL_QWEN
    few, many = (lora_values(layers, mixed, how) for layers in (2, 4))
    flags = f"--model qwen --d-model {width} --heads {heads} --kv-heads {kv_heads} --ffn {ffn}"
    run = planner.read_run(planner.flag_parser().parse_args(flags.split()))
    shares_keys = dataclasses.replace(run.machine, flash=mixed)  # PyTorch's CPU kernel, in 16 bits
    run = dataclasses.replace(run, mixed=mixed, machine=shares_keys)
    _, kept = memory.layer_values(run, planner.Layout("ddp", 1, checkpointing=how))
    assert kept == pytest.approx((many - few) / 2, rel=0.01)


SMALL_QWEN = (256, 8, 2, 1536)  # width, heads, key-value heads, feed-forward width


def lora_values(layers: int, mixed: bool, how: str) -> float:
    """Values a token that so many layers keep from the forward pass, in units of the precision."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    width, heads, kv_heads, ffn = SMALL_QWEN
    config = Qwen2Config(
        vocab_size=300, hidden_size=width, intermediate_size=ffn, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads,
    )  # fmt: skip
    flags = ["--gradient-checkpointing", how] if how != "none" else []
    settings = reference.parse_settings(["--model=qwen", "--cpu", *flags])
    base = Qwen2ForCausalLM(config).to(torch.bfloat16 if mixed else torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        kept = Kept(base)
        patch.setattr(reference, "keep_products", kept.watched(reference.keep_products))
        reference.add_lora(base, settings).train()
        if how != "none":  # what a checkpointed layer is given, no hook sees
            for layer in base.model.layers:
                layer.register_forward_pre_hook(lambda layer, inputs: kept(inputs[0]))
        ids = torch.randint(0, 300, (2, 128))
        hooks = torch.autograd.graph.saved_tensors_hooks(kept, lambda tensor: tensor)
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed), hooks:
            base.model(input_ids=ids)
    return sum(kept.sizes.values()) / ids.numel() / (2 if mixed else 4)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_layer_of_the_tiny_model_keeps_the_values_that_the_plan_says(dropout):
    width, _, heads, seq_len = SHAPE
    counted = []
    for layers in (1, 3):
        model = reference.TinyCausalTransformer(width, layers, heads, dropout, seq_len).train()
        kept = Kept(model)
        ids = torch.randint(0, 255, (2, seq_len))
        with torch.autograd.graph.saved_tensors_hooks(kept, lambda tensor: tensor):
            model(ids, ids)
        counted.append(sum(kept.sizes.values()) / 4 / ids.numel())
    shape = tiny_model(width, 1, heads, seq_len)
    machine = planner.read_run(planner.flag_parser().parse_args([])).machine
    run = planner.Run(shape, machine, seq_len, 2, mixed=False, dropout=dropout > 0)
    _, said = memory.layer_values(run, planner.Layout("ddp", 1))
    assert said == pytest.approx((counted[1] - counted[0]) / 2, rel=0.05)


class Kept:
    """Counts what is kept for the backward pass, each storage once, a model's weights never."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.sizes, self.alive = model, {}, []

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        weights = {p.untyped_storage().data_ptr() for p in self.model.parameters()}
        if storage.data_ptr() not in weights:
            self.sizes[storage.data_ptr()] = storage.nbytes()
            self.alive.append(tensor)
        return tensor

    def watched(self, contexts):
        """Counts the results that selective checkpointing keeps, too."""

        def build():
            forward, again = contexts()
            policy = forward.policy_fn

            def watch(context, *operator, **options):
                verdict = policy(context, *operator, **options)
                if verdict == CheckpointPolicy.MUST_SAVE:
                    function, *given = operator  # called again: PyTorch 2.11 does not hand over
                    result = function(*given, **options)  # what it returned
                    self(result[0] if isinstance(result, tuple) else result)
                return verdict

            forward.policy_fn = watch
            return forward, again

        return build


def test_every_flag_of_the_reference_can_be_pasted():
    ours = planner.flag_parser()._option_string_actions
    for flag, action in reference.flag_parser()._option_string_actions.items():
        assert flag in ours and ours[flag].nargs == action.nargs, flag


def test_a_dry_run_names_the_command_that_estimates_memory():
    assert "python -m labs.planner" in here("--model", "tiny", "--dry-run").out


# ---------------------------------------------------------------- counted


@contextlib.contextmanager
def two_ranks_of_which_we_are_one():
    """A process group of two whose messages go nowhere: what a rank holds needs no other rank."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def one_update(model: torch.nn.Module) -> tuple[int, int, int]:
    """Bytes of parameters, gradients and AdamW's means that this process holds after a step."""

    def held(tensors):
        tensors = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
        return sum(t.numel() * t.element_size() for t in tensors)

    parameters = list(model.parameters())
    ids = torch.randint(0, 255, (2, 16))
    model(ids, ids).backward()
    optimizer = torch.optim.AdamW(parameters)
    optimizer.step()
    means = [s[k] for s in optimizer.state.values() for k in ("exp_avg", "exp_avg_sq")]
    return held(parameters), held(p.grad for p in parameters), held(means)


def state_of(kind: str, shape: planner.Model, **division: int) -> tuple[int, int, int]:
    """The same by the planner."""
    layout = planner.Layout(kind, 2, **division)
    run = planner.Run(shape, None, 16, 2, mixed=False)
    own = shape.part(layout.tensor, layout.pipeline)
    state = memory.state_bytes(own, own, run, layout)
    return state["weights"], state["gradients"], state["optimizer"]


def tiny() -> reference.TinyCausalTransformer:
    width, layers, heads, seq_len = SHAPE
    return reference.TinyCausalTransformer(width, layers, heads, 0.0, seq_len)


def test_ddp_sends_and_holds_the_bytes_that_the_plan_says():
    sent = []

    def hook(_, bucket):
        sent.append(bucket.buffer().numel() * bucket.buffer().element_size())
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    shape = tiny_model(*SHAPE)
    with two_ranks_of_which_we_are_one():
        model = torch.nn.parallel.DistributedDataParallel(tiny(), gradient_as_bucket_view=True)
        model.register_comm_hook(None, hook)
        held = one_update(model)
    assert held == state_of("ddp", shape)
    flags = "--model tiny --d-model 64 --layers 3 --seq-len 32 --gpus-per-node 2"
    assert plan_of(flags)["gradient_bytes"] == sum(sent)


def test_fsdp_over_two_ranks_holds_the_bytes_that_the_plan_says():
    from torch.distributed.fsdp import fully_shard

    shape = tiny_model(*SHAPE)
    with two_ranks_of_which_we_are_one():
        model = tiny()
        for layer in model.encoder.layers:
            fully_shard(layer)
        fully_shard(model)
        held = one_update(model)
    assert held == state_of("fsdp", shape, shard=2)
    assert held == tuple(n // 2 for n in state_of("ddp", shape))


def test_tensor_and_pipeline_ranks_hold_the_bytes_that_the_plan_says():
    from torch.distributed.device_mesh import init_device_mesh

    shape = tiny_model(*SHAPE)
    with two_ranks_of_which_we_are_one():
        model = split_matrices(tiny(), init_device_mesh("cpu", (2,)))
        held = nbytes(model.parameters())
    assert held == state_of("ddp", shape, tensor=2)[0]
    for stage in (0, 1):
        held = nbytes(Stage(tiny(), stage, 2).parameters())
        assert held == 4 * shape.part(pipeline=2, stage=stage)


def test_parameter_counts_are_those_of_the_models():
    """As in the models' own files; Qwen's two were counted in transformers and PEFT."""
    counts = {name: model.parameters for name, model in planner.MODELS.items()}
    assert counts["qwen2.5-0.5b"] == 494_032_768
    assert planner.MODELS["qwen2.5-0.5b"].lora(8, ("q_proj", "v_proj")) == 540_672
    assert counts["llama-2-7b"] == 6_738_415_616
    assert counts["llama-2-13b"] == 13_015_864_320
    assert counts["llama-2-70b"] == 68_976_648_192
    assert counts["llama-3.1-8b"] == 8_030_261_248
    assert counts["llama-3.1-70b"] == 70_553_706_496
    assert counts["llama-3.1-405b"] == 405_853_388_800
    for size in (1e9, 13e9, 70e9, 175e9):
        assert model_of_size(size).parameters == pytest.approx(size, rel=1e-3)


# ---------------------------------------------------------------- published

# Where the planner misses by more than 15 %, and how far it is off; wiki/Planning.md says why.
MISSES = {
    ("Llama 2 13B, 2T tokens", "hours"): 0.83,
    ("Llama 3 70B, 64 A100, full", "speed"): 0.81,
    ("Llama 3.1 8B, 128 H100, selective", "memory"): 1.18,
}


@pytest.mark.parametrize("one", planner_published.RUNS, ids=lambda one: f"{one.run}, {one.figure}")
def test_what_is_printed_for_a_published_run_is_what_it_measured(one):
    ratio = one.predicted() / one.value
    if (one.run, one.figure) in MISSES:
        assert ratio == pytest.approx(MISSES[one.run, one.figure], abs=0.01)
    else:
        assert 0.85 <= ratio <= 1.15


@pytest.mark.parametrize(("gpu", "mean"), [("a100-80gb", 0.78), ("h100-80gb", 0.92)])
def test_one_law_holds_for_models_of_all_widths(gpu, mean):
    """MPT of 125M to 30B: another framework, so faster, but equally so at each width."""
    ratios = planner_published.by_width(gpu).values()
    assert statistics.geometric_mean(ratios) == pytest.approx(mean, abs=0.01)
    assert all(ratio == pytest.approx(mean, rel=0.1) for ratio in ratios)


@pytest.mark.parametrize("jitter", [0.01, 0.02])
def test_weak_scaling_of_fsdp_is_that_of_torchtitan(jitter):
    """Llama 3.1 8B, 2 × 8192 tokens a GPU, H100 with 400 Gb/s each: 5,762 tokens/s a GPU on 8 and
    5,605 on 128 (97.3 %); with torch.compile 6,667 and 6,514 (97.7 %).
    pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3.
    """
    flags = "--model llama-3.1-8b --gpu h100-80gb --nodes 16 --seq-len 8192"
    run = planner.read_run(planner.flag_parser().parse_args(flags.split()))
    run = dataclasses.replace(run, batch=2, jitter=jitter)
    layout = planner.Layout("fsdp", 128, shard=128)
    ratio = planner_time.efficiency(run, layout, 128) / planner_time.efficiency(run, layout, 8)
    assert ratio == pytest.approx(5605 / 5762, abs=0.03)
    assert ratio == pytest.approx(6514 / 6667, abs=0.03)

    # And what dividing over 128 instead of 8 saves: 82.4 - 67.0 GiB in the same tables.
    few, many = (memory.memory(run, planner_time.resized(layout, n))["total"] for n in (8, 128))
    assert (few - many) / 2**30 == pytest.approx(82.4 - 67.0, rel=0.15)


# ---------------------------------------------------------------- faults and checkpoints


def simulated_share(interval: float, blocking: float, behind: float) -> float:
    """Share of the time that is training in runs of 30 days with random failures.

    A checkpoint stops the work for `blocking` seconds after every `interval` of it and counts when
    it has been written, `behind` seconds later; a failure costs `RESTART` seconds and what was done
    since the last checkpoint that counts.
    """
    chance, wall, done = random.Random(0), 0.0, 0.0
    for _ in range(20):
        left = 30 * 86400.0
        while left > 0:
            until_failure = chance.expovariate(1 / BETWEEN)
            to_the_end = left + blocking * (left // interval)
            if to_the_end <= until_failure:
                wall, done, left = wall + to_the_end, done + left, 0.0
            else:
                saved = max(0.0, until_failure - behind) // (interval + blocking) * interval
                wall, done, left = wall + until_failure + RESTART, done + saved, left - saved
    return done / wall


BETWEEN, RESTART = 4 * 3600.0, 300.0  # seconds


def test_the_interval_is_the_one_that_loses_least_in_a_simulation():
    cost = 60.0
    best = faults.daly(cost, BETWEEN)
    assert best == pytest.approx(math.sqrt(2 * cost * BETWEEN), rel=0.05)  # a small cost
    useful = simulated_share(best, cost, 0.0)
    assert useful > simulated_share(best / 4, cost, 0.0)
    assert useful > simulated_share(best * 4, cost, 0.0)
    assert useful == pytest.approx(faults.useful_share(best, cost, BETWEEN, RESTART), abs=0.01)


def test_a_checkpoint_in_the_background_counts_only_when_it_is_written(exercise):
    write, copy = 600.0, 5.0
    said = faults.useful_share(900.0, copy, BETWEEN, RESTART + write)
    assert simulated_share(900.0, copy, write) == pytest.approx(said, abs=0.01)
    assert simulated_share(900.0, copy, 0.0) > said + 0.03  # what forgetting it would promise
    way, saved = exercise["checkpoints"]["ways"]["background"], exercise["checkpoints"]
    lost = way["interval_seconds"] / 2 + saved["write_seconds"] + 600
    assert way["loss_per_failure_seconds"] == pytest.approx(lost)


def test_more_nodes_write_a_checkpoint_in_less_time(exercise):
    twice = plan_of(EXERCISE.replace("--nodes 4", "--nodes 8"))["checkpoints"]["write_seconds"]
    assert exercise["checkpoints"]["write_seconds"] == pytest.approx(2 * twice)


def test_more_gpus_wait_longer_for_the_slowest_and_fail_more_often(exercise):
    rows = exercise["faults"]
    assert [one["gpus"] for one in rows] == [32, 1024, 4096, 16384]
    assert all(a["slowdown"] < b["slowdown"] for a, b in itertools.pairwise(rows))
    # Llama 3: 419 unexpected interruptions in 54 days on 16,384 GPUs, over 90 % useful time.
    assert rows[-1]["failures_per_day"] == pytest.approx(419 / 54, rel=0.05)
    assert rows[-1]["useful_share"] > 0.9


def test_the_slowest_rank_costs_what_it_costs_in_a_simulation():
    chance, gpus, spread, slow_share, slow_by = random.Random(0), 1024, 0.02, 0.0005, 0.1
    steps = []
    for _ in range(400):
        times = [chance.gauss(1, spread) for _ in range(gpus)]
        some_slow = any(chance.random() < slow_share for _ in range(gpus))
        steps.append(max(times) + slow_by * some_slow)
    said = faults.slowdown(gpus, spread, slow_share, slow_by)
    assert statistics.mean(steps) - 1 == pytest.approx(said - 1, rel=0.06)


def test_waiting_for_the_slowest_averages_over_the_micro_batches_of_an_update():
    one, many = (
        plan_of(f"{EXERCISE} --strategy fsdp --tensor 1 --pipeline 1 --batch-size 1 "
                f"--grad-accum {accum} --gradient-checkpointing none")["step"]
        for accum in (1, 16)
    )  # fmt: skip
    share = [step["waiting for the slowest"] / step["compute"] for step in (one, many)]
    assert share[0] == pytest.approx(4 * share[1])


def test_a_checkpoint_to_resume_holds_weights_and_both_means(exercise):
    sizes, parameters = exercise["checkpoints"]["sizes"], exercise["model"]["parameters"]
    assert sizes["to resume (weights and AdamW, fp32)"] == 12 * parameters
    assert exercise["checkpoints"]["stored_bytes"] == 4 * 12 * parameters  # 3 kept, and the best
    for way in exercise["checkpoints"]["ways"].values():
        assert way["interval_seconds"] >= exercise["checkpoints"]["write_seconds"] * 0.99


# ---------------------------------------------------------------- the exercise


def test_the_exercise_adds_up(exercise):
    e, gpus = exercise, exercise["machine"]["gpus"]
    assert gpus == 32 and e["layout"]["name"].startswith("fsdp 32")
    d, t, batch = e["data"], e["time"], e["batch"]
    assert 4 * d["node_bytes"] == pytest.approx(200e9) and 8 * d["rank_bytes"] == d["node_bytes"]
    assert d["tokens"] == 200e9 / d["bytes_per_token"]
    assert (
        batch["update_tokens"] == batch["sequences"] * batch["seq_len"] * batch["accumulation"] * 32
    )
    assert t["updates"] == math.ceil(d["tokens"] / batch["update_tokens"])
    assert t["seconds"] == pytest.approx(t["updates"] * e["step"]["total"], rel=1e-3)
    useful = e["checkpoints"]["ways"]["background"]["useful_share"]
    assert t["days"] * 86400 * useful == pytest.approx(t["seconds"])
    assert t["gpu_hours"] == pytest.approx(32 * t["days"] * 24)
    assert t["cost"] == pytest.approx(2 * t["gpu_hours"])
    flops = 6 * 13e9 * d["tokens"]  # the rule of thumb, without attention
    assert t["seconds"] > flops / (32 * 312e12 * 0.62)

    m, parameters = e["memory"], e["model"]["parameters"]
    assert sum(v for k, v in m.items() if k != "total") == m["total"] <= 80e9
    states = m["weights"] + m["gradients"] + m["optimizer"]
    assert 32 * states == pytest.approx(16 * parameters, rel=1e-6)
    assert e["step"]["total"] == pytest.approx(
        sum(v for k, v in e["step"].items() if k not in ("total", "communication"))
    )
    rows = {one["name"].split(" (")[0]: one for one in e["layouts"]}
    assert rows["ddp 32"]["problem"] == "too big" and rows["fsdp 32"]["chosen"]


def test_text_json_and_picture_need_no_torch(tmp_path):
    picture = tmp_path / "memory.png"
    code = (
        "import sys; sys.modules['torch'] = None; from labs.planner.__main__ import main; "
        "main(sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *EXERCISE.split(), "--json", "--picture", picture],
        capture_output=True, text=True, timeout=60, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["layout"]["name"].startswith("fsdp 32")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_wiki_page_shows_what_the_planner_says(exercise):
    page = (ROOT / "wiki/Planning.md").read_text("utf-8")
    assert f"python -m labs.planner {EXERCISE}\n" in page
    shown = page.split("```text\n")[1].split("\n```")[0].split("\n\n[…]\n\n")
    assert len(shown) == 2 and all(part in report(exercise) for part in shown)
    for line in planner_published.table():
        assert line in page, line


def test_the_report_ends_with_its_conclusion_and_fits_the_screen(exercise):
    for flags in (EXERCISE, planner_published.LLAMA_405B + " --nodes 2048 --tokens 15e12", ""):
        text = report(plan_of(flags))
        lines = text.splitlines()
        assert len(lines) <= 60 and max(map(len, lines)) <= 100
        end = " ".join(text.rpartition("\n\n")[2].splitlines())
        assert end.startswith("Conclusion: ") and end.count(". ") <= 2 and end.endswith(".")
    assert len(report(plan_of(EXERCISE + " --all")).splitlines()) > 100


def test_a_layout_that_exceeds_the_global_batch_is_refused():
    flags = "--model llama-2-7b --nodes 2048 --seq-len 4096 --global-batch 16e6"
    plan = plan_of(flags)
    assert plan["batch"]["update_tokens"] <= 16e6
    rows = [one for one in plan["layouts"] if one["name"].startswith(("fsdp 16384", "ddp 16384"))]
    assert rows and all(one["problem"] == "large batch" for one in rows)
    with pytest.raises(planner.PlanError, match="--global-batch"):
        plan_of(f"{flags} --tensor 1 --pipeline 1")


def test_no_layout_is_too_big_and_no_faster_in_one_report(exercise):
    for one in exercise["layouts"]:
        assert (one["problem"] == "too big") == (one["memory"]["total"] > 80e9)


def test_the_share_of_a_step_that_a_pipeline_idles_is_the_formulas():
    """(p − 1)/(m + p − 1) for 1F1B; v chunks of layers a rank divide the filling by v."""
    for chunks in (1, 2, 4):
        step = plan_of(
            f"--model gpt-18b --gpu a100-80gb --nodes 4 --pipeline 4 --chunks {chunks} --tensor 8 "
            "--batch-size 1 --grad-accum 8 --jitter 0 --network infiniband-ndr"
        )["step"]
        idle = step["pipeline bubble"]
        working = step["compute"] + step["tensor communication"]
        assert idle / (idle + working) == pytest.approx(3 / (chunks * 8 + 3))


def test_a_recomputed_layer_is_there_once_however_many_micro_batches_are_in_flight():
    args = planner.flag_parser().parse_args("--model gpt-1t --nodes 384".split())
    run = dataclasses.replace(planner.read_run(args), accum=512)
    layout = planner.Layout("zero1", 6, 6, 8, 64, checkpointing="full")
    one_layer, kept = memory.layer_values(run, layout)
    bytes_kept, _ = memory.activation_bytes(run, layout)
    layers = 2  # of a stage; the first has 64 micro-batches in flight
    assert bytes_kept == pytest.approx(2 * run.tokens * (layers * kept * 64 + one_layer - kept))


def test_sequence_parallelism_divides_what_tensor_ranks_would_all_hold():
    run = planner.read_run(planner.flag_parser().parse_args(["--model", "gpt-18b"]))
    plain, divided = (
        memory.layer_values(run, planner.Layout("ddp", 1, tensor=8, sequence=sequence))[0]
        for sequence in (False, True)
    )
    width = 6144
    assert plain == (4 + 12 / 8) * width and divided == 16 / 8 * width


def test_no_layout_is_listed_twice_with_other_figures():
    names = [one.name for one in layouts_of("--params 7e9 --nodes 16 --gpus-per-node 1")]
    assert len(names) == len(set(names))


def layouts_of(flags: str) -> list[planner.Layout]:
    """All layouts that are compared."""
    args = planner.flag_parser().parse_args(flags.split())
    return layouts(planner.read_run(args), args)


def test_a_pipeline_without_replicas_is_not_said_to_all_reduce():
    text = report(plan_of("--params 7e9 --nodes 4 --gpus-per-node 1 --pipeline 4"))
    assert "plain DDP would all-reduce" in text and "  DDP all-reduces" not in text


def test_a_terminal_without_the_signs_gets_the_plan_all_the_same():
    done = subprocess.run(
        [sys.executable, "-m", "labs.planner"], capture_output=True, timeout=60, cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.returncode == 0 and b"\\xd7" in done.stdout, done.stderr


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--nodes 0", "--nodes: '0' is not a whole number of at least 1"),
        ("--params 13e9 --gpu a1000", "h100-80gb"),
        ("--model gpt-5", "llama-2-7b"),
        ("--params 13e9 --heads 7 --tensor 4", "--tensor 4 does not divide the 7 heads"),
        ("--params 13e9 --gpu t4-16gb --nodes 1", "nothing fits"),
        ("--params 13e9 --model tiny", "--params contradicts --model"),
        ("--params 1e6", "too few for a vocabulary of 32,000"),
        ("--params 13e9 --pipeline 3", "must divide the GPUs"),
        ("--model qwen --lora-targets q_prj", "q_proj, k_proj"),
        ("--data lots", "'lots' is not a number"),
        ("--no-such-flag", "--no-such-flag"),
        ("--params 13e9 --strategy hsdp --nodes 8 --gpus-per-node 1", "more than one of both"),
        ("--params 13e9 --nodes 4 --picture .", "--picture '.': give a file name"),
        ("--params 13e9 --nodes 4 --picture memory", "--picture 'memory': give a file name"),
        ("--params 13e9 --nodes 4 --global-batch 1000", "--global-batch 1000 is too small"),
        ("--model gpt-18b --chunks 50", "--chunks 50"),
    ],
)
def test_nonsense_is_one_clear_line(flags, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(flags.split())
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and err.startswith("error: ") and said in err
