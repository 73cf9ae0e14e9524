"""What more ranks bring on this machine: measured scaling, and what follows from it for more.

    python -m labs.scaling --ranks 1,2
    python -m labs.scaling --ranks 1,2,4 --d-model 128 --layers 4 --batch-size 16

All flags but --ranks and --rounds are those of llm_ddp_parallel_training.py (the reference), and
what is timed is its own step, batches included; not the log, not the checkpoints. Four questions:

    weak scaling     the batch per rank stays: how many more tokens a second?
    strong scaling   the global batch stays: how much sooner is an update done?
    independent      as many processes that know nothing of each other: what this machine gives at
                     best. What is lost against that, DDP lost; the rest, the machine did not have
    no_sync          the same steps without the all-reduce of gradients: what that costs

Machines are noisy and drift. So a team of processes is started for each number of ranks, once;
then all measurements take turns, in short blocks, round after round, the other teams asleep.
Ratios are formed within a round, and the table shows medians over the rounds.

It writes scaling.csv and scaling.png to runs/scaling-<date>-<time>, or to --output-dir.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import csv
import io
import itertools
import math
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

if not __package__:  # started by its path: the project is in the folder above
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from labs import common
from llm_ddp_parallel_training import (
    EpochSampler,
    Launch,
    OneLineParser,
    RunError,
    ShardSampler,
    Where,
    build_data,
    build_optimizer,
    build_qwen,
    build_tiny,
    choose_device,
    counted,
    ignore_signals,
    number,
    one_clear_ending,
    parse_settings,
    print_on_any_terminal,
    read_launcher,
    require_matplotlib,
    set_up,
    trained_parameters,
    training_step,
    updates_of_epoch,
    wrap_in_ddp,
    write_file,
)

OUTPUTS = ("scaling.csv", "scaling.png")
BLOCK_S = 0.3  # how long a block of steps lasts: short against the drift, long against a step
PREDICTED = (4, 8, 16, 32, 64)  # ranks


# ------------------------------------------------------------------------------------------
# A rank
# ------------------------------------------------------------------------------------------


class Rank:
    """One process of a team: the reference's set-up, and blocks of steps on demand."""

    def __init__(self, flags: Sequence[str]) -> None:
        self.launch, self.settings = read_launcher(), parse_settings(flags)
        choose_device(self.launch, self.settings)
        set_up(self.launch)
        build = build_tiny if self.settings.model == "tiny" else build_qwen
        self.run = build(self.launch, self.settings)
        self.model = self.bare = self.run.model
        if self.launch.world_size > 1:
            self.model = wrap_in_ddp(self.bare, self.launch)
        self.optimizer = build_optimizer(self.bare, self.settings)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0  # the same work, and the replicas stay equal whatever is left out
        self.scaler = torch.amp.GradScaler("cuda", enabled=self.settings.precision == "fp16")
        self.updates: dict[int, Iterator[list[dict]]] = {}  # by batch size

    def facts(self) -> dict[str, Any]:
        """What the others need to know: bytes of gradients, device, backend."""
        count = sum(p.numel() for _, p in trained_parameters(self.bare))
        chosen = {what: choice for what, choice, _ in self.launch.choices}
        return {"bytes": 4 * count, "device": chosen["device"], "backend": chosen["backend"]}

    def steps(self, how: str, batch: int, count: int, threads: int) -> dict[str, Any]:
        """Times `count` updates: {"seconds": of each, "tokens": this rank's share of all of them}.

        `how` is "ddp", "no_sync", which leaves out the all-reduce of the gradients, or "alone", as
        a process without a group.
        """
        torch.set_num_threads(threads)
        if batch not in self.updates:
            self.updates[batch] = self._endless(batch)
        launch, model, unsynchronized = self.launch, self.model, contextlib.nullcontext()
        if how == "alone":
            # The model inside the wrapper: DDP ignores a backward pass whose forward it missed.
            launch, model = Launch(device=launch.device), self.bare
        elif how == "no_sync":
            unsynchronized = model.no_sync()
        seconds, tokens = [], 0.0
        self._meet()
        with unsynchronized:
            for _ in range(count):
                begin = time.perf_counter()
                result = training_step(
                    model, self.optimizer, self.scaler, next(self.updates[batch]), launch,
                    self.settings,
                )  # fmt: skip
                self._finish()
                seconds.append(time.perf_counter() - begin)
                tokens += result.tokens / launch.world_size
        return {"seconds": seconds, "tokens": tokens}

    def all_reduce(self, size: int, count: int) -> list[float]:
        """Seconds of each of `count` all-reduces of `size` bytes, with nothing else to do."""
        message = torch.zeros(size // 4, device=self.launch.device)
        seconds = []
        for _ in range(count):
            self._meet()
            begin = time.perf_counter()
            dist.all_reduce(message)  # ranks meet
            self._finish()
            seconds.append(time.perf_counter() - begin)
        return seconds

    def _endless(self, batch: int) -> Iterator[list[dict]]:
        """This rank's micro-batches, update after update, epoch after epoch."""
        launch, data, settings = self.launch, self.run.data.train, copy.copy(self.settings)
        settings.batch_size = batch
        sampler = EpochSampler(len(data), settings.seed)
        if launch.world_size > 1:
            sampler = ShardSampler(len(data), settings.seed, launch.world_size, launch.rank)
        loader = DataLoader(data, batch, sampler=sampler, collate_fn=self.run.collate)
        for epoch in itertools.count(1):
            sampler.set_epoch(epoch)
            yield from updates_of_epoch(loader, sampler, settings)

    def _meet(self) -> None:
        """Lets all ranks of the team begin at one time. Ranks meet."""
        self._finish()
        if self.launch.world_size > 1:
            dist.barrier()

    def _finish(self) -> None:
        if self.launch.device.type == "cuda":
            torch.cuda.synchronize(self.launch.device)


def rank_main(environment: dict[str, str], flags: list[str], line: Connection) -> None:
    """A rank's process: takes (method, arguments) from the lab and sends (ok, result) back.

    It ends when the lab hangs up, or with it.
    """
    common.end_with_lab()
    ignore_signals(0)  # Ctrl-C is for the lab to handle
    os.environ.update(environment)
    try:
        rank = Rank(flags)
        line.send((True, rank.facts()))
        while True:
            method, arguments = line.recv()
            line.send((True, getattr(rank, method)(*arguments)))
    except EOFError:
        pass
    except Exception as error:  # whatever it is, the lab reports it
        line.send((False, error if isinstance(error, RunError) else RunError(repr(error))))
    os._exit(0)  # a group whose peers may be gone cannot be destroyed in order


# ------------------------------------------------------------------------------------------
# Teams
# ------------------------------------------------------------------------------------------


class Team:
    """The processes of one number of ranks; between two calls they sleep."""

    def __init__(self, ranks: int, flags: list[str], timeout: float) -> None:
        self.ranks, self.timeout = ranks, timeout
        self.store, environments = common.local_launch(ranks)
        self.lines, self.processes = [], []
        context = common.process_context(["torch._dynamo"])
        for environment in environments:
            ours, theirs = context.Pipe()
            process = context.Process(
                target=rank_main, args=(environment, flags, theirs), daemon=True
            )
            process.start()
            theirs.close()  # so that the end of the process is the end of the line
            self.lines.append(ours)
            self.processes.append(process)

    def answers(self) -> list[Any]:
        """What each rank answers. Raises its `RunError`, or one for a rank that does not answer."""
        until, answers = time.monotonic() + self.timeout, []
        for rank, line in enumerate(self.lines):
            who = f"rank {rank} of {self.ranks}"
            if not line.poll(max(until - time.monotonic(), 0)):
                raise RunError(f"{who} gave no answer in {self.timeout:.0f} s")
            try:
                fine, answer = line.recv()
            except EOFError:
                raise RunError(f"{who} was killed") from None
            if not fine:
                time.sleep(0.2)  # until the system has taken note of a rank that was killed
                killed = [other for other, p in enumerate(self.processes) if p.exitcode]
                if killed:  # the answer then is only that contact was lost
                    raise RunError(f"rank {killed[0]} of {self.ranks} was killed")
                raise answer
            answers.append(answer)
        return answers

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Calls a method of `Rank` on all ranks; their results in rank order."""
        for line in self.lines:
            with contextlib.suppress(OSError):  # it has ended: `answers` says which rank
                line.send((method, arguments))
        return self.answers()

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


# ------------------------------------------------------------------------------------------
# Measuring
# ------------------------------------------------------------------------------------------


class Block:
    """One thing that is measured, and what came of it, round after round."""

    def __init__(self, team: Team, how: str, batch: int, threads: int) -> None:
        self.team, self.how, self.batch, self.threads = team, how, batch, threads
        self.count = 1
        self.rounds: list[list[dict]] = []  # of each round what each rank measured

    def warm_up(self) -> None:
        """Finds out how many steps make a block."""
        found = self.team.call("steps", self.how, self.batch, 4, self.threads)
        step = min(found[0]["seconds"][1:])
        self.count = min(max(round(BLOCK_S / step), 2), 500)

    def measure(self) -> None:
        self.rounds.append(self.team.call("steps", self.how, self.batch, self.count, self.threads))

    def speeds(self) -> np.ndarray:
        """Tokens per second of all ranks together, of each round."""
        return np.array([sum(r["tokens"] / sum(r["seconds"]) for r in ranks)
                         for ranks in self.rounds])  # fmt: skip

    def step_seconds(self) -> np.ndarray:
        """Mean duration of a step over the ranks, of each round."""
        return np.array([np.mean([r["seconds"] for r in ranks]) for ranks in self.rounds])

    def durations(self) -> np.ndarray:
        """Every step: [rounds, ranks, steps]."""
        return np.array([[r["seconds"] for r in ranks] for ranks in self.rounds])


def measure(
    teams: dict[int, Team], size: int, batch: int, rounds: int, threads: int, cores: int
) -> tuple[dict[tuple, Block], list[tuple[int, int, float]]]:
    """All blocks by (what, ranks), and plain all-reduces as (ranks, bytes, seconds).

    what is "weak", "no_sync", "independent", "strong", or "all cores": one process without DDP
    that has the threads of all ranks together. `size` is the bytes of the gradients.
    """
    blocks: dict[tuple, Block] = {}
    whole = batch * math.lcm(*teams)  # the global batch of strong scaling, a multiple of all ranks
    for ranks, team in teams.items():
        together = "ddp" if ranks > 1 else "alone"
        blocks["weak", ranks] = Block(team, together, batch, threads)
        blocks["strong", ranks] = Block(team, together, whole // ranks, threads)
        if ranks > 1:
            blocks["no_sync", ranks] = Block(team, "no_sync", batch, threads)
            blocks["independent", ranks] = Block(team, "alone", batch, threads)
        elif threads < cores:
            blocks["all cores", ranks] = Block(team, "alone", batch, cores)
    links = [Link(team, size) for ranks, team in teams.items() if ranks > 1]
    for block in blocks.values():
        block.warm_up()
    order = [*blocks.values(), *links]
    for _ in range(rounds):
        for measured in order:
            measured.measure()
        order.reverse()  # what drifts one way does not favour the last
    return blocks, [point for link in links for point in link.points()]


class Link:
    """Plain all-reduces of a few sizes, with nothing else to do, on one team."""

    def __init__(self, team: Team, size: int) -> None:
        self.team = team
        # A small message, the gradient, and one that is large enough to show the bandwidth.
        self.sizes = sorted({4096, max(size, 4096) // 4 * 4, max(8 * size, 1 << 22)})
        self.seconds: dict[int, list[float]] = {size: [] for size in self.sizes}

    def measure(self) -> None:
        for size in self.sizes:
            # Ranks begin at one time and leave when they have it: the slowest is the duration.
            self.seconds[size] += np.max(self.team.call("all_reduce", size, 6), axis=0).tolist()[1:]

    def points(self) -> list[tuple[int, int, float]]:
        """(ranks, bytes, median seconds) of each size."""
        return [(self.team.ranks, size, float(np.median(s))) for size, s in self.seconds.items()]


# ------------------------------------------------------------------------------------------
# What follows
# ------------------------------------------------------------------------------------------


def fit_link(links: list[tuple[int, int, float]]) -> tuple[float, float]:
    """(seconds per message, bytes per second) of the link, from plain all-reduces.

    A ring all-reduce of S bytes over N ranks sends 2 (N − 1) messages one after the other, of
    S / N bytes each (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms"), so

        t = 2 (N − 1) · latency + 2 (N − 1) / N · S / bandwidth ,

    which is linear in latency and 1 / bandwidth: least squares of the relative errors. Where one
    of the two comes out below zero, it is too small to be seen beside the other, and is left out.
    """
    rows = np.array([(2 * (n - 1), 2 * (n - 1) / n * size) for n, size, _ in links])
    rows = rows / np.array([[seconds] for _, _, seconds in links])
    fitted = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)[0]
    for one in (0, 1):
        if fitted[1 - one] < 0:
            fitted = np.zeros(2)
            fitted[one] = rows[:, one].sum() / (rows[:, one] ** 2).sum()
    return float(fitted[0]), 1 / float(fitted[1]) if fitted[1] else math.inf


def ring_seconds(ranks: int, size: int, link: tuple[float, float]) -> float:
    """Duration of a ring all-reduce of `size` bytes, see `fit_link`."""
    latency, bandwidth = link
    return 2 * (ranks - 1) * (latency + size / ranks / bandwidth)


def expected_slowest(durations: np.ndarray, ranks: int) -> float:
    """Expected longest of `ranks` steps drawn from the measured durations, in their unit.

    The i-th smallest of m values is the largest of N draws with probability (i/m)^N − ((i−1)/m)^N.
    """
    ordered = np.sort(durations, axis=None)
    shares = np.arange(len(ordered) + 1) / len(ordered)
    return float(np.sum(ordered * np.diff(shares**ranks)))


class Prediction:
    """A step's duration with N > 1 ranks, from what was measured with the most ranks here.

        step(N) = slowest of N own steps + ring(N, 32 bytes) + exposed · ring(N, gradients) + rest

    The first term is what every rank waits for; the two messages are the sum of the losses and the
    gradients. `exposed` is what the all-reduce of the gradients added to a step here, as a share of
    a plain all-reduce, at most 1; what is not exposed hides behind the backward pass. The rest,
    DDP's buckets and hooks, waking up, cores that slow each other, is taken as constant. So the
    step that was measured comes out by construction; for other N it is a prediction.
    """

    def __init__(self, blocks: dict, ranks: int, size: int, links: list, cores: int) -> None:
        self.size, self.cores, self.link = size, cores, fit_link(links)
        self.threads = blocks["weak", ranks].threads
        self.turns = max(1.0, ranks * self.threads / cores)  # own steps here hold these already
        own = blocks["independent", ranks].durations()
        self.own = float(np.median(own.mean(axis=(1, 2))))
        # Steps relative to their round, so that the drift of the machine does not count as jitter.
        self.relative = own / own.mean(axis=(1, 2), keepdims=True)
        full, no_sync = (blocks[what, ranks].step_seconds() for what in ("weak", "no_sync"))
        added = max(float(np.median(full - no_sync)), 0.0)
        self.exposed = min(added / ring_seconds(ranks, size, self.link), 1.0)
        self.rest = 0.0
        self.rest = max(float(np.median(full)) - self.step(ranks), 0.0)

    def step(self, ranks: int) -> float:
        """Seconds, when every rank has cores of its own."""
        if ranks == 1:
            return self.own
        slowest = self.own * expected_slowest(self.relative, ranks)
        losses, gradients = (ring_seconds(ranks, size, self.link) for size in (32, self.size))
        return slowest + losses + self.exposed * gradients + self.rest

    def efficiency(self, ranks: int) -> float:
        """Tokens a second, as a share of N times one rank's."""
        return self.own / self.step(ranks)

    def here(self, ranks: int) -> float:
        """Speed on this machine, in ranks' worth: ranks beyond the cores take turns."""
        turns = max(1.0, ranks * self.threads / self.cores / self.turns)
        return ranks * self.own / (self.step(ranks) + (turns - 1) * self.own)


def row_of(what: str, ranks: int, blocks: dict[tuple, Block]) -> dict[str, Any]:
    """A row of scaling.csv. Shares and ratios are medians of those of each round."""
    block, one = blocks[what, ranks], blocks["weak", 1]
    speeds = block.speeds()
    row = {
        "scaling": what, "ranks": ranks, "threads_per_rank": block.threads,
        "batch_per_rank": block.batch, "tokens_per_second": np.median(speeds),
        "slowest_round": speeds.min(), "fastest_round": speeds.max(),
        "step_ms": 1e3 * np.median(block.step_seconds()),
        "speedup": np.median(speeds / one.speeds()),
    }  # fmt: skip
    if what == "strong":
        row["speedup"] = np.median(speeds / blocks["strong", 1].speeds())
    row["efficiency"] = row["speedup"] / ranks
    if ranks > 1 and what == "weak":
        independent, no_sync = blocks["independent", ranks], blocks["no_sync", ranks]
        row["of_independent"] = np.median(speeds / independent.speeds())
        row["waiting_share"] = np.median(
            (no_sync.step_seconds() - independent.step_seconds()) / block.step_seconds()
        )
        row["all_reduce_share"] = np.median(1 - no_sync.step_seconds() / block.step_seconds())
        # Alone nobody waits: how much longer a step of the slowest takes than of the average rank.
        alone = independent.durations()
        row["jitter"] = np.mean(alone.max(axis=1) / alone.mean(axis=1) - 1)
    return {key: float(v) if isinstance(v, np.floating) else v for key, v in row.items()}


def table(rows: list[dict], batch: int) -> str:
    """The measurements as text."""
    titles = {
        "weak": f"weak scaling: {counted(batch, 'sequence')} per rank",
        "independent": "independent processes: the same work, nothing shared but the machine",
        "strong": "strong scaling: as many sequences an update, whatever the number of ranks",
        "all cores": "for comparison: one process with the threads of all ranks",
    }
    columns = ("ranks", "threads", "batch", "tokens/s", "step ms", "speedup", "efficiency",
               "of independent", "waiting", "all-reduce", "jitter")  # fmt: skip
    lines = ["".join(f"{name:>{len(name) + 2}}" for name in columns)]

    def percent(row: dict, key: str) -> str:
        return f"{row[key]:.0%}" if key in row else "-"

    for what, text in titles.items():
        chosen = [row for row in rows if row["scaling"] == what]
        lines += [f"\n{text}"] if chosen else []
        for row in chosen:
            cells = (
                row["ranks"], row["threads_per_rank"], row["batch_per_rank"],
                f"{row['tokens_per_second']:,.0f}", f"{row['step_ms']:.1f}",
                f"{row['speedup']:.2f}", percent(row, "efficiency"),
                percent(row, "of_independent"), percent(row, "waiting_share"),
                percent(row, "all_reduce_share"),
                percent(row, "jitter"),
            )  # fmt: skip
            lines.append("".join(f"{c:>{len(name) + 2}}" for c, name in zip(cells, columns)))
    return "\n".join(lines)


def conclusion(rows: list[dict], ranks: int, cores: int) -> str:
    """What the machine shared, and what DDP cost, in plain words."""
    by = {(row["scaling"], row["ranks"]): row for row in rows}
    machine, weak = by["independent", ranks]["efficiency"], by["weak", ranks]
    text = (
        f"All ranks share this machine's {counted(cores, 'core')}, their caches and one memory "
        f"bus. {ranks} independent processes reach {machine:.0%} of {ranks} times one process; "
        f"what is missing, the machine does not have, with or without DDP. DDP keeps "
        f"{weak['of_independent']:.0%} of that; of a step, the all-reduce of the gradients takes "
        f"{weak['all_reduce_share']:.0%}, and waiting for each other, with the sum of the losses, "
        f"{weak['waiting_share']:.0%}."
    )
    if ("all cores", 1) in by:
        other = by["all cores", 1]
        gain = weak["tokens_per_second"] / other["tokens_per_second"]
        text += (
            f" One process with {counted(other['threads_per_rank'], 'thread')} is another way to "
            f"use the cores: {ranks} ranks are {gain:.2f} times as fast as that."
        )
    if ranks * weak["threads_per_rank"] > cores:
        text += f" With {ranks} ranks on {counted(cores, 'core')}, ranks also take turns."
    return text


def forecast(prediction: Prediction, measured: list[dict]) -> str:
    """The prediction as a table, with its assumptions."""
    latency, bandwidth = prediction.link
    speed = f"{bandwidth / 1e9:.2f} GB/s" if bandwidth < math.inf else "any bandwidth"
    lines = [
        "prediction (weak scaling), if",
        "  - every rank has cores and memory of its own, as fast as one rank's share here;",
        f"  - the link is like this machine's: {1e3 * latency:.2f} ms a message, {speed};",
        f"  - the all-reduce of {prediction.size / 1e6:.2f} MB is a ring, of which "
        f"{1 - prediction.exposed:.0%} hides behind the backward pass, as here;",
        f"  - what else several ranks cost stays as it is here, {1e3 * prediction.rest:.1f} ms;",
        "  - single steps are as uneven as here: more ranks wait for a slower slowest one.",
        "'here' is the speedup on this machine, where ranks beyond its cores take turns.",
        "  ranks  step ms  efficiency  speedup  here",
    ]
    known = {row["ranks"]: row for row in measured if row["scaling"] == "weak"}
    for ranks in sorted({*known, *(n for n in PREDICTED if n > max(known))}):
        step, efficiency = prediction.step(ranks), prediction.efficiency(ranks)
        line = f"  {ranks:5}  {1e3 * step:7.1f}  {efficiency:10.0%}  {ranks * efficiency:7.2f}"
        line += f"  {prediction.here(ranks):4.2f}"
        if ranks in known:
            line += f"   (measured: {known[ranks]['step_ms']:.1f} ms)"
        lines.append(line)
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------
# Files and command line
# ------------------------------------------------------------------------------------------


def draw(rows: list[dict], prediction: Prediction | None, path: Path) -> None:
    """Speed, what a step consists of, and the predicted efficiency, side by side."""
    with warnings.catch_warnings():  # its font cache is opened without an encoding
        warnings.simplefilter("ignore", EncodingWarning)
        from matplotlib.figure import Figure

    by = {(row["scaling"], row["ranks"]): row for row in rows}
    figure = Figure(figsize=(14, 4.6), layout="constrained")
    speed, parts, future = figure.subplots(1, 3)
    draw_speed(speed, by)
    draw_parts(parts, by)
    if prediction:
        draw_prediction(future, by, prediction)
    else:
        future.set_axis_off()
    for axes in (speed, parts, future) if prediction else (speed, parts):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    write_file(path, lambda file: figure.savefig(file, format="png", dpi=110))


def draw_speed(axes: Any, by: dict[tuple, dict]) -> None:
    """Tokens per second over ranks, a line for each way to use them."""
    ranks, one = sorted({n for _, n in by}), by["weak", 1]["tokens_per_second"]
    axes.plot(ranks, [one * n for n in ranks], ":", color="gray", label="N times one rank")
    for what, marker, label in (
        ("independent", "s", "independent processes"), ("weak", "o", "weak scaling"),
        ("strong", "^", "strong scaling"), ("all cores", "*", "one process, all cores"),
    ):  # fmt: skip
        chosen = [by[what, n] for n in ranks if (what, n) in by]
        if what == "independent":
            chosen.insert(0, by["weak", 1])
        if chosen[1:] or (chosen and what == "all cores"):
            middle = np.array([row["tokens_per_second"] for row in chosen])
            low = middle - [row["slowest_round"] for row in chosen]
            high = [row["fastest_round"] for row in chosen] - middle
            axes.errorbar([row["ranks"] for row in chosen], middle, (low, high), fmt=f"{marker}-",
                          capsize=3, ms=7, lw=1.5, label=label)  # fmt: skip
    axes.set(xlabel="ranks", ylabel="tokens/s (bars: slowest and fastest round)", title="Speed")
    axes.set_ylim(bottom=0)
    axes.set_xticks(ranks)


def draw_parts(axes: Any, by: dict[tuple, dict]) -> None:
    """Stacked milliseconds of a step under weak scaling, a bar for each number of ranks."""
    ranks = sorted({n for _, n in by})
    alone, unsynchronized, full = (
        np.array([by[what if n > 1 else "weak", n]["step_ms"] for n in ranks])
        for what in ("independent", "no_sync", "weak")
    )
    bottom = np.zeros(len(ranks))
    for label, heights in (
        ("own work", alone),
        ("waiting for each other, sum of losses", unsynchronized - alone),
        ("all-reduce of gradients", full - unsynchronized),
    ):
        heights = np.maximum(heights, 0.0)  # a difference of medians can be negative by noise
        axes.bar([str(n) for n in ranks], heights, bottom=bottom, label=label, width=0.6)
        bottom += heights
    axes.set(xlabel="ranks", ylabel="ms", title="What a step consists of (weak scaling)")
    axes.set_ylim(top=1.35 * max(bottom))


def draw_prediction(axes: Any, by: dict[tuple, dict], prediction: Prediction) -> None:
    """Efficiency in percent over the number of ranks, predicted and measured."""
    counts = range(1, PREDICTED[-1] + 1)
    axes.plot(counts, [100 * prediction.efficiency(n) for n in counts], "--",
              label="predicted, cores of its own for every rank")  # fmt: skip
    axes.plot(counts, [100 * prediction.here(n) / n for n in counts], ":",
              label="predicted, on this machine")  # fmt: skip
    measured = sorted(n for what, n in by if what == "weak" and n > 1)
    axes.plot(measured, [100 * by["weak", n]["of_independent"] for n in measured], "o",
              label="measured, of independent processes")  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 2, *PREDICTED], [str(n) for n in (1, 2, *PREDICTED)])
    axes.set(xlabel="ranks", ylabel="efficiency (%)", title="Prediction (weak scaling)",
             ylim=(0, 125))  # fmt: skip


def write_csv(rows: list[dict], path: Path) -> None:
    """One row a measurement; a column that says nothing about it is empty."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_file(path, lambda file: file.write(text.getvalue().encode("utf-8")))


def rank_counts(text: str) -> list[int]:
    """ "1,2,4" as numbers, rising; 1 is always there, for all is compared with it."""
    try:
        counts = {number(int, 1, 1024)(part) for part in text.split(",")}
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no list of whole numbers of at least 1, such as 1,2,4"
        ) from None
    return sorted({1, *counts})


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str], argparse.Namespace]:
    """The lab's own options, the flags for the reference, and what those mean."""
    parser = OneLineParser(
        prog="python -m labs.scaling", allow_abbrev=False,
        description="Measure what more ranks bring on this machine. All other flags are those of "
        "llm_ddp_parallel_training.py; the corpus is --builtin python-docs unless they name one.",
    )  # fmt: skip
    parser.add_argument("--ranks", type=rank_counts, required=True, metavar="1,2",
                        help="numbers of ranks to measure; 1 is always added")  # fmt: skip
    parser.add_argument("--rounds", type=number(int, 1, 1000), default=9,
                        help="more of them make calmer medians (default: 9)")  # fmt: skip
    options, flags = parser.parse_known_args(argv)
    if not {"--builtin", "--corpus-file"} & {flag.partition("=")[0] for flag in flags}:
        flags += ["--builtin", "python-docs"]  # full windows: every step has the same work
    common.refuse_flags(flags, common.BETWEEN_UPDATES, "scaling")
    settings = parse_settings(flags)
    if settings.model == "tiny":
        build_data(settings)  # what is wrong with it is said before any process is started
    return options, flags, settings


def usable_cores() -> int:
    """The cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def main(argv: Sequence[str] | None = None) -> None:
    """From the command line to table, conclusion, prediction and picture."""
    print_on_any_terminal()
    with one_clear_ending(Where()):
        common.refuse_launcher("scaling")
        options, flags, settings = parse(argv)
        require_matplotlib()
        cores, most = usable_cores(), options.ranks[-1]
        threads = settings.threads or max(1, cores // most)
        folder = common.results_folder("scaling", OUTPUTS, settings.output_dir, settings.overwrite)
        teams: dict[int, Team] = {}
        try:
            for ranks in options.ranks:
                teams[ranks] = Team(ranks, flags, read_launcher().timeout)
            facts = [team.answers()[0] for team in teams.values()][-1]
            size = facts["bytes"]
            common.say(
                f"{settings.model}, {size / 1e6:.2f} MB of gradients, {facts['device']}, backend "
                f"{facts['backend']}; {counted(cores, 'core')}, {counted(threads, 'thread')} per "
                f"rank; {counted(options.rounds, 'round')}"
            )  # fmt: skip
            blocks, links = measure(
                teams, size, settings.batch_size, options.rounds, threads,
                min(cores, threads * most),
            )  # fmt: skip
        finally:
            for team in teams.values():
                team.end()
        rows = [row_of(what, ranks, blocks) for what, ranks in blocks]
        common.say(f"\n{table(rows, settings.batch_size)}\n")
        prediction = None
        if most > 1:
            prediction = Prediction(blocks, most, size, links, cores)
            common.say(f"{conclusion(rows, most, cores)}\n\n{forecast(prediction, rows)}\n")
        write_csv(rows, folder / "scaling.csv")
        draw(rows, prediction, folder / "scaling.png")
        common.say(f"written to {folder}: {' '.join(OUTPUTS)}")


if __name__ == "__main__":
    main()
