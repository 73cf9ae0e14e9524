"""The same few steps under any strategy, counted, and compared with one process."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

import llm_ddp_parallel_training as ddp
from labs.shared.report import counted
from labs.strategies.checkpoint import Saver, load, read_index
from labs.strategies.options import STRATEGIES, check_run
from labs.strategies.parameter_server import ParameterServer, Server
from labs.strategies.step import Strategy
from labs.strategies.traffic import WATCHED_STEP, Watch, held, state_of


def run_strategy(
    launch: ddp.Launch, options: Any, settings: Any, alone: dict | None = None
) -> dict[str, Any]:
    """One strategy on the ranks that were launched; what this rank has to report. Ranks meet.

    `alone` is what one process reports that trains the same model on the same global batches; if it
    is not known, rank 0 does that first.
    """
    index = read_index(options.load) if options.load else {}
    ddp.set_up(launch, settings)
    run = ddp.build_tiny(launch, settings)
    index = index or {"step": 0, "model": run.model.config}
    check_run(run, options, index)
    if options.shown:
        launch.say(f"{counted(settings.max_steps, 'step')}, about 10 s")
        for what, chosen, why in launch.choices:
            launch.say(f"{what:10} {chosen} ({why})")
    if launch.rank == 0 and not alone:
        model, single = copy.deepcopy(run.model), ddp.Launch(device=launch.device)
        alone = train(Strategy(model, single, settings, options), run, lambda step, loss: None)
    comparable = options.strategy != "parameter-server" or options.mode == "sync"

    def tell(step: int, loss: float) -> None:
        if options.shown and launch.rank == 0:
            beside = ""
            if comparable:
                beside = f"   one process {alone['losses'][step - 1 - index['step']]:.6f}"
            launch.say(f"step {step:3}   loss {loss:.6f}{beside}")

    strategy = STRATEGIES[options.strategy](run.model, launch, settings, options)
    report = train(strategy, run, tell)
    report |= {"strategy": options.strategy, "steps": settings.max_steps}
    if launch.rank == 0 and comparable and not report.get("lost_workers"):
        report |= differences(report, alone)
    return report


def global_batches(run: Any, size: int) -> Iterator[dict]:
    """The global batches of one epoch after another, whole, in the reference's order."""
    data = run.data.train
    sampler = ddp.EpochSampler(len(data), run.settings.seed)
    loader = DataLoader(data, size, sampler=sampler, collate_fn=run.collate, drop_last=True)
    for epoch in itertools.count(1):
        sampler.set_epoch(epoch)
        yield from loader


def train(strategy: Strategy, run: Any, tell: Callable[[int, float], None]) -> dict[str, Any]:
    """Trains to the last step, telling the number and the loss of each; what was counted.

    Bytes of parameters, gradients and optimizer at the end of the counted step, the most bytes of
    gathered layers and activations in it, its traffic, the whole gradient of the first step, and
    all losses.
    """
    options, steps = strategy.options, strategy.settings.max_steps
    alone = strategy.launch.world_size == 1
    done = load(strategy, options.load, alone) if options.load else 0
    saver = None
    if options.save and not alone:
        saver = Saver(strategy, options.save, steps // 2, {"model": run.model.config})
    if isinstance(strategy, ParameterServer) and strategy.launch.rank == 0:
        return Server(strategy, tell).serve()
    parameters, watch, found = list(strategy.bare.parameters()), Watch(), {"losses": []}
    batches = itertools.islice(global_batches(run, options.global_batch), done, steps)
    for step, batch in enumerate(batches, done + 1):
        counted_step = step == done + WATCHED_STEP
        part = ddp.inputs_of(strategy.divide_batch(batch), strategy.launch.device)
        with watch if counted_step else contextlib.nullcontext():
            loss = strategy.forward_backward(part, ddp.valid_targets(batch["labels"]))
            gradients = [p.grad for p in parameters]
            if step == done + 1:
                found["first_gradients"] = strategy.gradients()
            if counted_step:
                found |= held(parameters, gradients, strategy.optimizer)
            strategy.update()
            found["losses"].append(strategy.total_loss(loss))
        tell(step, found["losses"][-1])
        if step == done + WATCHED_STEP - 1:
            # What there is already. DDP's gradients stay where they are: in its buckets.
            watch = Watch([*parameters, *gradients, *state_of(strategy.optimizer)], parameters)
        del gradients
        if saver:
            saver.after_step(step)
    if saver:
        saver.finish()
    return found | watch.counts() | strategy.findings()


def differences(report: dict, alone: dict) -> dict[str, float]:
    """How far a strategy is from one process: first gradients, relative; losses, in nats."""
    ours, theirs = report["first_gradients"], alone["first_gradients"]
    if ours.keys() != theirs.keys():
        raise ddp.RunError(f"gradients are missing: {sorted(ours.keys() ^ theirs.keys())}")
    gradients = [float((ours[n] - g).abs().max() / g.abs().max()) for n, g in theirs.items()]
    apart = [abs(a - b) for a, b in zip(report["losses"], alone["losses"], strict=True)]
    return {"gradient_difference": max(gradients), "loss_difference": max(apart)}
