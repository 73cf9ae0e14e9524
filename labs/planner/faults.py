"""Slow ranks, failures and checkpoints: how much of the time is training.

`args` are the flags: what is assumed of the machines beside their speed.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
from typing import Any

from labs.planner.runs import Run


def expected_slowest(count: int) -> float:
    """Expected largest of `count` standard normal values (Blom 1958)."""
    return statistics.NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def slowdown(gpus: int, spread: float, slow_share: float, slow_by: float) -> float:
    """Mean time of a step, as a multiple of an undisturbed GPU's.

    A step takes as long as its slowest rank: `spread` is the relative standard deviation of a
    rank's step time. Besides, each GPU is slow by `slow_by` at times (a hot card, a bad link, a
    busy host), and one is enough: some GPU is with probability 1 − (1 − share)^n.
    """
    somebody = 1 - (1 - slow_share) ** gpus
    return 1 + spread * expected_slowest(gpus) + somebody * slow_by


def daly(blocking: float, between: float) -> float:
    """Seconds between checkpoints that take `blocking` each (Daly 2006, equation 37).

    `between`: mean time between failures. For small costs it is Young's √(2 · blocking · between).
    """
    if blocking >= 2 * between:
        return between
    ratio = blocking / (2 * between)
    young = math.sqrt(2 * blocking * between)
    return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - blocking


def useful_share(interval: float, blocking: float, between: float, restart: float) -> float:
    """Share of the wall time that is training, failures and checkpoints included.

    Daly 2006, equation 20, whose wall time is M · e^(R/M) · (e^((τ+δ)/M) − 1) · work / τ.
    """
    if (interval + blocking + restart) / between > 700:  # beyond what a float holds
        return 0.0
    growth = math.expm1((interval + blocking) / between)
    return interval / (between * math.exp(restart / between) * growth)


def checkpoints(run: Run, step: float, args: argparse.Namespace) -> dict[str, Any]:
    """Sizes by kind in bytes, seconds to write, intervals and losses; `step` is an update's time.

    Blocking, the ranks wait for the write; in the background, for a copy to their hosts' memory.
    But such a checkpoint counts only when it is written: a failure then costs the time of the write
    as well, on top of half an interval and the restart.
    """
    machine, parameters, full = run.machine, run.model.parameters, 12 * run.trained
    sizes = {"weights (16 bits)": 2 * parameters, "weights (fp32)": 4 * parameters}
    sizes["to resume (weights and AdamW, fp32)"] = full
    if run.lora_r:
        sizes = {"adapter": 4 * run.trained, "to resume (adapter and AdamW, fp32)": full}
    write = full / (args.storage * machine.nodes)
    snapshot = full / machine.gpus / args.snapshot  # every rank copies its part to host memory
    between = args.mtbf * 3600 / machine.gpus
    ways = {}
    for name, blocking, behind in (("blocking", write, 0.0), ("background", snapshot, write)):
        interval = max(daly(blocking, between), behind, step)  # one write at a time
        ways[name] = {
            "blocking_seconds": blocking,
            "interval_seconds": interval,
            "interval_updates": max(1, round(interval / step)),
            "loss_per_failure_seconds": interval / 2 + behind + args.restart,
            "useful_share": useful_share(interval, blocking, between, behind + args.restart),
        }
    return {
        "sizes": sizes,
        "write_seconds": write,
        "between_failures_seconds": between,
        "ways": ways,
        "kept": args.keep,
        "stored_bytes": (args.keep + 1) * full,  # and the best one
    }


def faults(run: Run, gpus: int, step: float, args: argparse.Namespace) -> dict[str, float]:
    """The same run on `gpus` GPUs: slow ranks, failures, and what is left of the time."""
    there = dataclasses.replace(run, machine=run.machine.of_size(gpus))
    saved = checkpoints(there, step, args)
    way = saved["ways"]["background"]
    spread = run.jitter / math.sqrt(run.accum)
    return {
        "gpus": gpus,
        "slowdown": slowdown(gpus, spread, args.slow_share, args.slow_by),
        "failures_per_day": 86400 / saved["between_failures_seconds"],
        "interval_seconds": way["interval_seconds"],
        "useful_share": way["useful_share"],
    }
