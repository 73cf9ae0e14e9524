"""What the tests share: running the script as a user would, with a time-out; reading a run."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "llm_ddp_parallel_training.py"
sys.path.insert(0, str(ROOT))

import llm_ddp_parallel_training as ddp  # noqa: E402

# In the processes that tests start, threads that wait for each other sleep, and do not spin.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# A shell starts what is put in the background with SIGINT ignored, which children would inherit.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]

# Several workers share the files out in this order, so that none begins a long one at the end.
LONGEST_FIRST = """
    test_faults test_docs test_qwen test_notebook test_resume test_explain_step test_planner
    test_strategies test_break_it test_gpu_endings test_checkpoint_dir test_gpu_check test_launch
    test_corpus test_hundred_lines test_scaling test_errors test_labs
""".split()


def pytest_configure(config: pytest.Config) -> None:
    """Keeps the order that is made below; pytest-xdist would begin with the most tests."""
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the files that take longest first."""
    order = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """One thread for what runs in this process, whatever the test before has set: on busy cores,
    threads wait for each other at every small operation, and more of them add up otherwise."""
    torch.set_num_threads(1)


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


# What a launcher, a user or an earlier test may have set, and a run would follow.
FOLLOWED = ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "MASTER_", "LOCAL_", "TORCHELASTIC", "DDP_")


def clean_environment(**extra: str) -> dict[str, str]:
    """The environment for a command: nothing that a run would follow, and output in UTF-8."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(FOLLOWED)}
    return {**kept, "PYTHONIOENCODING": "utf-8", **extra}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    """Tests that call the script in this process do so as one process on its own."""
    for name in [name for name in os.environ if name.startswith(FOLLOWED)]:
        monkeypatch.delenv(name)


def main_here(*flags: object, encoding: str = "utf-8", main: Callable = ddp.main) -> Finished:
    """Calls `main()` in this process: much faster than a launch. An exception passes through.

    `encoding` is that of its standard output, as PYTHONIOENCODING would set it.
    """
    random, threads = torch.get_rng_state(), torch.get_num_threads()
    with (
        tempfile.TemporaryFile("w+", encoding=encoding) as out,
        tempfile.TemporaryFile("w+", encoding="utf-8") as err,
    ):
        status = 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main([str(flag) for flag in flags])
            except SystemExit as end:
                status = end.code or 0
        torch.set_rng_state(random)
        torch.set_num_threads(threads)
        out.seek(0)
        err.seek(0)
        return Finished(status, out.read(), err.read())


def train_here(folder: Path, *flags: object, **options) -> Finished:
    """Trains on the CPU in this process into `folder` and expects success."""
    finished = main_here("--cpu", "--threads", 1, "--output-dir", folder, *flags, **options)
    assert finished.status == 0, finished.out + finished.err
    return finished


def settings_of(*flags: object):
    """The settings that a command line stands for."""
    return ddp.parse_settings([str(flag) for flag in flags])


def root_cause(finished: Finished) -> str:
    """What the launcher's failure summary says about the first rank that failed."""
    return finished.err.partition("Root Cause (first observed failure):")[2]


def fingerprint(folder: Path) -> dict[str, str]:
    """Every file and folder under `folder`, with a hash of its content."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file()
        else "folder"
        for path in folder.rglob("*")
    }


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


@pytest.fixture(scope="session")
def small_qwen(tmp_path_factory) -> Path:
    """A folder for --base-model: a small Qwen2 of random weights with tied embeddings."""
    from qwen_assets import save_folder

    return save_folder(tmp_path_factory.mktemp("base") / "small-qwen")
