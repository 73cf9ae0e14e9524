"""The lab's flags, and the order of things."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.errors import record

if not __package__:  # started by its path: the project is two folders up
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import llm_ddp_parallel_training as ddp
from labs.explain_step.observe import BucketWatch
from labs.explain_step.picture import draw
from labs.explain_step.report import as_text, conclusion
from labs.explain_step.step import explain, text_reader, updates_of
from labs.explain_step.three_ways import TOLERANCE, Parts, agrees
from labs.shared.flags import BETWEEN_UPDATES, flag, read_flags, results_folder
from labs.shared.plot import require_matplotlib
from labs.shared.report import counted, paragraph

OUTPUTS = ("explain.txt", "explain.png", "explain.json")
LARGER = ("--d-model", "256", "--layers", "4")  # unless the flags say otherwise
ABOUT = "One training step in slow motion, rank by rank."


@dataclasses.dataclass
class Options:
    # fmt: off
    steps: int = flag(2, "updates to explain, from the first; only from the second on are DDP's "
        "buckets in the order in which gradients arrive", low=1, high=1000)
    bucket_cap_mb: float | None = flag(None, "size in MiB at which DDP closes a bucket (default: a "
        "quarter of all gradients, so that there is something to see; DDP's own is 25)", above=0)
    # fmt: on


@record
def main(argv: Sequence[str] | None = None) -> None:
    """From the launcher's environment to the conclusion."""
    with ddp.one_clear_ending() as watch:
        launch = ddp.read_launcher(watch)
        options, s, _ = read_flags(Options, argv, "explain_step", ABOUT, BETWEEN_UPDATES, LARGER)
        require_matplotlib()
        ddp.set_up(launch, s)  # ranks meet
        run = (ddp.build_tiny if s.model == "tiny" else ddp.build_qwen)(launch, s)
        if options.steps > run.updates:
            raise ddp.UserError(
                f"--steps {options.steps} is more than --max-steps and --epochs allow, which is "
                f"{counted(run.updates, 'update')}"
            )
        folder = None
        if launch.rank == 0:
            folder = results_folder("explain", OUTPUTS, s.output_dir, s.overwrite)
        size = 4 * sum(p.numel() for _, p in ddp.trained_parameters(run.model))  # of gradients
        introduce(run, size)
        steps = explain_all(run, options, size)
        if folder:
            write_outputs(folder, run, steps, size)
        broken = [number for number, step in enumerate(steps, 1) if not agrees(step)]
        if broken:
            raise ddp.RunError(
                f"update {broken[0]}: DDP, the average by hand and one process do not agree to "
                f"{TOLERANCE:g}; see part 6 of its report"
            )


def introduce(run: ddp.Run, size: int) -> None:
    """Who will compute what, and how long it takes."""
    launch, s = run.launch, run.settings
    takes = "about ten seconds" if s.model == "tiny" else "a minute or more"
    text = (
        f"{counted(launch.world_size, 'rank')} on {launch.device.type}, {s.precision}; "
        f"{size // 4:,} trained parameters, {size / 1e6:.2f} MB of gradients; {s.batch_size} × "
        f"{s.grad_accum} samples a rank and update. This takes {takes}."
    )
    launch.say(paragraph(text))


def explain_all(run: ddp.Run, options: Options, size: int) -> list[dict]:
    """The figures of each update; `size`: bytes of gradients. Ranks meet."""
    launch, s = run.launch, run.settings
    torch.manual_seed(s.seed + 1 + launch.rank)  # as the reference does it: other dropout masks
    parts, watch, text = Parts(run.model, run.model, s), None, text_reader(s)
    if launch.world_size > 1:
        cap = options.bucket_cap_mb or size / 4 / 2**20
        parts.model = ddp.wrap_in_ddp(run.model, launch, bucket_cap_mb=cap)  # ranks meet
        watch = BucketWatch(parts.model, parts.bare)
    steps: list[dict] = []
    for update in itertools.islice(updates_of(run), options.steps):
        launch.watch.step = len(steps) + 1
        steps.append(explain(parts, watch, update, launch, text))
    return steps


def write_outputs(folder: Path, run: ddp.Run, steps: list[dict], size: int) -> None:
    """Report, figures and picture.

    In explain.json times are seconds since the step's zero (see `Clock`), a phase is [name, begin,
    end].
    """
    say, s, text = run.launch.say, run.settings, as_text(steps, run.settings) + "\n"
    say("\n" + text)
    ddp.write_whole(folder / "explain.txt", lambda to: to.write_text(text, "utf-8"))
    content = {"settings": s.to_save(), "trained_bytes": size, "steps": steps}
    ddp.write_json(folder / "explain.json", {"world_size": run.launch.world_size, **content})
    draw(steps, folder / "explain.png")
    say(f"written to {folder}: {' '.join(OUTPUTS)}\n\n{paragraph(conclusion(steps))}")


if __name__ == "__main__":
    main()
