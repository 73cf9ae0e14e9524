"""The same model and data under DDP, FSDP, tensor, pipeline and parameter-server training.

All of them on the CPU, with tables and a picture, in about 30 s; and one, on two processes:

    python -m labs.strategies --compare --cpu
    python -m torch.distributed.run --standalone --nproc_per_node=2 \\
        -m labs.strategies --strategy fsdp --cpu

A sharded checkpoint, written in the background by two ranks, goes on in one process:

    python -m labs.strategies --strategy fsdp --ranks 2 --cpu --save runs/sharded
    python -m labs.strategies --strategy one --cpu --load runs/sharded

A worker that dies while the others go on (torchrun would end them, so the lab starts the ranks):

    python -m labs.strategies --strategy parameter-server --mode async --ranks 3 \\
        --kill-worker-after 5 --cpu

Read step.py first, one process and DDP; then each strategy is a file that differs from it: fsdp,
tensor, pipeline, parameter_server, fsdp_tensor. train.py runs them, traffic.py counts. The run
fails if a strategy gives other numbers than one process.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import record

if not __package__:  # started by its path: the project is two folders above
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from labs.shared.flags import refuse_launcher
from labs.shared.ranks import run_ranks, watch_ranks
from labs.shared.report import show
from labs.strategies.compare import ENGINES, PATIENCE_S, a_rank, compare
from labs.strategies.options import check, parse
from labs.strategies.report import as_text, combined, require_equal
from labs.strategies.train import run_strategy
from llm_ddp_parallel_training import gather, one_clear_ending, read_launcher, write_json


@record
def main(argv: Sequence[str] | None = None) -> None:
    """All strategies, or one: on ranks that are started here, or on these of the launcher."""
    with one_clear_ending() as watch:
        launch = read_launcher(watch)
        argv = list(sys.argv[1:] if argv is None else argv)
        options, settings, flags = parse(argv)
        if options.compare or options.ranks:
            refuse_launcher("strategies")
        if options.compare:
            compare(options, settings, flags)
            return
        check(options, settings, options.ranks or launch.world_size)
        how = {"seconds": 12 * PATIENCE_S, "modules": ENGINES}
        if options.kill_worker_after:  # the value of a rank that was killed is None
            endings = watch_ranks(a_rank, options.ranks, (argv,), go_on=True, **how)
            found = [ending.value for ending in endings]
        elif options.ranks:
            found = run_ranks(a_rank, options.ranks, (argv,), **how)
        else:
            found = gather(run_strategy(launch, options, settings), launch)
        if launch.rank == 0:
            tell(combined(found), options, settings)


def tell(report: dict, options: Any, settings: Any) -> None:
    """Prints what was found, writes it, and raises `RunError` if the numbers are wrong."""
    show(f"\n{as_text({options.strategy: report})}\n")
    if "loss_difference" in report:
        show("Gradients and losses are those of one process, but for rounding.")
    else:
        show("These are not the numbers of one process: there is nothing to compare them with.")
    if options.report:
        write_json(options.report, report)
    if settings.precision == "fp32":
        require_equal(report)


if __name__ == "__main__":
    main()
