"""All strategies one after the other, with tables, a picture and a conclusion."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from labs.shared.flags import results_folder
from labs.shared.plot import new_figure, require_matplotlib, save_figure
from labs.shared.ranks import run_ranks
from labs.shared.report import counted, paragraph, show
from labs.strategies.options import LAB, check, parse
from labs.strategies.report import as_text, combined, over_links, require_equal
from labs.strategies.train import MEMORY, run_strategy
from llm_ddp_parallel_training import UserError, read_launcher, write_file, write_json

COMPARED = (  # what the tables call it, ranks, flags
    ("one process", 1, ["--strategy", "one"]),
    ("DDP", 2, ["--strategy", "ddp"]),
    ("FSDP", 2, ["--strategy", "fsdp"]),
    ("tensor", 2, ["--strategy", "tensor"]),
    ("pipeline, GPipe", 2, ["--strategy", "pipeline", "--schedule", "gpipe"]),
    ("pipeline, 1F1B", 2, ["--strategy", "pipeline", "--schedule", "1f1b"]),
    ("server, sync", 3, ["--strategy", "parameter-server", "--mode", "sync"]),
    ("server, async", 3, ["--strategy", "parameter-server", "--mode", "async"]),
    ("FSDP + tensor", 4, ["--strategy", "fsdp+tensor"]),
)
OUTPUTS = ("strategies.txt", "strategies.json", "strategies.png", "strategies.log")
ENGINES = ["labs.strategies.train", "torch.distributed.checkpoint.state_dict_saver"]
PATIENCE_S = 300  # after which a strategy is ended


def compare(options: Any, settings: Any, flags: Sequence[str]) -> None:
    """Runs all strategies; writes tables, picture and figures."""
    for name in ("ranks", "kill_worker_after", "save", "load", "report"):
        if getattr(options, name):
            raise UserError(f"--{name.replace('_', '-')} means nothing with --compare")
    batches = [
        "--global-batch", str(options.global_batch), "--micro-batches", str(options.micro_batches),
    ]  # fmt: skip
    if settings.threads is None:  # nothing is timed, and one thread each disturbs nobody
        batches += ["--threads", "1"]
    for _, ranks, own in COMPARED:
        check(*parse([*own, *batches, *flags])[:2], ranks)
    require_matplotlib()
    folder = results_folder(LAB, OUTPUTS, options.output_dir, options.overwrite)
    for name in OUTPUTS:
        (folder / name).unlink(missing_ok=True)
    gpus = torch.cuda.device_count() if settings.device in ("auto", "cuda") else 0
    reports, alone = {}, None
    show(f"{counted(len(COMPARED), 'way')} on one to four ranks, about 30 s")
    for name, ranks, own in COMPARED:
        show(f"  {name}")
        if 0 < gpus < ranks and "server" not in name:
            show(f"  {name}: left out, it needs {ranks} GPUs; with --cpu it needs none")
            continue
        found = run_ranks(
            a_rank, ranks, ([*own, *batches, *flags], False, alone), seconds=PATIENCE_S,
            modules=ENGINES, log=folder / "strategies.log",
        )  # fmt: skip
        alone = alone or found[0]
        reports[name] = combined(found)
        if settings.precision == "fp32":
            require_equal(reports[name])
    text = f"{as_text(reports)}\n\n{paragraph(conclusion(reports))}\n"
    write_file(folder / OUTPUTS[0], lambda file: file.write(text.encode("utf-8")))
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


def state(report: dict) -> float:
    """Bytes of parameters, gradients and optimizer state, on the rank with the most."""
    return max(sum(rank[part] for part in MEMORY[:3]) for rank in report["ranks"])


def conclusion(reports: dict[str, dict]) -> str:
    """What the figures say, in plain words."""
    if not {"DDP", "FSDP", "tensor", "pipeline, 1F1B"} <= reports.keys():
        return "Too few ways were run to compare them."
    ddp, fsdp, tensor, pipeline = (
        reports[name] for name in ("DDP", "FSDP", "tensor", "pipeline, 1F1B")
    )
    sent = {
        name: max(over_links(rank["traffic"]) for rank in reports[name]["ranks"])
        / max(over_links(rank["traffic"]) for rank in ddp["ranks"])
        for name in ("FSDP", "tensor", "pipeline, 1F1B")
    }
    return (
        "All ways give the numbers of one process, but for the asynchronous server; they differ in "
        "what a rank holds and what it sends. On two ranks FSDP and tensor parallelism hold "
        f"{state(fsdp) / state(ddp):.0%} and {state(tensor) / state(ddp):.0%} of DDP's weights, "
        f"gradients and optimizer state, the pipeline {state(pipeline) / state(ddp):.0%}, and send "
        f"{sent['FSDP']:.1f}, {sent['tensor']:.1f} and {sent['pipeline, 1F1B']:.1f} times as many "
        "bytes. So: DDP while the model with its optimizer fits into each device, then FSDP, and "
        "the others where layers are too large or links too slow for it."
    )


def draw(reports: dict[str, dict], path: Path) -> None:
    """Two panels with a bar per rank: what it holds, and what it sends over its link in a step."""
    from matplotlib import colormaps

    figure = new_figure(11, 6)
    memory, links = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    ranks = [rank for report in reports.values() for rank in report["ranks"]]
    counts = [len(report["ranks"]) for report in reports.values()]
    places = [at - 0.45 + 0.9 * (i + 0.5) / n for at, n in enumerate(counts) for i in range(n)]
    heights = [0.8 / n for n in counts for _ in range(n)]

    def stack(axes: Any, title: str, colors: str, where: str, parts: dict) -> None:
        """One panel; each part begins where the last one ended."""
        left = [0.0] * len(ranks)
        for color, (name, values) in zip(colormaps[colors].colors, parts.items()):
            axes.barh(places, values, heights, left=left, label=name, color=color)
            left = [a + b for a, b in zip(left, values)]
        axes.set(title=title, xlabel="MB", xlim=(0, 1.05 * max(left)))
        axes.grid(axis="x", alpha=0.3)
        axes.legend(fontsize=9, loc=where)

    stack(
        memory,
        "A rank holds",
        "tab10",
        "lower right",
        {n: [r[n] / 1e6 for r in ranks] for n in MEMORY},
    )
    kinds = sorted({kind for rank in ranks for kind in rank["traffic"]})
    sent = {k: [r["traffic"].get(k, (0, 0, 0))[2] / 1e6 for r in ranks] for k in kinds}
    stack(links, "A rank sends over its link in a step", "Set2", "upper right", sent)
    names = [f"{name}\n{counted(n, 'rank')}" for name, n in zip(reports, counts)]
    memory.set_yticks(range(len(reports)), names)
    memory.invert_yaxis()
    save_figure(figure, path)
