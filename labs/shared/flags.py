"""The flags of a lab, its output folder, and what it says.

A lab's own flags are the fields of a dataclass:

    @dataclass
    class Options:
        ranks: int = flag(2, "processes to start", low=1)
        report: Path | None = flag(None, "also write the findings there")

    options, settings, given = read_flags(Options, argv, "strategies", "What it does.", refused)

All others are those of llm_ddp_parallel_training.py (the reference), but for the `refused` ones.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from llm_ddp_parallel_training import UserError, flag, flag_parser, parse_settings, reason_of

__all__ = ["flag", "flag_parser"]  # of the reference

BETWEEN_UPDATES = set(  # flags of the reference for what it does not do in an update
    "resume generate dry_run merge compile save_every keep checkpoint_dir log_every eval_every "
    "sample_every tensorboard".split()
)


def read_flags(
    kind: type,
    argv: Sequence[str] | None,
    lab: str,
    about: str,
    refused: Collection[str] = (),
    defaults: Sequence[str] = (),
) -> tuple[Any, Any, list[str]]:
    """(the lab's options, the reference's settings, the flags that those came from).

    `refused` are names of the reference's flags that mean nothing in this lab; `defaults` are flags
    for the reference that hold unless others are given. Raises `UserError`.
    """
    others = "All other flags are those of llm_ddp_parallel_training.py; see its --help."
    parser = flag_parser(kind, prog=f"python -m labs.{lab}", description=about, epilog=others)
    own, rest = parser.parse_known_args(argv)
    for name in sorted(vars(flag_parser().parse_args(rest)).keys() & set(refused)):
        name = name.replace("_", "-")
        raise UserError(f"--{name} has no meaning in labs.{lab}; its --help lists what has")
    flags = [*defaults, *rest]
    return kind(**vars(own)), parse_settings(flags), flags


def refuse_launcher(lab: str) -> None:
    """Raises `UserError` under torchrun, which would start a lab's ranks once for each rank."""
    if "RANK" in os.environ:
        raise UserError(f"the lab starts its own ranks: run it with python -m labs.{lab}")


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
