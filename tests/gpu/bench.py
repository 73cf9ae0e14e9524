"""What a check is given to work with: runs of the script, and comparisons of two of them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import io
import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gpu.table import Row, must

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "llm_ddp_parallel_training.py"
SPOILED = ROOT / "tests" / "spoiled.py"  # the script with faults built in

# Largest relative difference to the same run in fp32 on the CPU: of the loss of any update, and of
# the first gradient's norm. Rounding to 24, 11 and 8 bits costs 6e-8, 5e-4 and 4e-3 a value; a mean
# over hundreds of tokens is far closer than its values: bf16 on the CPU is 9e-4 and 2e-3 away with
# 24 layers of Qwen and 178 tokens. AdamW lets fp32 drift apart with the steps.
LIMITS = {"fp32": (1e-5, 1e-4), "fp16": (1e-3, 1e-2), "bf16": (5e-3, 3e-2)}
EXACT = 1e-6  # the project's own limit for two ways to compute the same, in fp32


@dataclasses.dataclass
class Run:
    """A run of the script that has ended: its folder, what it printed, its exit status."""

    folder: Path
    said: str
    status: int = 0

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
        """Tokens a second since the log line before the last."""
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


@dataclasses.dataclass
class Bench:
    """The device, the base model, and a folder to work in."""

    device: str  # cuda, or cpu for the rehearsal
    layers: int
    base: Path  # the folder for --base-model
    work: Path  # an empty folder of this check
    facts: dict  # what the check "machine" found out

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def half(self) -> str:
        """The 16-bit precision of the card; the rehearsal has bf16."""
        return self.facts["half"]

    @property
    def precisions(self) -> list[str]:
        """Those that the device knows: the script refuses fp16 without CUDA."""
        return [p for p in LIMITS if self.cuda or p != "fp16"]

    @property
    def tiny(self) -> str:
        """Flags of a small run; the rehearsal's is smaller still."""
        size = "--d-model 128 --layers 2 --batch-size 16"
        size = size if self.cuda else "--batch-size 4 --val-fraction 0.01"
        return f"--model tiny --builtin python-docs {size} --max-steps 20 --log-every 1"

    @property
    def text(self) -> str:
        """Flags for a running text, so long that no run comes to the end of an epoch, where a batch
        has fewer windows; the rehearsal's is short, for it is cut into tokens in every run.
        """
        import llm_ddp_parallel_training as ddp

        path = self.work / "text.txt"
        name, times = ("python-docs", 4) if self.cuda else ("lessons", 1)
        settings = ddp.parse_settings(["--builtin", name])
        if not path.exists():  # an earlier run of this check may still have it mapped
            path.write_bytes(ddp.read_corpus(settings) * times)
        return f"--corpus-format document --corpus-file {shlex.quote(str(path))}"

    def main(self, name: str, flags: str, device: str = "", **paths: Path) -> Run:
        """Runs the script's `main` in this process, to any end."""
        import torch

        import llm_ddp_parallel_training as ddp

        if self.cuda:  # a run on the CPU would hide the GPUs from a process that has used none yet
            torch.cuda.init()
        folder, said, status = self.work / name, io.StringIO(), 0
        arguments = [*shlex.split(flags), "--device", device or self.device]
        arguments += ["--output-dir", str(folder)]
        if not self.cuda:  # on busy cores threads wait for each other at every small operation
            arguments += ["--threads", "1"]
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
        return Run(folder, said.getvalue(), status)

    def train(self, name: str, flags: str, device: str = "", **paths: Path) -> Run:
        """The same to a good end. Raises `RuntimeError` with its last words for another one."""
        run = self.main(name, flags, device, **paths)
        if run.status:
            raise RuntimeError(f"{name}: exit status {run.status}: {run.said[-2000:]}")
        return run

    def qwen(self, name: str, flags: str, device: str = "", **paths: Path) -> Run:
        return self.train(name, f"--model qwen {flags}", device, base_model=self.base, **paths)

    def start(
        self, name: str, ranks: int, flags: str, faults: Sequence[dict] = (), **paths: Path
    ) -> Run:
        """Runs the script as a program, for several ranks under torchrun, to any end."""
        command, folder = [sys.executable], self.work / name
        if ranks > 1:
            command += ["-m", "torch.distributed.run", "--standalone"]
            command += [f"--nproc_per_node={ranks}"]
        command += [str(SPOILED if faults else SCRIPT), *shlex.split(flags)]
        command += [] if self.cuda else ["--cpu"]  # on CUDA the script's own choice is tried
        for flag, path in {**paths, "output_dir": folder}.items():
            command += [f"--{flag.replace('_', '-')}", str(path)]
        done = subprocess.run(
            command, capture_output=True, text=True, encoding="utf-8", errors="replace",
            env={**os.environ, "FAULTS": json.dumps(list(faults))},
        )  # fmt: skip
        return Run(folder, done.stdout + done.stderr, done.returncode)

    def launch(self, name: str, ranks: int, flags: str, **paths: Path) -> Run:
        """The same to a good end."""
        run = self.start(name, ranks, flags, **paths)
        if run.status:
            raise RuntimeError(f"{name}: exit status {run.status}: {run.said[-3000:]}")
        return run


def farthest(values: Sequence[float], expected: Sequence[float]) -> float:
    """Largest relative difference; infinite where one is longer or a value is missing."""
    if len(values) != len(expected) or None in (*values, *expected):
        return math.inf
    return max(abs(a - b) / abs(b) for a, b in zip(values, expected, strict=True))


def spread(one: Run, other: Run) -> float:
    """Largest difference between the final weights of two tiny runs."""
    a, b = one.weights(), other.weights()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


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
