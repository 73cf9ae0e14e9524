"""The reference with one thing changed, for tests that launch it: `instrumented.py WHAT FOLDER …`.

WHAT is `watch` (each rank writes to FOLDER what it trained on and the digest of its weights after
every update), `fail` (rank 1 raises in its second update) or `late` (rank 0 starts later than the
others). The remaining arguments belong to the reference.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import llm_ddp_parallel_training as ddp

RANK = int(os.environ.get("RANK", "0"))


def watch(folder: Path) -> None:
    """Appends one JSON object an update to FOLDER/rank-R.jsonl: record ids, weights' digest,
    loss, and a hash of its random state."""
    step = ddp.training_step

    def watched(model, *args, **kwargs):
        (micro_batches,) = (a for a in (*args, *kwargs.values()) if isinstance(a, list))
        result = step(model, *args, **kwargs)
        ids = [i for batch in micro_batches for i in batch["record_ids"].tolist()]
        row = {
            "ids": ids,
            "micro_batches": len(micro_batches),
            "digest": ddp.parameter_digest(getattr(model, "module", model)),
            "loss": result.loss,
            "random": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
        }
        with open(folder / f"rank-{RANK}.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        return result

    ddp.training_step = watched


def fail(folder: Path) -> None:
    """Rank 1 raises in its second update, as a bug in the code would."""
    step, calls = ddp.training_step, []

    def failing(*args, **kwargs):
        calls.append(1)
        if RANK == 1 and len(calls) == 2:
            raise ZeroDivisionError("a bug that only rank 1 meets")
        return step(*args, **kwargs)

    ddp.training_step = failing


def late(folder: Path) -> None:
    """Rank 0 needs two seconds more than the others to come to the first line of `main`."""
    if RANK == 0:
        time.sleep(2)


if __name__ == "__main__":
    {"watch": watch, "fail": fail, "late": late}[sys.argv[1]](Path(sys.argv[2]))
    ddp.main(sys.argv[3:])
