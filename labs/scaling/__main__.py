"""What more ranks bring on this machine: measured scaling.

    python -m labs.scaling --ranks 1,2
    python -m labs.scaling --ranks 1,2,4 --d-model 128 --layers 4 --batch-size 16

All flags but --ranks and --rounds are those of llm_ddp_parallel_training.py (the reference), and
what is timed is its own step, batches included; not the log, not the checkpoints. Four questions:

    weak scaling     the batch per rank stays: how many more tokens a second?
    strong scaling   the global batch stays: how much sooner is an update done?
    independent      as many processes that know nothing of each other: what this machine gives at
                     best. What is lost against that, DDP lost; the rest, the machine did not have
    no_sync          the same steps without the all-reduce of gradients: what that costs

It takes about 40 s and writes scaling.csv and scaling.png to runs/scaling-<date>-<time>, or to
--output-dir. team.py measures, measured.py makes figures of it, report.py tells them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # started by its path: the project is two folders above
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from labs.scaling.measured import by_block, row_of
from labs.scaling.report import as_table, conclusion, draw, write_csv
from labs.scaling.team import BLOCK_S, plan, take_turns
from labs.shared.flags import BETWEEN_UPDATES, flag, read_flags, refuse_launcher, results_folder
from labs.shared.plot import require_matplotlib
from labs.shared.ranks import new_store, run_ranks
from labs.shared.report import counted, paragraph, show
from llm_ddp_parallel_training import UserError, build_data, one_clear_ending

LAB, OUTPUTS = "scaling", ("scaling.csv", "scaling.png")


@dataclass
class Options:
    """What is measured."""

    ranks: str | None = flag(None, "numbers of ranks to measure, 1,2 say; 1 is always added")
    rounds: int = flag(9, "more of them make calmer medians", low=1, high=1000)


def main(argv: Sequence[str] | None = None) -> None:
    """From the command line to table, prediction, picture and conclusion."""
    with one_clear_ending():
        refuse_launcher(LAB)
        options, settings, flags = parse(argv)
        teams = rank_counts(options.ranks)
        require_matplotlib()
        cores, most = usable_cores(), teams[-1]
        threads = settings.threads or max(1, cores // most)
        folder = results_folder(LAB, OUTPUTS, settings.output_dir, settings.overwrite)
        blocks = plan(teams, settings.batch_size, threads, min(cores, threads * most))
        about = 10 + 1.3 * BLOCK_S * len(blocks) * (options.rounds + 1)
        show(
            f"{settings.model}, {counted(cores, 'core')}, {counted(threads, 'thread')} per rank, "
            f"{counted(options.rounds, 'round')}: about {about:.0f} s"
        )
        turns = new_store()
        how = {"seconds": 600 + 20 * about, "modules": ["labs.scaling.team", "torch._dynamo"]}
        results = run_ranks(take_turns, teams, (turns.port, flags, blocks, options.rounds), **how)
        measured = by_block(blocks, results)
        rows = [row_of(what, ranks, measured) for what, ranks in measured]
        show(f"\n{as_table(rows)}\n")
        write_csv(rows, folder / "scaling.csv")
        draw(rows, folder / "scaling.png")
        show(f"written to {folder}: {' '.join(OUTPUTS)}")
        said = conclusion(rows, most, cores) if most > 1 else "One rank has nothing to scale to."
        show("\n" + paragraph(said))


def parse(argv: Sequence[str] | None) -> tuple[Options, Any, list[str]]:
    """The lab's own options, what the reference's flags mean, and those flags."""
    about = "Measure what more ranks bring on this machine."
    options, settings, flags = read_flags(Options, argv, LAB, about, BETWEEN_UPDATES)
    if not {"--builtin", "--corpus-file"} & {flag.partition("=")[0] for flag in flags}:
        # Full windows: every step has the same work.
        _, settings, flags = read_flags(Options, ["--builtin", "python-docs", *flags], LAB, "")
    if settings.model == "tiny":
        build_data(settings)  # what is wrong with it is said before any process is started
    return options, settings, flags


def rank_counts(text: str | None) -> list[int]:
    """ "1,2,4" as numbers, rising; 1 is always there, for all is compared with it."""
    try:
        counts = {int(part) for part in (text or "").split(",")}
    except ValueError:
        counts = {0}
    if not 1 <= min(counts) <= max(counts) <= 1024:
        raise UserError(f"--ranks {text}: give whole numbers of at least 1, such as 1,2,4")
    return sorted({1, *counts})


def usable_cores() -> int:
    """The cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    return len(affinity(0)) if affinity else os.cpu_count() or 1


if __name__ == "__main__":
    main()
