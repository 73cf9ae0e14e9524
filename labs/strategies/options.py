"""The lab's flags, and what goes together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch.distributed as dist

from labs.shared.flags import flag, read_flags, require_writable
from labs.shared.report import counted
from labs.strategies.fsdp import FSDP
from labs.strategies.fsdp_tensor import FSDPTensor
from labs.strategies.parameter_server import ParameterServer
from labs.strategies.pipeline import Pipeline
from labs.strategies.step import DDP, Strategy
from labs.strategies.tensor import TensorParallel
from labs.strategies.traffic import WATCHED_STEP
from llm_ddp_parallel_training import Settings, UserError

STRATEGIES: dict[str, type[Strategy]] = {
    "one": Strategy, "ddp": DDP, "fsdp": FSDP, "tensor": TensorParallel, "pipeline": Pipeline,
    "parameter-server": ParameterServer, "fsdp+tensor": FSDPTensor,
}  # fmt: skip
SIZE = "--max-steps 8 --precision fp32 --d-model 128 --layers 4".split()  # unless flags say more
SAME_HERE = set(  # the reference's flags that mean the same here
    "device cpu seed threads corpus_file builtin corpus_format d_model layers heads seq_len "
    "max_steps lr weight_decay precision".split()
)


@dataclass
class Options:
    """What is run how."""

    # fmt: off
    strategy: str | None = flag(None, "one way, on the ranks of the launcher", choices=STRATEGIES)
    compare: bool = flag(False, "all ways, one after the other, with tables: about 30 s")
    ranks: int | None = flag(None, "start this many ranks from here, without "
        "python -m torch.distributed.run", low=1, high=64)
    global_batch: int = flag(16, "sequences in an update over all ranks, for every way", low=1)
    schedule: str = flag("1f1b", "pipeline: 1f1b keeps fewer activations, the bubble is the same",
        choices=("gpipe", "1f1b"))
    micro_batches: int = flag(4, "pipeline: raise it when the bubble is too large", low=1)
    mode: str = flag("sync", "parameter-server: sync waits for all workers and equals DDP",
        choices=("sync", "async"))
    kill_worker_after: int | None = flag(None, "parameter-server: the last worker kills itself "
        "after so many steps; needs --ranks", low=1)
    save: Path | None = flag(None, "fsdp: write a sharded checkpoint to this new folder after half "
        "of the steps")
    load: Path | None = flag(None, "one, ddp, fsdp: go on from such a checkpoint, on any number of "
        "ranks")
    report: Path | None = flag(None, "also write the results as JSON, replacing an old file")
    output_dir: Path | None = flag(None, "--compare: for table and picture, instead of "
        "runs/strategies-<date>-<time>")
    overwrite: bool = flag(False, "--compare: replace what --output-dir holds")
    # fmt: on

    shown = True  # whether rank 0 prints the steps


def parse(argv: Sequence[str] | None) -> tuple[Options, Any, list[str]]:
    """The options, the reference's settings, and the flags that the latter came from."""
    same = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(SAME_HERE))
    about = (
        "The same model and data under several ways to divide the work. Only these of the "
        f"script's flags mean anything here: {same}."
    )
    refused = {field.name for field in fields(Settings)} - SAME_HERE
    options, settings, flags = read_flags(Options, argv, "strategies", about, refused, SIZE)
    if bool(options.strategy) == options.compare:
        raise UserError("give either --strategy NAME or --compare")
    return options, settings, flags


def check(o: Options, s: Any, ranks: int) -> None:
    """Refuses what cannot work, before anything is started. Raises `UserError`."""
    name, least = o.strategy, STRATEGIES[o.strategy].least_ranks
    pipeline, server, fsdp = name == "pipeline", name == "parameter-server", "fsdp" in name
    cut = {"tensor": ranks, "fsdp+tensor": 2}.get(name, 1)  # over how many ranks heads are divided
    parts = {"one": 1, "tensor": 1, "pipeline": 1, "parameter-server": ranks - 1}.get(name, ranks)
    launch = f"python -m torch.distributed.run --standalone --nproc_per_node={least} -m"
    refuse([
        (name == "one" and ranks > 1, "--strategy one is one process: launch with plain python"),
        (ranks < least, f"--strategy {name} needs {least} ranks or more, not {ranks}: launch with "
                        f"{launch} labs.strategies, or give --ranks {least}"),
        (name == "fsdp+tensor" and ranks % 2, f"--strategy {name}: {ranks} ranks are not even"),
        (s.heads % cut, f"--heads {s.heads}: cannot be divided over {cut} ranks"),
        (s.max_steps <= WATCHED_STEP, f"--max-steps {s.max_steps}: give more than {WATCHED_STEP}"),
        (s.precision == "fp16" or (s.precision == "bf16" and not fsdp),
         f"--precision {s.precision}: only bf16, with --strategy fsdp or fsdp+tensor"),
        (pipeline and s.layers < ranks, f"--layers {s.layers}: {ranks} stages need as many layers"),
        (pipeline and (o.global_batch % o.micro_batches or o.micro_batches < ranks),
         f"--micro-batches {o.micro_batches} should divide --global-batch {o.global_batch} and be "
         f"at least the {ranks} stages"),
        (o.global_batch < parts, f"--global-batch {o.global_batch} for {parts} parts"),
        (o.kill_worker_after and not (server and o.ranks and ranks > 2),
         "--kill-worker-after needs --strategy parameter-server and --ranks 3"),
        (o.save and name != "fsdp", "--save needs --strategy fsdp"),
        (o.save and o.save.exists(), f"--save {o.save} is already there; name a new folder"),
        (o.output_dir or o.overwrite, "--output-dir and --overwrite need --compare"),
        (o.mode == "async" and not server, "--mode async needs --strategy parameter-server"),
        (o.load and name not in ("one", "ddp", "fsdp"), "--load needs --strategy one, ddp or fsdp"),
    ])  # fmt: skip
    require_writable("--report", o.report)


def check_run(run: Any, o: Options, index: dict) -> None:
    """Refuses what data, backend and checkpoint make impossible. Raises `UserError`."""
    launch, samples, steps = run.launch, len(run.data.train), run.settings.max_steps
    gloo = launch.world_size > 1 and dist.get_backend() == "gloo"
    changed = [
        f"{what} was {index['model'].get(what)} there and is {here} here"
        for what, here in run.model.config.items()
        if index["model"].get(what) != here
    ]
    refuse([
        (launch.device.type == "cuda" and gloo and o.strategy != "parameter-server",
         f"--strategy {o.strategy} on CUDA needs NCCL and a GPU per rank; use --cpu"),
        (samples < o.global_batch, f"--global-batch {o.global_batch} of "
                                   f"{counted(samples, 'sample')}"),
        (changed, f"--load: {', '.join(changed)}"),
        (index["step"] >= steps,
         f"--max-steps {steps}: the checkpoint has {index['step']} already"),
    ])  # fmt: skip


def refuse(cases: list[tuple[Any, str]]) -> None:
    """Raises `UserError` for the first of these (holds, what to say) that holds."""
    for holds, why in cases:
        if holds:
            raise UserError(why)
