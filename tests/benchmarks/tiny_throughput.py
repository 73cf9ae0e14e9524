"""Tokens per second of the tiny model on 1 and 2 ranks, and beside it a loop with nothing in it.

    python tests/benchmarks/tiny_throughput.py [--rounds 3]

Every round runs each row once, in turn, so that a drift of the machine meets all rows alike. The
script's own figure is the median of its log lines after the first 50 updates. The bare loop is the
same model with fused AdamW and nothing else: no DDP, no log, no data loading, no clipping.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import llm_ddp_parallel_training as ddp  # noqa: E402

SHAPES = {  # name: (layers, width, heads, batch per rank), windows of 64 tokens
    "4 layers, 128 wide, batch 12": (4, 128, 4, 12),
    "1 layer, 64 wide, batch 64": (1, 64, 4, 64),
    "1 layer, 64 wide, batch 8": (1, 64, 4, 8),
}


def script(ranks: int, layers: int, width: int, heads: int, batch: int) -> float:
    """Median tokens per second of a run of the script, all ranks together."""
    launch = [sys.executable]
    if ranks > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    with tempfile.TemporaryDirectory() as folder:
        flags = (
            f"--cpu --builtin python-docs --layers {layers} --d-model {width} --heads {heads} "
            f"--batch-size {batch} --max-steps 300 --log-every 50 --val-fraction 0"
        )
        command = [*launch, str(ROOT / "llm_ddp_parallel_training.py"), *flags.split()]
        subprocess.run([*command, "--output-dir", folder], check=True, capture_output=True)
        text = (Path(folder) / "metrics.jsonl").read_text("utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    return statistics.median(row["tokens_per_second"] for row in rows if row["step"] > 50)


def bare(layers: int, width: int, heads: int, batch: int) -> float:
    """Tokens per second of the same model in a loop with nothing else, all cores, one process."""
    torch.manual_seed(0)
    model = ddp.TinyCausalTransformer(width, layers, heads)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    ids = torch.randint(0, 256, (batch, 64))
    times = []
    for _ in range(150):
        begin = time.perf_counter()
        optimizer.zero_grad()
        model(ids, ids).backward()
        optimizer.step()
        times.append(time.perf_counter() - begin)
    return batch * 63 / statistics.median(times[20:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for name, shape in SHAPES.items():
            for how, run in (
                ("bare loop, 1 process", lambda s: bare(*s)),
                ("script, 1 rank", lambda s: script(1, *s)),
                ("script, 2 ranks", lambda s: script(2, *s)),
            ):
                found.setdefault((name, how), []).append(run(shape))
    print(f"{'model':30} {'how':22} {'tokens/s':>10} {'of bare':>8}   ({rounds} rounds, medians)")
    for (name, how), values in found.items():
        base = statistics.median(found[name, "bare loop, 1 process"])
        value = statistics.median(values)
        print(f"{name:30} {how:22} {value:10,.0f} {value / base:8.2f}")


if __name__ == "__main__":
    main()
