"""What the tests share: launching the script as a user would, and reading what a run wrote."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "llm_ddp_parallel_training.py"
sys.path.insert(0, str(ROOT))

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


@dataclasses.dataclass
class Finished:
    """How a launch ended: exit status, standard output, standard error."""

    status: int
    out: str
    err: str

    def error_lines(self) -> list[str]:
        """The script's own one-line errors, in order."""
        return [line for line in self.err.splitlines() if line.startswith("error: ")]


def command(ranks: int, *flags: object, script: Path = SCRIPT) -> list[str]:
    """The command line for `ranks` processes: plain python for one, torchrun for more."""
    start = [sys.executable] if ranks == 1 else [*TORCHRUN, f"--nproc_per_node={ranks}"]
    return [*start, str(script), *map(str, flags)]


def run_command(args: list[str], timeout: float = 120, **options) -> Finished:
    """Runs a command in its own session; a time-out kills it with all its children and fails."""
    options.setdefault("env", clean_environment())
    process = subprocess.Popen(
        args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8",
        errors="replace", start_new_session=True, **options,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"hung for {timeout} s: {args}\n{out}\n{err}")
    return Finished(process.returncode, out, err)


def clean_environment(**extra: str) -> dict[str, str]:
    """The environment without what a launcher or an earlier test may have left in it."""
    dropped = ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "MASTER_", "LOCAL_", "TORCHELASTIC")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    return {**kept, **extra}


def train(ranks: int, folder: Path, *flags: object, **options) -> Finished:
    """Trains on the CPU into `folder` and expects success."""
    args = command(ranks, "--cpu", "--output-dir", folder, *flags)
    finished = run_command(args, **options)
    assert finished.status == 0, finished.out + finished.err
    return finished


def metrics(folder: Path) -> list[dict]:
    """The rows of a run's metrics.jsonl."""
    with open(folder / "metrics.jsonl", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def losses(folder: Path) -> list[float]:
    """The training losses of a run, in order."""
    return [row["loss"] for row in metrics(folder) if "loss" in row]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The final weights of a tiny run."""
    return torch.load(folder / "tiny_transformer.pt", weights_only=True)["model"]


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest absolute difference of two state dicts with the same keys."""
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def digest_line(finished: Finished) -> str:
    """The weights' sha256 that a run printed."""
    (line,) = [x for x in finished.out.splitlines() if x.startswith("weights sha256 ")]
    return line.split()[2]
