"""Memory beside the planner's, and speed: of the script, and of the script beside a Trainer."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

from gpu.bench import ROOT, Bench
from gpu.numerics import long_windows
from gpu.table import Row, aim


def shape_of(bench: Bench) -> str:
    """The base model as flags of labs.planner."""
    config = json.loads((bench.base / "config.json").read_text("utf-8"))
    flags = {
        "layers": "num_hidden_layers", "d-model": "hidden_size", "ffn": "intermediate_size",
        "heads": "num_attention_heads", "kv-heads": "num_key_value_heads", "vocab": "vocab_size",
    }  # fmt: skip
    return "--model qwen " + " ".join(f"--{k} {config[v]}" for k, v in flags.items())


def plan(bench: Bench, flags: str) -> dict:
    """What labs.planner says to the flags of a run on this card, or on one with flash attention."""
    from labs import planner

    flags += f" --gpu {bench.facts['card'] or 'h100-80gb'}"
    return planner.make_plan(planner.flag_parser().parse_args(flags.split()))


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
        ("the same, checkpointing full", "qwen", f"{long} --gradient-checkpointing full"),
        ("the same, selective", "qwen", f"{long} --gradient-checkpointing selective"),
        ("qwen fp32, 4 x 256", "qwen", "--seq-len 256 --batch-size 4 --precision fp32"),
    ):
        train = bench.qwen if model == "qwen" else bench.train
        before = 0
        if bench.cuda:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        run = train(name.replace(" ", "-"), f"{flags} {bench.text} --max-steps 3 --val-fraction 0")
        measured = run.updates[-1]["peak_memory_bytes"] - before
        shape = shape_of(bench) if model == "qwen" else "--model tiny"
        predicted = plan(bench, f"{shape} {flags}")["memory"]["total"]
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

    flags = f"{shape_of(bench)} --seq-len {length}".split()
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
