"""All of this project that needs a CUDA GPU: checked and measured, in under eight minutes.

    bash tests/gpu/check.sh                            everything, on the first GPU
    bash tests/gpu/check.sh --only resume              the checks with this in their names
    bash tests/gpu/check.sh --base-model FOLDER        Qwen2.5-0.5B itself, not random weights
    bash tests/gpu/check.sh --device cpu --layers 2    the rehearsal, where there is no GPU

Each check is a function that yields rows. It runs in a process of its own with a time limit, so
that a failure or a hang costs nothing but itself, and its rows are printed as soon as they are
known. First those on exactness, several at a time; then those on speed, one by one. What a row
means stands in README.md beside this file.

The exit status is 0 when every check on exactness has passed, 1 when one has not, 2 without a
GPU. Speed and memory have aims, which are reported as met or missed and change no status.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import functools
import gc
import io
import json
import math
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "llm_ddp_parallel_training.py"
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

# Largest relative difference to the same run in fp32 on the CPU: of the loss of any update, and of
# the first gradient's norm. Rounding to 24, 11 and 8 bits costs 6e-8, 5e-4 and 4e-3 a value; a mean
# over hundreds of tokens is far closer than its values: bf16 on the CPU is 9e-4 and 2e-3 away with
# 24 layers of Qwen and 178 tokens. AdamW lets fp32 drift apart with the steps.
LIMITS = {"fp32": (1e-5, 1e-4), "fp16": (1e-3, 1e-2), "bf16": (5e-3, 3e-2)}
EXACT = 1e-6  # the project's own limit for two ways to compute the same, in fp32

# PyTorch's name of a card, and its name in labs.planner, whose peaks are those of the
# vendors' data sheets for dense 16-bit matrix products. Variants with another peak (NVL, GB200, the
# PCIe H100, Ti, D) are not listed: for them, only the measured product counts.
CARDS = {
    "NVIDIA H200": "h200-141gb",
    "NVIDIA H100 80GB HBM3": "h100-80gb",
    "NVIDIA B200": "b200-180gb",
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA A100 80GB PCIe": "a100-80gb",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100-PCIE-40GB": "a100-40gb",
    "Tesla V100-SXM2-32GB": "v100-32gb",
    "Tesla T4": "t4-16gb",
    "NVIDIA L4": "l4-24gb",
    "NVIDIA GeForce RTX 3090": "rtx-3090-24gb",
    "NVIDIA GeForce RTX 4090": "rtx-4090-24gb",
}


@dataclasses.dataclass
class Row:
    """A line of the table; the verdict is pass, FAIL, met, missed or, for a note, empty."""

    check: str
    found: str
    wanted: str = ""
    verdict: str = ""

    def __str__(self) -> str:
        return f"| {self.check:47} | {self.found:66} | {self.wanted:30} | {self.verdict:7} |"


HEADER = (
    f"{Row('check', 'found', 'wanted', 'verdict')}\n|{'-' * 49}|{'-' * 68}|{'-' * 32}|{'-' * 9}|"
)


def must(check: str, found: str, wanted: str, good: bool) -> Row:
    """Decides about the exit status."""
    return Row(check, found, wanted, "pass" if good else "FAIL")


def aim(check: str, found: str, wanted: str, good: bool) -> Row:
    """Is reported, and decides about nothing."""
    return Row(check, found, wanted, "met" if good else "missed")


# ------------------------------------------------------------------------------------------
# Runs
# ------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Run:
    """A finished run of the script: its folder, and what it printed."""

    folder: Path
    said: str

    @functools.cached_property
    def rows(self) -> list[dict]:
        lines = (self.folder / "metrics.jsonl").read_text("utf-8").splitlines()
        return [json.loads(line) for line in lines]

    @property
    def updates(self) -> list[dict]:
        return [row for row in self.rows if "loss" in row]

    @property
    def losses(self) -> list[float]:
        """Of all logged updates, and of all validations."""
        return [row.get("loss", row.get("val_loss")) for row in self.rows]

    @property
    def speed(self) -> float:
        """Predicted tokens a second since the log line before the last."""
        return self.updates[-1]["tokens_per_second"]

    @property
    def digest(self) -> str:
        return re.search(r"^weights sha256 (\w+)", self.said, re.MULTILINE)[1]

    @property
    def overflows(self) -> int:
        return max(map(int, re.findall(r"fp16 overflows (\d+)", self.said)), default=0)

    def choice(self, what: str) -> str:
        """What the run chose by itself: device, precision, backend."""
        choices = json.loads((self.folder / "run.json").read_text("utf-8"))["choices"]
        return next(c["chosen"] for c in choices if c["what"] == what)

    def weights(self) -> dict:
        import torch

        return torch.load(self.folder / "tiny_transformer.pt", weights_only=True)["model"]


def farthest(values: Sequence[float], expected: Sequence[float]) -> float:
    """Largest relative difference; infinite where one is longer or a value is missing."""
    if len(values) != len(expected) or None in (*values, *expected):
        return math.inf
    return max(abs(a - b) / abs(b) for a, b in zip(values, expected, strict=True))


def spread(one: Run, other: Run) -> float:
    """Largest difference between the final weights of two tiny runs."""
    a, b = one.weights(), other.weights()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@dataclasses.dataclass
class Bench:
    """What a check is given to work with."""

    device: str  # cuda, or cpu for the rehearsal
    layers: int
    base: Path  # the folder for --base-model
    work: Path  # an empty folder of this check
    facts: dict  # what the check "machine" found out

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def shape(self) -> str:
        """The base model for labs.planner."""
        config = json.loads((self.base / "config.json").read_text("utf-8"))
        flags = {
            "layers": "num_hidden_layers", "d-model": "hidden_size", "ffn": "intermediate_size",
            "heads": "num_attention_heads", "kv-heads": "num_key_value_heads",
            "vocab": "vocab_size",
        }  # fmt: skip
        return "--model qwen " + " ".join(f"--{k} {config[v]}" for k, v in flags.items())

    @property
    def text(self) -> str:
        """Flags for a running text, so long that no run comes to the end of an epoch, where a batch
        has fewer windows; the rehearsal's is short, for it is cut into tokens in every run.
        """
        import llm_ddp_parallel_training as ddp

        path = self.work / "text.txt"
        name, times = ("python-docs", 4) if self.cuda else ("lessons", 1)
        if not path.exists():  # an earlier run of this check may still have it mapped
            path.write_bytes(ddp.builtin_text(name) * times)
        return f"--corpus-format document --corpus-file {path}"

    @property
    def half(self) -> str:
        """The 16-bit precision of the card; the rehearsal has bf16."""
        return self.facts["half"]

    @property
    def precisions(self) -> list[str]:
        """Those that the device knows: the script refuses fp16 without CUDA."""
        return [p for p in LIMITS if self.cuda or p != "fp16"]

    def train(self, name: str, flags: str, device: str = "", **paths: Path) -> Run:
        """Runs the script's `main` in this process. Raises `RuntimeError` with its last words."""
        import torch

        import llm_ddp_parallel_training as ddp

        folder, said, status = self.work / name, io.StringIO(), 0
        arguments = [*flags.split(), "--device", device or self.device, "--output-dir", str(folder)]
        for flag, path in paths.items():
            arguments += [f"--{flag.replace('_', '-')}", str(path)]
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                ddp.main(arguments)
            except SystemExit as end:
                status = end.code
        gc.collect()  # model and optimizer are in reference cycles
        if self.cuda:
            torch.cuda.empty_cache()
        if status:
            raise RuntimeError(f"{name}: exit status {status}: {said.getvalue()[-2000:]}")
        return Run(folder, said.getvalue())

    def qwen(self, name: str, flags: str, device: str = "") -> Run:
        return self.train(name, f"--model qwen {flags}", device, base_model=self.base)

    def launch(self, name: str, ranks: int, flags: str, **paths: Path) -> Run:
        """Runs the script under torchrun, in a folder of its own, as its user would."""
        place = self.work / name
        place.mkdir()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc_per_node={ranks}", str(SCRIPT), *flags.split()]
        for flag, path in paths.items():
            command += [f"--{flag.replace('_', '-')}", str(path)]
        done = subprocess.run(
            command, cwd=place, capture_output=True, text=True, encoding="utf-8", errors="replace"
        )
        if done.returncode:
            raise RuntimeError(f"{name}: exit status {done.returncode}: {done.stderr[-3000:]}")
        (folder,) = (place / "runs").iterdir()
        return Run(folder, done.stdout)


def compared(check: str, run: Run, exact: Run, precision: str) -> Row:
    """A run on the device beside the same in fp32 on the CPU."""
    by_loss, by_norm = LIMITS[precision]
    loss = farthest(run.losses, exact.losses)
    first = farthest(run.losses[:1], exact.losses[:1])
    norm = farthest([run.updates[0]["grad_norm"]], [exact.updates[0]["grad_norm"]])
    found = f"first loss {first:.0e}, worst {loss:.0e}; gradient norm {norm:.0e}"
    found += f"; {run.overflows} overflows" if precision == "fp16" else ""
    wanted = f"<= {by_loss:.0e}; gradient norm {by_norm:.0e}"
    return must(check, found, wanted, loss <= by_loss and norm <= by_norm)


# ------------------------------------------------------------------------------------------
# The machine
# ------------------------------------------------------------------------------------------


def machine(bench: Bench) -> Iterator[Row]:
    """Writes facts.json: the card's 16-bit precision, its peak, and its rate on large products."""
    import torch

    from labs import planner

    facts = {"half": "bf16", "peak": None}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    size, dtype = (8192, torch.bfloat16) if bench.cuda else (1024, torch.float32)
    if bench.cuda:
        if not torch.cuda.is_available():
            raise SystemExit("PyTorch sees no CUDA device here; --device cpu is the rehearsal")
        card = torch.cuda.get_device_properties(0)
        if card.name in CARDS:
            facts["peak"] = planner.GPUS[CARDS[card.name]].peak
        if card.major < 8:  # as the script chooses: bf16 in hardware begins at capability 8.0
            facts["half"], dtype = "fp16", torch.float16
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        yield Row(
            "GPU", f"{card.name}, {card.total_memory / 1e9:.0f} GB, capability "
            f"{card.major}.{card.minor}, CUDA {torch.version.cuda}, NCCL {nccl}"
        )  # fmt: skip
    packages = ("torch", "transformers", "peft", "accelerate", "numpy")
    yield Row("versions", ", ".join(f"{name} {version(name)}" for name in packages))
    yield Row("host", f"Python {platform.python_version()}, {cores} cores, {platform.machine()}")
    a, b = (torch.randn(size, size, device=bench.device, dtype=dtype) for _ in range(2))
    rounds = []
    for _ in range(4):
        synchronize(bench)
        begin = time.perf_counter()
        for _ in range(20 if bench.cuda else 2):
            a @ b
        synchronize(bench)
        rounds.append((time.perf_counter() - begin) / (20 if bench.cuda else 2))
    facts["matmul"] = 2 * size**3 / sorted(rounds[1:])[1]  # the first one warms up
    name = str(dtype).removeprefix("torch.")
    sheet = f", data sheet {facts['peak'] / 1e12:.0f}" if facts["peak"] else ""
    yield Row(f"product of {size} x {size}, {name}", f"{facts['matmul'] / 1e12:.1f} TFLOP/s{sheet}")
    (bench.work.parent / "facts.json").write_text(json.dumps(facts), encoding="utf-8")


def synchronize(bench: Bench) -> None:
    """Waits for the GPU: its work is only queued when a call returns."""
    import torch

    if bench.cuda:
        torch.cuda.synchronize()


def random_base(bench: Bench) -> Iterator[Row]:
    """Writes the folder for --base-model: Qwen2.5-0.5B's architecture with random weights."""
    import torch
    from qwen_assets import full_config, make_tokenizer
    from transformers import AutoModelForCausalLM
    from transformers import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    torch.manual_seed(0)
    config = full_config(bench.layers)
    if not bench.cuda:  # the embedding alone would take most of the rehearsal
        config.vocab_size = 2048
    with torch.device(bench.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():  # else all tokens are about as likely, and no mistake would show
        model.get_input_embeddings().weight.mul_(5)
    model.save_pretrained(bench.base)
    make_tokenizer().save_pretrained(bench.base)
    count = sum(p.numel() for p in model.parameters())
    yield Row("base model", f"random weights, {bench.layers} layers, {count / 1e6:.0f} million")


# ------------------------------------------------------------------------------------------
# Exactness
# ------------------------------------------------------------------------------------------

TINY = (
    "--model tiny --builtin python-docs --d-model 128 --layers 2 --batch-size 16 --max-steps 20 "
    "--log-every 1"
)


def tiny_numbers(bench: Bench) -> Iterator[Row]:
    """The device in each precision beside the CPU; and two ways to come to the same."""
    exact = bench.train("cpu", f"{TINY} --precision fp32", device="cpu")
    runs = {}
    for precision in bench.precisions:
        runs[precision] = bench.train(precision, f"{TINY} --precision {precision}")
        yield compared(f"tiny {precision}, device - CPU", runs[precision], exact, precision)
    for name, flags in (
        ("4 x accumulation 4 - 16", "--batch-size 4 --grad-accum 4"),
        ("2 loader processes - none", "--num-workers 2"),
    ):
        run = bench.train(name.partition(" ")[0], f"{TINY} --precision fp32 {flags}")
        difference = farthest(run.losses, runs["fp32"].losses)
        yield must(f"tiny, {name}", f"loss {difference:.0e}", "<= 1e-06", difference <= EXACT)


def tiny_compiled(bench: Bench) -> Iterator[Row]:
    """--compile computes the same in another order."""
    plain = bench.train("plain", f"{TINY} --precision fp32")
    compiled = bench.train("compiled", f"{TINY} --precision fp32 --compile")
    difference = farthest(compiled.losses, plain.losses)
    yield must("tiny --compile - without", f"loss {difference:.0e}", "<= 1e-04", difference <= 1e-4)


def resumed(bench: Bench) -> Iterator[Row]:
    """A run with dropout that is resumed in its middle, beside the uninterrupted one, twice.

    Some CUDA kernels add in an order that changes from run to run. So bit equality is asked for
    where two uninterrupted runs are equal bit for bit, and else equal losses: another dropout mask
    would change them by a percent.
    """
    for precision in ("fp32", "fp16") if bench.cuda else ("fp32",):
        flags = f"{TINY} --precision {precision} --dropout 0.1 --save-every 5 --max-steps 10"
        first, second = (bench.train(f"{precision}-{n}", flags) for n in (1, 2))
        middle = first.folder / "checkpoints" / "step-00000005"
        again = bench.train(f"{precision}-resumed", "", resume=middle)
        equal, repeats = again.digest == first.digest, second.digest == first.digest
        difference = farthest(again.losses, first.losses)
        yield must(
            f"tiny {precision}, resumed - uninterrupted",
            f"weights {'equal' if equal else 'differ'}, loss {difference:.0e}; two runs "
            f"{'equal' if repeats else 'differ'}",
            "equal, as two runs are" if repeats else "loss <= 1e-04",
            equal if repeats else difference <= 1e-4,
        )


def two_ranks(bench: Bench) -> Iterator[Row]:
    """Two ranks that share the device, with Gloo: 2 ranks x 4 samples are 1 rank x 8."""
    flags = "--precision fp32 --max-steps 10 --log-every 1 --eval-every 5"
    one = bench.train("one", f"{flags} --batch-size 8")
    two = bench.launch("two", 2, f"{flags} --batch-size 4 --device {bench.device}")
    loss = max(abs(a - b) for a, b in zip(one.losses, two.losses, strict=True))
    weight = spread(one, two)
    yield must(
        "2 ranks x 4 - 1 rank x 8, on one device",
        f"{two.choice('backend')}: loss {loss:.0e}, weights {weight:.0e}",
        "gloo: <= 1e-06",
        two.choice("backend") == "gloo" and loss <= EXACT and weight <= EXACT,
    )


def one_rank_group(bench: Bench) -> Iterator[Row]:
    """NCCL with a single rank: the script's own group, DDP and step, beside the bare model.

    NCCL refuses two ranks on a GPU, and a single rank has no group by contract; so the group is
    made here. All that the script sends through it is tried: gradients, sums in float64, objects.
    """
    import torch
    import torch.distributed as dist

    import llm_ddp_parallel_training as ddp

    backend = "nccl" if bench.cuda else "gloo"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    settings = ddp.parse_settings([*TINY.split(), "--device", bench.device, "--precision", "fp32"])
    launch = ddp.read_launcher()
    ddp.choose_device(launch, settings)
    ddp.join_group(launch, backend)
    try:
        run = ddp.build_tiny(launch, settings)
        models = {"bare": run.model, "group": copy.deepcopy(run.model)}
        losses: dict[str, list[float]] = {name: [] for name in models}
        for name, model in models.items():
            optimizer = ddp.build_optimizer(model, settings)
            scaler = torch.amp.GradScaler("cuda", enabled=False)
            wrapped = ddp.wrap_in_ddp(model, launch) if name == "group" else model
            for update in range(5):
                items = [run.data.train[16 * update + i] for i in range(16)]
                halves = [run.collate(items[:8]), run.collate(items[8:])]
                step = ddp.training_step(wrapped, optimizer, scaler, halves, launch, settings)
                losses[name].append(step.loss)
        weight = max(
            float((a - b).detach().abs().max())
            for a, b in zip(models["bare"].parameters(), models["group"].parameters())
        )
        loss = max(abs(a - b) for a, b in zip(*losses.values()))
        yield must(
            f"{backend}, 1 rank with DDP - bare",
            f"loss {loss:.0e}, weights {weight:.0e}, after 5 updates",
            "<= 1e-06",
            loss <= EXACT and weight <= EXACT,
        )
        total = torch.tensor([0.1, 2.0], dtype=torch.float64, device=launch.device)
        dist.all_reduce(total)
        largest = torch.tensor(15.0, device=launch.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        gathered, shared = [None], [{"state": torch.ones(3)}]
        dist.all_gather_object(gathered, ("random", torch.get_rng_state()))
        dist.broadcast_object_list(shared)
        dist.barrier()
        arrived = total.tolist() == [0.1, 2.0] and largest.item() == 15
        arrived = arrived and gathered[0][0] == "random" and bool(shared[0]["state"].all())
        yield must(
            f"{backend}, the other messages of a run",
            "float64 sum, maximum, objects, barrier: " + ("as sent" if arrived else "changed"),
            "as sent",
            arrived,
        )
    finally:
        dist.destroy_process_group()


def command_lines(bench: Bench) -> Iterator[Row]:
    """The project's CUDA command lines, as they stand in its README, and what they leave behind."""
    tiny = {"run.json", "metrics.jsonl", "loss_curve.png", "tiny_transformer.pt"}
    qwen = {"run.json", "metrics.jsonl", "loss_curve.png", "adapter/adapter_model.safetensors",
            "adapter/adapter_config.json", "adapter/tokenizer.json"}  # fmt: skip
    short, cpu = "--batch-size 1 --seq-len 64 --max-steps 2", "" if bench.cuda else " --cpu"
    for name, ranks, flags, files in (
        ("tiny-1", 1, "--model tiny --batch-size 2 --max-steps 2", tiny),
        ("qwen-1", 1, f"--model qwen {short}", qwen),
        ("qwen-2", 2, f"--model qwen {short}", qwen),
    ):
        paths = {"base_model": bench.base} if files is qwen else {}
        run = bench.launch(name, ranks, flags + cpu, **paths)
        missing = [file for file in sorted(files) if not (run.folder / file).is_file()]
        device, want = run.choice("device"), "cuda:0" if bench.cuda else "cpu"
        same = ranks == 1 or f"equal on all {ranks} ranks" in run.said
        yield must(
            f"torchrun {ranks}: {flags.partition(' --batch')[0]}",
            f"{device}, {run.choice('precision')}, backend {run.choice('backend')}, "
            + (f"lacks {', '.join(missing)}" if missing else "all files"),
            f"{want}, all files" + ", equal ranks" * (ranks > 1),
            device == want and not missing and same,
        )


SHORT = "--seq-len 64 --batch-size 8 --max-steps 3 --log-every 1"


def qwen_numbers(bench: Bench) -> Iterator[Row]:
    """LoRA in each precision beside the CPU, on padded lines and on packed ones."""
    for name, flags in (("lines", ""), ("packed", "--pack")):
        flags = f"{SHORT} --lora-dropout 0 {flags}"
        exact = bench.qwen(f"{name}-cpu", f"{flags} --precision fp32", device="cpu")
        for precision in bench.precisions:
            run = bench.qwen(f"{name}-{precision}", f"{flags} --precision {precision}")
            yield compared(f"qwen {precision}, {name}, device - CPU", run, exact, precision)


def qwen_checkpointing(bench: Bench) -> Iterator[Row]:
    """--gradient-checkpointing computes again with the dropout masks of the first time."""
    flags = f"{SHORT} --precision fp32 --lora-dropout 0.1 {bench.text}"
    plain = bench.qwen("plain", flags)
    twice = bench.qwen("checkpointing", f"{flags} --gradient-checkpointing")
    loss = farthest(twice.losses, plain.losses)
    norms = [[row["grad_norm"] for row in run.updates] for run in (twice, plain)]
    norm = farthest(*norms)
    yield must(
        "qwen --gradient-checkpointing - without",
        f"loss {loss:.0e}, gradient norm {norm:.0e}",
        "<= 1e-05",
        max(loss, norm) <= 1e-5,
    )


def long_windows(bench: Bench, length: int = 1024) -> str:
    """Full windows of running text, as many updates as a speed needs."""
    rows, length, updates = (8, length, 40) if bench.cuda else (2, length // 16, 4)
    return (
        f"{bench.text} --seq-len {length} --batch-size {rows} --max-steps {updates} "
        f"--log-every {updates // 4} --val-fraction 0 --precision {bench.half}"
    )


def qwen_compiled(bench: Bench) -> Iterator[Row]:
    """--compile in 16 bits; what it leaves in the cache on disk, the speed check finds."""
    flags = f"{long_windows(bench)} --lora-dropout 0"
    short = "--max-steps 3 --log-every 1"
    plain = bench.qwen("plain", f"{flags} {short}")
    compiled = bench.qwen("compiled", f"{flags} {short} --compile")
    difference, limit = farthest(compiled.losses, plain.losses), LIMITS[bench.half][0]
    yield must(
        f"qwen {bench.half} --compile - without",
        f"loss {difference:.0e}; first update after {compiled.updates[0]['seconds']:.0f} s",
        f"<= {limit:.0e}",
        difference <= limit,
    )


# ------------------------------------------------------------------------------------------
# Memory and speed
# ------------------------------------------------------------------------------------------


def plan(flags: str) -> dict:
    """What labs.planner says to the flags of a run on a GPU."""
    from labs import planner

    return planner.make_plan(planner.flag_parser().parse_args([*flags.split(), "--gpu=h100-80gb"]))


def memory(bench: Bench) -> Iterator[Row]:
    """Peak memory of a training, what PyTorch's libraries take left out, beside the planner's."""
    import torch

    rows = 8 if bench.cuda else 1
    wide = "--d-model 512 --layers 8 --heads 8 --seq-len 256 --batch-size 64"
    length = 1024 if bench.cuda else 64
    long = f"--seq-len {length} --batch-size {rows} --precision {bench.half}"
    bench.train("warm-up", "--max-steps 1 --precision fp32")  # the libraries' own memory
    for name, model, flags in (
        ("tiny, 8 layers, 512 wide", "tiny", f"{wide if bench.cuda else ''} --precision fp32"),
        (f"qwen {bench.half}, {rows} x {length}", "qwen", long),
        ("the same, --gradient-checkpointing", "qwen", f"{long} --gradient-checkpointing"),
        ("qwen fp32, 4 x 256", "qwen", "--seq-len 256 --batch-size 4 --precision fp32"),
    ):
        train = bench.qwen if model == "qwen" else bench.train
        before = 0
        if bench.cuda:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        run = train(name.replace(" ", "-"), f"{flags} {bench.text} --max-steps 3 --val-fraction 0")
        measured = run.updates[-1]["peak_memory_bytes"] - before
        shape = bench.shape if model == "qwen" else "--model tiny"
        predicted = plan(f"{shape} {flags}")["memory"]["total"]
        found = f"{measured / 1e9:.2f} GB, planned {predicted / 1e9:.2f}"
        if not bench.cuda:  # resident memory of a process that does other things, too
            yield Row(f"memory: {name}", found)
            continue
        ratio = predicted / measured
        yield aim(
            f"memory: {name}",
            f"{found} ({ratio:.2f})",
            "planned within 15 %",
            0.85 <= ratio <= 1.15,
        )


def share(bench: Bench, tokens_per_second: float, length: int) -> tuple[str, float]:
    """Speed as a share of the card: model FLOPs by labs.planner, what is computed twice not
    counted; of a large product measured here, and of the data sheet where the card is known.
    """
    from labs import planner

    flags = f"{bench.shape} --seq-len {length}".split()
    run = planner.read_run(planner.flag_parser().parse_args(flags))
    rate = tokens_per_second * planner.flops_per_token(run)
    text = f"{tokens_per_second:,.0f} tokens/s, {rate / bench.facts['matmul']:.0%} of the product"
    if not bench.facts["peak"]:
        return text, rate / bench.facts["matmul"]
    reached = rate / bench.facts["peak"]
    return f"{text}, {reached:.0%} of the data sheet", reached


def speed(bench: Bench, compiled: bool = False) -> Iterator[Row]:
    """LoRA on long packed windows, as the script's own log has it: data and host code included."""
    cases = [(1024, "running text", "")]
    if not compiled:  # packed lines leave windows of many lengths, each compiled anew
        cases += [
            (2048, "running text", ""),
            (1024, "packed lines", "--corpus-format lines --pack"),
            (1024, "running text", "--gradient-checkpointing"),
        ]
    for number, (length, text, flags) in enumerate(cases):
        options = f"{long_windows(bench, length)} {flags} {'--compile' * compiled}"
        run = bench.qwen(f"run-{number}", options)
        # Lines of this text have about a dozen tokens, which attend to each other only.
        found, reached = share(bench, run.speed, 12 if "lines" in text else length)
        settings = json.loads((run.folder / "run.json").read_text("utf-8"))["settings"]
        size = f"{settings['batch_size']} x {settings['seq_len']}"
        title = f"qwen {bench.half}, {text} {size}{' --compile' * compiled}"
        if "checkpointing" in flags or not bench.cuda:
            yield Row(title + ", checkpointing" * ("checkpointing" in flags), found)
        else:
            yield aim(title, found, "45 % of the peak", reached >= 0.45)


def trainer(bench: Bench, case: str) -> Iterator[Row]:
    """The script and transformers.Trainer with PEFT in turns, by tests/benchmarks/qwen_lora.py."""
    precision, rounds = (bench.half, 20) if bench.cuda else ("fp32", 1)
    command = [sys.executable, str(ROOT / "tests" / "benchmarks" / "qwen_lora.py"), "--json"]
    command += ["--only", case, "--device", bench.device, "--precision", precision]
    command += ["--layers", str(bench.layers), "--rounds", str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    result = json.loads(done.stdout.splitlines()[-1])
    (ours, own), (theirs, other) = result["script"], result["Trainer"]
    ratio, less = result["ratio"]
    found = f"{ours:,.0f} - {theirs:,.0f} real tokens/s ({ratio:.2f} x), "
    found += f"{own:.2f} - {other:.2f} GB ({less:.2f})"
    title = f"qwen {precision}, {case}: script - Trainer"
    if case == "lines" and bench.cuda:
        yield aim(title, found, "1.5 x the speed", ratio >= 1.5)
    else:
        yield Row(title, found)


def tiny_speed(bench: Bench) -> Iterator[Row]:
    """The tiny model's own tokens a second: a step of this size mostly waits for the host."""
    updates, rows = (300, 64) if bench.cuda else (8, 8)
    for precision in ("fp32", bench.half):
        flags = f"--model tiny --builtin python-docs --batch-size {rows} --precision {precision}"
        log = f"--max-steps {updates} --log-every {updates // 2} --val-fraction 0"
        run = bench.train(precision, f"{flags} {log}")
        yield Row(f"tiny {precision}, {rows} x 64", f"{run.speed:,.0f} tokens/s")


# ------------------------------------------------------------------------------------------
# All of them
# ------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Check:
    """`speed`: nothing else may run meanwhile, and the exit status does not depend on it.

    `limit` is in seconds. What is not `rehearsed` lasts too long on a CPU, where it needs --only.
    """

    name: str
    function: Callable[[Bench], Iterator[Row]]
    limit: float
    speed: bool = False
    needs_base: bool = True
    rehearsed: bool = True


MACHINE, BASE = Check("machine", machine, 90), Check("base model", random_base, 90)
CHECKS = [  # those that last longest first: several run at a time
    Check("qwen compile", qwen_compiled, 240, rehearsed=False),
    Check("qwen precision", qwen_numbers, 210),
    Check("command lines", command_lines, 180),
    Check("memory", memory, 150),
    Check("two ranks", two_ranks, 100, needs_base=False),
    Check("tiny compile", tiny_compiled, 120, needs_base=False),
    Check("qwen checkpointing", qwen_checkpointing, 100),
    Check("tiny precision", tiny_numbers, 100, needs_base=False),
    Check("resume", resumed, 100, needs_base=False),
    Check("nccl", one_rank_group, 60, needs_base=False),
    Check("speed", speed, 120, True),
    Check("trainer lines", functools.partial(trainer, case="lines"), 100, True, False),
    Check("speed compiled", functools.partial(speed, compiled=True), 150, True, rehearsed=False),
    Check("trainer packed", functools.partial(trainer, case="packed"), 100, True, False, False),
    Check("tiny speed", tiny_speed, 60, True, False),
]


class Program:
    """Runs checks as processes, prints their rows, and remembers them."""

    def __init__(self, args: argparse.Namespace, work: Path) -> None:
        self.args, self.work, self.until = args, work, time.monotonic() + args.budget
        self.rows: list[Row] = []
        self.errors = ""  # the last output of checks that failed
        self.alive: set[subprocess.Popen] = set()
        self.lock = threading.Lock()
        self.over = False

    def show(self, row: Row) -> None:
        with self.lock:
            self.rows.append(row)
            print(row, flush=True)

    def run(self, check: Check, threads: int) -> bool:
        """Runs one check to its end, or to the end of its time; whether it ended well."""
        verdict = "missed" if check.speed else "FAIL"
        limit = min(check.limit, self.until - time.monotonic())
        if limit < 3 or self.over:
            self.show(Row(check.name, "not run: the time is up", "", verdict))
            return False
        folder = self.work / check.name.replace(" ", "-")
        folder.mkdir()
        rows, log = folder / "rows.jsonl", folder / "log.txt"
        rows.touch()
        command = [sys.executable, "-W", "ignore", __file__, "--step", check.name]
        command += ["--work", str(folder), "--device", self.args.device]
        command += ["--layers", str(self.args.layers), "--limit", str(limit)]
        command += ["--base-model", str(self.args.base_model or self.work / "base")]
        first_card = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
        environment = {
            **os.environ, "OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": first_card,
        }  # fmt: skip
        seen, begin = 0, time.monotonic()
        with open(log, "w", encoding="utf-8") as output:
            process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=output, start_new_session=True
            )
        self.alive.add(process)
        ended = False
        while not ended:
            ended = process.poll() is not None
            lines = rows.read_text("utf-8").split("\n")[:-1]
            for line in lines[seen:]:
                self.show(Row(**json.loads(line)))
            seen = len(lines)
            if not ended and time.monotonic() - begin > limit:
                break
            time.sleep(0 if ended else 0.1)
        end(process)
        self.alive.discard(process)
        if process.returncode == 0 and ended and seen:
            return True
        said = log.read_text("utf-8", errors="replace").strip()
        last = said.splitlines()[-1] if said else f"exit status {process.returncode}"
        reason = last if ended else f"not done after {limit:.0f} s"
        if not self.over:
            self.show(
                Row(check.name, " ".join(reason.split())[:200], "an end without error", verdict)
            )
        self.errors += f"\n==== {check.name}: {reason}\n{said[-6000:]}\n"
        return False

    def all(self, checks: list[Check]) -> None:
        """Those on exactness side by side, each with its share of the cores; then the others."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        lanes, cores = self.args.lanes, cores or 1
        together = [check for check in checks if not check.speed]
        pool = ThreadPoolExecutor(lanes)
        try:
            list(pool.map(lambda check: self.run(check, max(1, cores // lanes)), together))
            for check in checks:
                if check.speed:
                    self.run(check, cores)
        finally:
            self.over = True
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(self.alive):
                end(process)


def end(process: subprocess.Popen) -> None:
    """Ends a check with all that it started; torchrun needs a moment to end its ranks."""
    for number, patience in ((signal.SIGTERM, 5), (signal.SIGKILL, 5)):
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience)


def step(check: Check, args: argparse.Namespace) -> None:
    """One check, in this process: its rows go to a file that the parent reads."""
    killer = threading.Timer(args.limit + 20, os._exit, (1,))  # for when the parent is gone
    killer.daemon = True
    killer.start()
    facts = args.work.parent / "facts.json"
    known = json.loads(facts.read_text("utf-8")) if facts.exists() else {}
    bench = Bench(args.device, args.layers, args.base_model, args.work, known)
    with open(args.work / "rows.jsonl", "a", encoding="utf-8") as rows:
        for row in check.function(bench):
            rows.write(json.dumps(dataclasses.asdict(row)) + "\n")
            rows.flush()
    for old in args.work.iterdir():  # a check leaves a gigabyte at most
        if old.is_dir():
            shutil.rmtree(old, ignore_errors=True)


def status_of(rows: Sequence[Row]) -> int:
    """0 unless a check on exactness failed, or did not come to its end."""
    return 1 if any(row.verdict == "FAIL" for row in rows) else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the rehearsal")
    add("--layers", type=int, default=24, help="of the random Qwen2.5 (default: 24, as the real)")
    add("--base-model", type=Path, help="a folder with Qwen2.5-0.5B (default: random weights)")
    add("--only", nargs="+", default=[""], metavar="PART", help="checks with this in their names")
    add("--budget", type=float, default=460, help="seconds for all of it (default: 460)")
    add("--lanes", type=int, help="checks on exactness at a time (default: 4; rehearsal: 2)")
    add("--step", help=argparse.SUPPRESS)
    add("--work", type=Path, help=argparse.SUPPRESS)
    add("--limit", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.step:
        step(next(check for check in (MACHINE, BASE, *CHECKS) if check.name == args.step), args)
        return 0
    args.lanes = args.lanes or (4 if args.device == "cuda" else 2)
    chosen = [check for check in CHECKS if any(part in check.name for part in args.only)]
    if args.device == "cpu" and args.only == [""]:
        chosen = [check for check in chosen if check.rehearsed]
    if not chosen:
        names = ", ".join(check.name for check in CHECKS)
        print(f"error: --only {' '.join(args.only)}: the checks are {names}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as work:
        program = Program(args, Path(work))
        print(HEADER, flush=True)
        if not program.run(MACHINE, os.cpu_count() or 1):
            print(f"error: {program.rows[-1].found}", file=sys.stderr)
            return 2
        if not args.base_model and any(check.needs_base for check in chosen):
            program.run(BASE, os.cpu_count() or 1)
        program.all(chosen)
    status = status_of(program.rows)
    if program.errors:
        print(program.errors)
    print(f"\n{HEADER}")
    print(*program.rows, sep="\n")
    verdicts = [row.verdict for row in program.rows]
    counts = ", ".join(
        f"{verdicts.count(v)} {v}" for v in ("pass", "FAIL", "met", "missed") if v in verdicts
    )
    print(f"\n{counts}; {time.monotonic() - begin:.0f} s; exit status {status}", flush=True)
    if os.environ.get("OUT"):
        content = [dataclasses.asdict(row) for row in program.rows]
        path = Path(os.environ["OUT"]) / "gpu-check.json"
        path.write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
