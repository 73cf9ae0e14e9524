"""What several labs share: starting ranks on this machine, and a folder for results."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import sys
import threading
from collections.abc import Collection, Sequence
from multiprocessing.context import BaseContext
from pathlib import Path

import torch.distributed as dist

from llm_ddp_parallel_training import Launch, UserError, flag_parser, reason_of

say = Launch().say  # prints, also to a reader who may leave: `| head`

# Flags of the reference for what it does before, between and after updates, and not in them.
BETWEEN_UPDATES = {
    "resume", "generate", "dry_run", "merge", "compile", "save_every", "keep", "mirror",
    "log_every", "eval_every", "sample_every", "tensorboard", "num_workers",
}  # fmt: skip


def refuse_flags(flags: Sequence[str], meaningless: Collection[str], lab: str) -> dict:
    """The reference's flags that were given, by name.

    Raises `UserError` for a wrong one, and for one whose name is in `meaningless`.
    """
    given = vars(flag_parser().parse_args(flags))
    for name in sorted(given.keys() & meaningless):
        flag = name.replace("_", "-")
        raise UserError(f"--{flag} has no meaning in labs.{lab}; its --help lists what has")
    return given


def refuse_launcher(lab: str) -> None:
    """Raises `UserError` under torchrun, which would start a lab's ranks once for each rank."""
    if "RANK" in os.environ:
        raise UserError(f"the lab starts its own ranks: run it with python -m labs.{lab}")


def process_context(modules: Sequence[str] = ()) -> BaseContext:
    """How ranks are started: forked from a server that has imported PyTorch, where that exists.

    `modules` are imported there, too: all that takes seconds and would be imported by every rank.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():  # Windows
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["llm_ddp_parallel_training", *modules])
    return context


def local_launch(ranks: int) -> tuple[dist.TCPStore, list[dict[str, str]]]:
    """The store through which ranks on this machine meet, and each one's variables of torchrun.

    The store lives in the calling process, so that ranks may come and go; it must be kept as long
    as there are any.
    """
    libuv = sys.platform != "win32"  # PyTorch for Windows is built without it
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=libuv)
    shared = {
        "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    return store, [{"RANK": str(r), "LOCAL_RANK": str(r), **shared} for r in range(ranks)]


def end_with_lab() -> None:
    """Lets this process, a rank, end as soon as the lab is gone, however that was ended."""

    def wait() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def require_writable(flag: str, path: Path | None) -> None:
    """Raises `UserError` unless a result can be written to this file, in place of an old one."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise UserError(f"{flag} {path}: there is no folder {path.parent}")
    if path.exists() and not path.is_file():  # a device would be replaced by a file
        raise UserError(f"{flag} {path} is a folder or a device; give a file")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"{flag} {path}: the folder cannot be written to")


def results_folder(lab: str, outputs: Sequence[str], chosen: Path | None, overwrite: bool) -> Path:
    """Makes the folder for results: `chosen`, or runs/<lab>-<date>-<time>.

    Raises `UserError` if it cannot be written to, or holds one of the files `outputs` that may not
    be overwritten.
    """
    folder = chosen or Path("runs") / f"{lab}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output-dir {folder}: {reason_of(error)}") from None
    if not os.access(folder, os.W_OK):
        raise UserError(f"--output-dir {folder} cannot be written to")
    old = [name for name in outputs if (folder / name).exists()]
    if old and not overwrite:
        raise UserError(
            f"--output-dir {folder} already holds {old[0]}; choose another, or give --overwrite"
        )
    return folder
