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

import argparse
import dataclasses
import datetime
import os
import types
import typing
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import llm_ddp_parallel_training as reference
from llm_ddp_parallel_training import Launch, UserError, reason_of

say = Launch().say  # prints, also to a reader who may leave: `| head`

# Flags of the reference for what it does before, between and after updates, and not in them.
BETWEEN_UPDATES = {
    "resume", "generate", "dry_run", "merge", "compile", "save_every", "keep", "mirror",
    "log_every", "eval_every", "sample_every", "tensorboard", "num_workers",
}  # fmt: skip


def flag(
    default: Any, help: str, *, low: float | None = None, high: float = 2**31 - 1,
    choices: Sequence[str] | None = None,
) -> Any:  # fmt: skip
    """A field of a lab's options. A number has bounds, `None` means that it was not given."""
    about = {"help": help, "low": low, "high": high, "choices": choices}
    return dataclasses.field(default=default, metadata=about)


def own_parser(kind: type, lab: str, description: str) -> argparse.ArgumentParser:
    """An argparse parser for the fields of a dataclass; what it refuses is one `UserError`."""
    parser = reference.OneLineParser(
        prog=f"python -m labs.{lab}", allow_abbrev=False, description=description,
        epilog="All other flags are those of llm_ddp_parallel_training.py; see its --help.",
    )  # fmt: skip
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        name, about = f"--{field.name.replace('_', '-')}", field.metadata
        of = [t for t in typing.get_args(hints[field.name]) if t is not types.NoneType]
        of = of[0] if of else hints[field.name]
        if of is bool:
            parser.add_argument(name, action="store_true", help=about["help"])
            continue
        shown = "" if field.default is None else f" (default: {field.default})"
        convert = (
            reference.number(of, about["low"] or 0, about["high"]) if of in (int, float) else of
        )
        parser.add_argument(
            name, type=convert, default=field.default, choices=about["choices"],
            help=about["help"] + shown,
        )  # fmt: skip
    return parser


def read_flags(
    kind: type, argv: Sequence[str] | None, lab: str, description: str,
    refused: Collection[str] = (), defaults: Sequence[str] = (),
) -> tuple[Any, Any, list[str]]:  # fmt: skip
    """(the lab's options, the reference's settings, the flags that those came from).

    `refused` are names of the reference's flags that mean nothing in this lab; `defaults` are flags
    for the reference that hold unless others are given. Raises `UserError`.
    """
    own, rest = own_parser(kind, lab, description).parse_known_args(argv)
    for name in sorted(vars(reference.flag_parser().parse_args(rest)).keys() & set(refused)):
        name = name.replace("_", "-")
        raise UserError(f"--{name} has no meaning in labs.{lab}; its --help lists what has")
    flags = [*defaults, *rest]
    return kind(**vars(own)), reference.parse_settings(flags), flags


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
