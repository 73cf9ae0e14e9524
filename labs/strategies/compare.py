"""All strategies one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from labs.shared.flags import results_folder
from labs.shared.plot import require_matplotlib
from labs.shared.ranks import run_ranks
from labs.shared.report import counted, paragraph, show
from labs.strategies.options import check, parse
from labs.strategies.report import as_text, combined, conclusion, draw, require_equal
from labs.strategies.train import run_strategy
from llm_ddp_parallel_training import UserError, read_launcher, write_json, write_whole

COMPARED = {  # what the tables call it: ranks, flags
    "one process": (1, "--strategy one"),
    "DDP": (2, "--strategy ddp"),
    "FSDP": (2, "--strategy fsdp"),
    "tensor": (2, "--strategy tensor"),
    "pipeline, GPipe": (2, "--strategy pipeline --schedule gpipe"),
    "pipeline, 1F1B": (2, "--strategy pipeline --schedule 1f1b"),
    "server, sync": (3, "--strategy parameter-server --mode sync"),
    "server, async": (3, "--strategy parameter-server --mode async"),
    "FSDP + tensor": (4, "--strategy fsdp+tensor"),
}
OUTPUTS = ("strategies.txt", "strategies.json", "strategies.png", "strategies.log")
ENGINES = ["labs.strategies.train", "torch.distributed.checkpoint.state_dict_saver"]
PATIENCE_S = 300  # after which a strategy is ended


def compare(options: Any, settings: Any, flags: Sequence[str]) -> None:
    """Runs all strategies; writes tables, picture and figures."""
    for name in ("ranks", "kill_worker_after", "save", "load", "report"):
        if getattr(options, name):
            raise UserError(f"--{name.replace('_', '-')} means nothing with --compare")
    flags = [f"--global-batch={options.global_batch}", *flags]
    flags = [f"--micro-batches={options.micro_batches}", *flags]
    if settings.threads is None:  # nothing is timed, and one thread each disturbs nobody
        flags = ["--threads=1", *flags]
    for ranks, own in COMPARED.values():
        check(*parse([*own.split(), *flags])[:2], ranks)
    require_matplotlib()
    folder = results_folder("strategies", OUTPUTS, options.output_dir, options.overwrite)
    for name in OUTPUTS:
        (folder / name).unlink(missing_ok=True)
    gpus = torch.cuda.device_count() if settings.device in ("auto", "cuda") else 0
    reports, alone = {}, None
    show(f"{counted(len(COMPARED), 'way')} on one to four ranks, about 30 s")
    for name, (ranks, own) in COMPARED.items():
        show(f"  {name}")
        if 0 < gpus < ranks and "server" not in name:
            show(f"  {name}: left out, it needs {ranks} GPUs; with --cpu it needs none")
            continue
        arguments, log = ([*own.split(), *flags], False, alone), folder / "strategies.log"
        found = run_ranks(a_rank, ranks, arguments, seconds=PATIENCE_S, modules=ENGINES, log=log)
        alone = alone or found[0]
        reports[name] = combined(found)
        if settings.precision == "fp32":
            require_equal(reports[name])
    text = f"{as_text(reports)}\n\n{paragraph(conclusion(reports))}\n"
    write_whole(folder / OUTPUTS[0], lambda to: to.write_text(text, "utf-8"))
    write_json(folder / OUTPUTS[1], reports)
    draw(reports, folder / OUTPUTS[2])
    show(f"written to {folder}: {' '.join(OUTPUTS)}\n\n{text}")


def a_rank(argv: list[str], shown: bool = True, alone: dict | None = None) -> dict:
    """What each rank does that is started from here; `shown`: rank 0 prints the steps.

    `alone` is what one process reported, if that is known.
    """
    options, settings, _ = parse(argv)
    options.shown = shown
    return run_strategy(read_launcher(), options, settings, alone)
