"""What DistributedDataParallel costs on two CPU ranks, and which bucket setting costs least.

    python tests/benchmarks/ddp_cost.py [--rounds 9]

Both ranks train the tiny model with the script's `training_step` in every way of the table, in
short stretches that take turns, in the same two processes: `alone` never meets the other rank,
`barrier` meets it in an all-reduce of four bytes after every update, and the rest are DDP. So
`barrier` against `alone` is what waiting for the slower rank costs, and DDP against `barrier` what
sending gradients costs. The script takes PyTorch's default: the difference between those two rows
is the noise. A bucket of 0 MB sends every gradient by itself; one of 1024 MB sends all
at once when the backward pass is over. Tokens per second of both ranks together, medians over the
rounds; ratios are medians of the ratios within a round.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import llm_ddp_parallel_training as ddp  # noqa: E402

SHAPES = {  # name: (layers, width, heads, batch per rank, updates a stretch), windows of 64 tokens
    "1 layer, 64 wide, batch 8": (1, 64, 4, 8, 60),
    "1 layer, 64 wide, batch 64": (1, 64, 4, 64, 10),
    "4 layers, 128 wide, batch 12": (4, 128, 4, 12, 10),
    "6 layers, 256 wide, batch 8": (6, 256, 8, 8, 4),
}
WAYS = {  # name: options of DDP, or none
    "alone": None,
    "barrier": None,
    "as the script does": {},
    "PyTorch's default": {"bucket_cap_mb": None},
    "buckets of 0 MB": {"bucket_cap_mb": 0},
    "buckets of 1 MB": {"bucket_cap_mb": 1},
    "buckets of 1024 MB": {"bucket_cap_mb": 1024},
}


class Way:
    """One model with its optimizer, trained in one of the ways."""

    def __init__(self, name: str, shape: tuple, launch: ddp.Launch) -> None:
        layers, width, heads, batch, self.updates = shape
        self.settings = ddp.parse_settings(
            ["--cpu", "--precision", "fp32", "--batch-size", str(batch)]
        )
        torch.manual_seed(0)
        bare = ddp.TinyCausalTransformer(width, layers, heads)
        self.meets = name == "barrier"
        single = WAYS[name] is None
        self.launch = dataclasses.replace(launch, world_size=1) if single else launch
        self.model = bare if single else ddp.wrap_in_ddp(bare, launch, **WAYS[name])
        self.optimizer = ddp.build_optimizer(bare, self.settings)
        self.scaler = torch.amp.GradScaler("cuda", enabled=False)
        ids = torch.randint(0, 256, (batch, 64))
        self.batch = {"input_ids": ids, "labels": ids}

    def stretch(self) -> float:
        """Tokens per second of both ranks together over some updates that begin together."""
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(self.updates):
            ddp.training_step(
                self.model, self.optimizer, self.scaler, [self.batch], self.launch, self.settings
            )
            if self.meets:
                dist.all_reduce(torch.zeros(1))
        seconds = time.perf_counter() - begin
        own = torch.tensor(self.updates * self.batch["labels"].numel() / seconds)
        dist.all_reduce(own)
        return own.item()


def rank_main(rounds: int) -> None:
    """Prints the table from rank 0."""
    launch = ddp.read_launcher()
    ddp.set_up(launch, ddp.parse_settings(["--cpu", "--threads", "1"]))
    for title, shape in SHAPES.items():
        ways = {name: Way(name, shape, launch) for name in WAYS}
        seen: dict[str, list[float]] = {name: [] for name in WAYS}
        for turn in range(1 + rounds):  # the first one warms up
            for name in list(ways)[:: -1 if turn % 2 else 1]:
                speed = ways[name].stretch()
                if turn:
                    seen[name].append(speed)
        update = 1e3 * 2 * shape[3] * 64 / statistics.median(seen["alone"])
        launch.say(f"\n{title}: {update:.1f} ms an update alone")
        launch.say(f"  {'':20}{'tokens/s':>10}{'of barrier':>12}{'of alone':>10}")
        for name, speeds in seen.items():
            ratios = [
                statistics.median(a / b for a, b in zip(speeds, seen[of]))
                for of in ("barrier", "alone")
            ]
            middle = statistics.median(speeds)
            launch.say(f"  {name:20}{middle:>10,.0f}{ratios[0]:>12.2f}{ratios[1]:>10.2f}")
    ddp.tear_down()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9, help="measured stretches (default: 9)")
    parser.add_argument("--rank-main", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_main:
        rank_main(args.rounds)
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [__file__, "--rank-main", "--rounds", str(args.rounds)]
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(subprocess.run(command).returncode)


if __name__ == "__main__":
    main()
