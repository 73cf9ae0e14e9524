"""The reference in a rank that behaves as if there were GPUs: PRETEND names what is pretended.

`quick.job(..., module="pretend", PRETEND=...)` runs it in forked ranks, torchrun as a script.

    nccl           Gloo's collectives hang where NCCL's would: destroying the group waits for all
                   ranks, and a lost peer raises nothing, so that a rank sits in a meeting for ever
    shared gpu     all ranks say that they run on the same GPU
    one gpu        only rank 1 says that it runs on a GPU
    no gpu asked   a question about GPUs ends the rank, unless they are hidden by then
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

import llm_ddp_parallel_training as reference


def hang() -> NoReturn:
    """As a collective of NCCL whose peer is gone: signals only run handlers, nothing is raised."""
    threading.Event().wait()
    raise AssertionError


def like_nccl() -> None:
    """NCCL's two habits that Gloo lacks: a teardown that meets, and silence about a lost peer."""
    step = reference.training_step

    def silent_step(*arguments, **options):
        try:
            return step(*arguments, **options)
        except RuntimeError as error:
            if "injected" in str(error):
                raise
            hang()

    def meeting_destroy(*_: object) -> None:
        store, ranks = dist.distributed_c10d._get_default_store(), dist.get_world_size()
        for what in ("destroyed", "left") if dist.get_rank() == 0 else ("destroyed",):
            store.add(what, 1)
            while store.add(what, 0) < ranks:  # rank 0 holds the store, so it leaves last
                time.sleep(0.05)
        if dist.get_rank():
            store.add("left", 1)
        print("destroyed together", flush=True)
        destroy()

    destroy, dist.destroy_process_group = dist.destroy_process_group, meeting_destroy
    dist.get_backend = lambda *_: "nccl"
    reference.training_step = silent_step


def on_gpus(same: bool) -> None:
    """What the rank tells the others of itself; it still computes on the CPU."""
    gpu = {"device": "cuda", "gpu": "GPU-0", "bf16": True, "host": "here"}
    if same or os.environ["RANK"] == "1":
        reference.about_rank = lambda launch: gpu


def no_question() -> None:
    """Who asks CUDA anything before GPUs are hidden initializes its driver, for good."""
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)

    def asked(*_: object, **__: object) -> bool:
        if os.environ.get("CUDA_VISIBLE_DEVICES") != "":
            print("asked for GPUs", flush=True)
            os._exit(99)
        print("no GPU was seen", flush=True)
        return False

    for module, name in (
        (torch.cuda, "is_available"), (torch.cuda, "device_count"), (torch.cuda, "_lazy_init"),
        (torch.accelerator, "is_available"), (torch.accelerator, "current_accelerator"),
        (torch.accelerator, "current_stream"),
    ):  # fmt: skip
        setattr(module, name, asked)


def main(arguments: list[str]) -> None:
    what = os.environ["PRETEND"]
    for fault in json.loads(os.environ.get("FAULTS", "[]")):  # under torchrun; quick has its own
        from spoiled import spoil

        spoil([fault])
    if what == "nccl":
        like_nccl()
    elif what == "no gpu asked":
        no_question()
    else:
        on_gpus(what == "shared gpu")
    reference.PEER_LOSS_GRACE_S = 1
    reference.main(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
