"""A sharded checkpoint: each rank writes its share, in the background, and any number reads it.

`torch.distributed.checkpoint` copies the shares in memory, and threads write them beside the next
steps. The files are safetensors: unlike pickles, they cannot run code.
"""

from __future__ import annotations

import json
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from labs.shared.report import counted
from labs.strategies.step import Strategy
from llm_ddp_parallel_training import RunError, UserError, reason_of, write_json

INDEX = "index.json"  # written last: a folder with it is complete


def training_state(strategy: Strategy, step: int) -> dict[str, torch.Tensor]:
    """Weights and optimizer state by name, this rank's share; loading fills the same tensors."""
    state = {"step": torch.tensor(step)}
    for name, parameter in strategy.bare.named_parameters():
        state[f"model.{name}"] = parameter.detach()
        for key, value in strategy.optimizer.state[parameter].items():
            state[f"optimizer.{name}.{key}"] = value
    return state


class Saver:
    """Writes the state after one step beside the steps that follow."""

    def __init__(self, strategy: Strategy, folder: Path, after: int, config: dict) -> None:
        self.strategy, self.folder, self.after, self.config = strategy, folder, after, config
        # Its own group: the writing threads meet too, and must not mix with the training.
        self.group = dist.new_group(backend="gloo")
        self.future, self.meanwhile = None, 0  # steps that ended while it was written

    def after_step(self, step: int) -> None:
        """Begins to save when it is time; else looks whether that is still going on."""
        if step == self.after:
            begin = time.perf_counter()
            writer = dcp.HuggingFaceStorageWriter(str(self.folder), save_distributed=True)
            state = training_state(self.strategy, step)
            self.future = dcp.async_save(state, storage_writer=writer, process_group=self.group)
            self.copied = time.perf_counter() - begin
        elif self.future and not self.future.done():
            self.meanwhile += 1

    def finish(self) -> None:
        """Waits for the writing. Raises `RunError` if it failed."""
        try:
            self.future.result()
        except (Exception, dcp.CheckpointException) as error:  # of the disk or of another rank
            raise RunError(f"--save {self.folder}: {first_cause(error)}") from error
        if self.strategy.launch.rank == 0:
            files = sorted(path.name for path in self.folder.glob("*.safetensors"))
            write_json(self.folder / INDEX, {"step": self.after, "files": files, **self.config})
        self.strategy.launch.say(
            f"saved {self.folder}, state of step {self.after}: copied in "
            f"{1e3 * self.copied:.0f} ms, {counted(self.meanwhile, 'step')} ended meanwhile"
        )


def read_index(folder: Path) -> dict:
    """The model's shape and the number of steps. Raises `UserError` unless it is complete."""
    try:
        index = json.loads((folder / INDEX).read_text("utf-8"))
        missing = [name for name in index["files"] if not (folder / name).is_file()]
        if missing:
            raise FileNotFoundError(f"{missing[0]} is missing")
        return {**index, "step": int(index["step"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = reason_of(error)
        raise UserError(f"--load {folder} is no complete sharded checkpoint: {why}") from None


def load(strategy: Strategy, folder: Path, alone: bool) -> int:
    """Fills weights and optimizer state; the number of steps that they had made.

    Each rank reads what it holds, from the files of however many ranks wrote them. `alone`: this
    process reads for itself, without the others. Raises `UserError` for damaged files.
    """
    for group in strategy.optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    strategy.update()  # creates the optimizer's state; all values come from the files
    state = training_state(strategy, 0)
    try:
        with warnings.catch_warnings():  # that one process is meant to read alone
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            reader = dcp.HuggingFaceStorageReader(str(folder))
            dcp.load(state, storage_reader=reader, no_dist=alone)
    except (Exception, dcp.CheckpointException) as error:  # the latter holds each rank's own
        raise UserError(f"--load {folder}: {first_cause(error)}") from None
    return int(state["step"])


def first_cause(error: BaseException) -> str:
    """What went wrong on the first rank where something did, in one line."""
    causes = [cause for cause, _ in getattr(error, "failures", {}).values()] or [error]
    return reason_of(causes[0])
