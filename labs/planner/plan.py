"""The plan: everything that the report and --json show, as plain types."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from labs.planner.choose import Candidate, choose
from labs.planner.faults import checkpoints, faults
from labs.planner.read import read_run
from labs.planner.time import flops_per_token, scaling


def make_plan(args: argparse.Namespace) -> dict[str, Any]:
    """The plan for the flags. Raises `PlanError` for a question that makes no sense."""
    best, seen = choose(read_run(args), args)
    run, layout, machine, m = best.run, best.layout, best.run.machine, best.run.model
    shown = seen if args.all else best_of_each_way(best, seen)
    a_gpu = best.tokens_per_second / machine.gpus
    plan: dict[str, Any] = {
        "model": {**dataclasses.asdict(m), "parameters": m.parameters, "trained": run.trained},
        "machine": {
            **dataclasses.asdict(machine), "gpus": machine.gpus,
            "kernel_share": machine.kernel_share(m.width),
        },
        "layout": {**dataclasses.asdict(layout), "name": layout.name},
        "batch": {
            "sequences": run.batch, "seq_len": run.seq_len, "accumulation": run.accum,
            "update_sequences": run.batch * run.accum * layout.data,
            "update_tokens": best.update_tokens,
        },
        "memory": best.memory,
        "layouts": [alternative(one, best) for one in shown],
        # What DDP all-reduces in an update: fp32, every trained parameter once.
        "gradient_bytes": 4 * run.trained if machine.gpus > 1 else 0,
        "flops_per_token": flops_per_token(run),
        "step": best.step,
        "tokens_per_second": best.tokens_per_second,
        # FLOP/s of a GPU over the whole step: the model's, and with what is computed twice.
        "model_flops": flops_per_token(run) * a_gpu,
        "hardware_flops": flops_per_token(run, layout.checkpointing) * a_gpu,
        "share_of_peak": flops_per_token(run) * a_gpu / machine.peak,
        "checkpoints": checkpoints(run, best.step["total"], args),
    }  # fmt: skip
    if args.tokens or args.data:
        useful = plan["checkpoints"]["ways"]["background"]["useful_share"]
        plan |= data_and_time(best, useful, args)
    if machine.name != "cpu":
        plan["scaling"] = scaling(run, layout)
        sizes = sorted({machine.gpus, 1024, 4096, 16384})
        plan["faults"] = [faults(run, gpus, best.step["total"], args) for gpus in sizes]
    return plan


def best_of_each_way(best: Candidate, seen: Sequence[Candidate]) -> list[Candidate]:
    """One for each kind of data parallelism with and without tensor and pipeline ranks.

    The fastest that is possible, else the leanest; of the chosen one's way, the chosen one.
    """
    ways: dict[tuple, list[Candidate]] = {}
    for one in seen:
        layout = one.layout
        hybrid = 1 < layout.shard < layout.data
        key = (layout.pipeline > 1, layout.tensor > 1, layout.kind, hybrid, layout.data > 1)
        ways.setdefault(key, []).append(one)
    found = []
    for same in ways.values():
        possible = [one for one in same if not one.problem]
        fastest = max(possible, key=lambda one: one.tokens_per_second, default=None)
        leanest = min(same, key=lambda one: one.memory["total"])
        found.append(best if best in same else fastest or leanest)
    return found


def alternative(one: Candidate, best: Candidate) -> dict[str, Any]:
    """A layout beside the chosen one, each with its own portions."""
    causes = {
        "waiting": one.step["waiting for the slowest"],
        "sending": one.step["data-parallel communication"],
        "tensor": one.step["tensor communication"],
        "bubble": one.step["pipeline bubble"] + one.step["pipeline communication"],
    }  # fmt: skip
    cause = max(causes, key=causes.__getitem__)
    if one.layout.checkpointing == "full" != best.layout.checkpointing:
        cause = "twice"
    return {
        "name": one.layout.name, "way": one.layout.way,
        "checkpointing": one.layout.checkpointing, "chosen": one is best,
        "problem": one.problem, "cause": cause,
        "sequences": one.run.batch, "accumulation": one.run.accum, "memory": one.memory,
        "tokens_per_second": one.tokens_per_second,
        "slower": 1 - one.tokens_per_second / best.tokens_per_second,
    }  # fmt: skip


def data_and_time(best: Candidate, useful: float, args: argparse.Namespace) -> dict[str, dict]:
    """How the data is divided, and how long all of it takes.

    Tensor and pipeline ranks of a replica read the same; a node reads for the replicas on it.
    `seconds` is training alone; days, GPU-hours and cost include failures and saving.
    """
    tokens = args.tokens or args.data / args.bytes_per_token
    gpus, replicas = best.run.machine.gpus, best.layout.data
    readers = min(replicas, max(1, best.run.machine.gpus_per_node // best.layout.tensor))
    rank_bytes = tokens * args.bytes_per_token / replicas
    rate = best.tokens_per_second * args.bytes_per_token / replicas
    seconds = tokens * args.epochs / best.tokens_per_second
    wall = seconds / useful if useful else math.inf
    hours = gpus * wall / 3600
    return {
        "data": {
            "bytes": tokens * args.bytes_per_token, "bytes_per_token": args.bytes_per_token,
            "tokens": tokens, "epochs": args.epochs, "replicas": replicas,
            "rank_bytes": rank_bytes, "node_bytes": rank_bytes * readers,
            "rank_bytes_per_second": rate, "node_bytes_per_second": rate * readers,
            "tokens_per_parameter": tokens * args.epochs / best.run.model.parameters,
        },
        "time": {
            "updates": math.ceil(tokens * args.epochs / best.update_tokens), "seconds": seconds,
            "days": wall / 86400, "gpu_hours": hours, "price": args.price,
            "cost": hours * args.price,
        },
    }  # fmt: skip
