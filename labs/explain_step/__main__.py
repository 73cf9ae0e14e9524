"""The lab's flags, and the order of things."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.errors import record

if not __package__:  # started by its path: the project is two folders up
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import llm_ddp_parallel_training as ddp
from labs.explain_step.observe import BucketWatch
from labs.explain_step.picture import draw, trace_events
from labs.explain_step.race import race
from labs.explain_step.report import conclusion, race_report, step_report
from labs.explain_step.step import explain, text_reader, updates_of
from labs.explain_step.three_ways import TOLERANCE, Parts, agrees
from labs.shared.flags import BETWEEN_UPDATES, flag, read_flags, results_folder
from labs.shared.plot import require_matplotlib
from labs.shared.report import paragraph

OUTPUTS = ("explain.txt", "explain.png", "explain.json", "trace.json")
LARGER = ("--d-model", "256", "--layers", "4")  # unless the flags say otherwise


@dataclasses.dataclass
class Options:
    steps: int = flag(
        2, "updates to explain, from the first; only from the second on are DDP's buckets in the "
        "order in which gradients arrive", low=1, high=1000,
    )  # fmt: skip
    bucket_cap_mb: float | None = flag(
        None, "size in MiB at which DDP closes a bucket (default: a quarter of all gradients, so "
        "that there is something to see; DDP's own is 25)", above=0,
    )  # fmt: skip
    full: bool = flag(False, "print all of explain.txt: every update, all layers, all phases")


@record
def main(argv: Sequence[str] | None = None) -> None:
    """From the launcher's environment to the conclusion."""
    with ddp.one_clear_ending() as watch:
        launch = ddp.read_launcher(watch)
        options, settings, _ = read_flags(
            Options, argv, "explain_step", "One training step in slow motion, rank by rank.",
            BETWEEN_UPDATES, LARGER,
        )  # fmt: skip
        require_matplotlib()
        ddp.set_up(launch, settings)  # ranks meet
        run = (ddp.build_tiny if settings.model == "tiny" else ddp.build_qwen)(launch, settings)
        if options.steps > run.updates:
            raise ddp.UserError(
                f"--steps {options.steps} is more than --max-steps and --epochs allow, which is "
                f"{ddp.counted(run.updates, 'update')}"
            )
        chosen = settings.output_dir, settings.overwrite
        folder = results_folder("explain", OUTPUTS, *chosen) if launch.rank == 0 else None
        introduce(run)
        steps, timed = explain_all(run, options)
        if launch.rank == 0:
            write_outputs(folder, run, steps, timed, options.full)
        broken = [number for number, step in enumerate(steps, 1) if not agrees(step)]
        if broken:
            raise ddp.RunError(
                f"update {broken[0]}: DDP, the average by hand and one process do not agree to "
                f"{TOLERANCE:g}; see part 6 of its report"
            )


def introduce(run: ddp.Run) -> None:
    """Who will compute what, and how long it takes."""
    launch, s = run.launch, run.settings
    trained = [p for _, p in ddp.trained_parameters(run.model)]
    size = sum(p.numel() * p.element_size() for p in trained)
    takes = "about ten seconds" if s.model == "tiny" else "a minute or more"
    launch.say(paragraph(
        f"{ddp.counted(launch.world_size, 'rank')} on {launch.device.type}, {s.precision}; "
        f"{sum(p.numel() for p in trained):,} trained parameters, {size / 1e6:.2f} MB of "
        f"gradients; {s.batch_size} × {s.grad_accum} samples a rank and update. This takes {takes}."
    ))  # fmt: skip


def explain_all(run: ddp.Run, options: Options) -> tuple[list[dict], dict]:
    """The figures of each update, and how long the ways to average took. Ranks meet."""
    launch, s = run.launch, run.settings
    torch.manual_seed(s.seed + 1 + launch.rank)  # as the reference does it: other dropout masks
    parts, watch, timed = Parts(run.model, run.model, s), None, {}
    trained = [p for _, p in ddp.trained_parameters(run.model)]
    quarter = sum(p.numel() * p.element_size() for p in trained) / 4 / 2**20
    cap = options.bucket_cap_mb or quarter
    wrap = partial(ddp.wrap_in_ddp, launch=launch, bucket_cap_mb=cap)
    if launch.world_size > 1:
        parts.model = wrap(run.model)  # ranks meet
        watch = BucketWatch(parts.model, parts.bare)
    steps, text = [], text_reader(s)
    for update in itertools.islice(updates_of(run), options.steps):
        launch.watch.step = len(steps) + 1
        steps.append(explain(parts, watch, update, launch, text))
    if watch:
        timed = race(parts, wrap, update.micro_batches, launch)
    return steps, timed


def write_outputs(folder: Path, run: ddp.Run, steps: list[dict], timed: dict, full: bool) -> None:
    """Report, figures, trace and picture, and what of it is printed.

    In explain.json times are seconds since the step's zero (see `Clock`), a phase is [name, begin,
    end], and `common_clock` says whether the times of different ranks can be compared.
    """
    launch, s = run.launch, run.settings
    everything = [
        line
        for number in range(1, len(steps) + 1)
        for line in step_report(number, steps, s, launch.device.type, full=True)
    ]
    everything += race_report(timed)
    short = step_report(len(steps), steps, s, launch.device.type, full=False) + race_report(timed)
    trained = [p for _, p in ddp.trained_parameters(run.model)]
    content = {
        "world_size": launch.world_size,
        "device": launch.device.type,
        "settings": s.to_save(),
        "trained_parameters": sum(p.numel() for p in trained),
        "trained_bytes": sum(p.numel() * p.element_size() for p in trained),
        "common_clock": launch.local_world_size == launch.world_size,
        "steps": steps,
        "race": timed,
    }
    launch.say("\n".join(everything if full else short))
    text = "\n".join(everything).lstrip("\n") + "\n"
    ddp.write_file(folder / "explain.txt", lambda file: file.write(text.encode("utf-8")))
    ddp.write_json(folder / "explain.json", content)
    ddp.write_json(folder / "trace.json", trace_events(steps))
    draw(steps, folder / "explain.png")
    launch.say(f"\nwritten to {folder}: {' '.join(OUTPUTS)}"
               + ("" if full else "; --full prints all of explain.txt"))  # fmt: skip
    launch.say("\n" + paragraph(conclusion(steps)))


if __name__ == "__main__":
    main()
