"""Resumed runs beside uninterrupted ones, and whether two runs are equal at all."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

from gpu.bench import Bench, Run, farthest
from gpu.table import Row, must

HALF_WAY = "checkpoints/step-00000005.pt"


def same(check: str, first: Run, second: Run, again: Run) -> Row:
    """`again` was interrupted, `first` and `second` were not.

    Some CUDA kernels add in an order that changes from run to run. So bit equality is asked for
    where two uninterrupted runs are equal bit for bit, and else equal losses: another dropout mask
    would change them by a percent.
    """
    equal, repeats = again.digest == first.digest, second.digest == first.digest
    difference, own = (farthest(run.losses, first.losses) for run in (again, second))
    limit = max(1e-4, 3 * own)  # AdamW lets rounding grow
    return must(
        check,
        f"weights {'equal' if equal else 'differ'}, loss {difference:.0e}; two runs "
        + ("equal" if repeats else f"differ by {own:.0e}"),
        "equal, as two runs are" if repeats else f"loss <= {limit:.0e}",
        equal if repeats else difference <= limit,
    )


def interrupted(check: str, train: Callable[..., Run], flags: str) -> tuple[Row, Run]:
    """Two runs of `train` with dropout, and the first one resumed from its middle."""
    name = check.replace(" ", "-")
    first, second = (train(f"{name}-{n}", f"{flags} --save-every 5 --keep 9") for n in (1, 2))
    again = train(f"{name}-resumed", "", resume=first.folder / HALF_WAY)
    return same(f"{check}, resumed - uninterrupted", first, second, again), again


def tiny_resumed(bench: Bench) -> Iterator[Row]:
    """In each precision; in fp16 with a loss scale that was lowered before the interruption."""
    flags = f"{bench.tiny} --max-steps 10 --dropout 0.1"
    for precision in ("fp32", "bf16"):
        row, _ = interrupted(f"tiny {precision}", bench.train, f"{flags} --precision {precision}")
        yield row
    if bench.cuda:
        with too_large_a_scale():
            row, again = interrupted("tiny fp16", bench.train, f"{flags} --precision fp16")
        yield row
        found = f"{again.overflows} overflows"
        yield must("tiny fp16, the scale was lowered", found, "> 0", again.overflows > 0)


@contextlib.contextmanager
def too_large_a_scale() -> Iterator[None]:
    """GradScaler begins so high that the first updates overflow; a checkpoint must keep its value,
    or a resumed run would overflow again.
    """
    import torch

    scaler = torch.amp.GradScaler
    torch.amp.GradScaler = functools.partial(scaler, init_scale=2.0**30)
    try:
        yield
    finally:
        torch.amp.GradScaler = scaler


def qwen_resumed(bench: Bench) -> Iterator[Row]:
    """LoRA with dropout in 16 bits."""
    size = "--seq-len 64 --batch-size 4" if bench.cuda else "--seq-len 16 --batch-size 1"
    flags = f"--model qwen {size} --max-steps 7 --log-every 1 --lora-dropout 0.1 --val-fraction 0"

    def train(name: str, flags: str, **paths: Path) -> Run:
        return bench.train(name, flags, **paths, base_model=bench.base)

    row, _ = interrupted(f"qwen {bench.half}", train, f"{flags} --precision {bench.half}")
    yield row


def stopped(bench: Bench) -> Iterator[Row]:
    """SIGTERM saves and ends with 143; --resume goes on in the same folder."""
    flags = f"{bench.tiny} --max-steps 10 --dropout 0.1 --precision fp32"
    signalled = bench.start("signal", 1, flags, [{"kind": "SIGTERM", "update": 4}])
    first, second = (bench.train(f"whole-{n}", flags) for n in (1, 2))
    again = bench.train("signal", "", resume=signalled.folder)
    row = same("tiny, stopped by SIGTERM and resumed", first, second, again)
    row.found = f"status {signalled.status}; {row.found}"
    row.verdict = row.verdict if signalled.status == 143 else "FAIL"
    yield row


def repeated(bench: Bench) -> Iterator[Row]:
    """Whether two equal runs are equal bit for bit where attention's backward pass adds in pieces:
    windows of more than 128 tokens. Only that they agree is asked for.
    """
    for name, train, flags in (
        ("tiny fp32", bench.train, "--d-model 128 --layers 2 --precision fp32"),
        (f"tiny {bench.half}", bench.train, f"--d-model 128 --layers 2 --precision {bench.half}"),
        (f"qwen {bench.half}", bench.qwen, f"--precision {bench.half}"),
    ):
        length, rows = (512, 4) if bench.cuda else (160, 1)
        size = f"--seq-len {length} --batch-size {rows} --max-steps 4 --log-every 1"
        flags = f"{flags} {size} {bench.text} --val-fraction 0"
        first, second = (train(f"{name}-{n}".replace(" ", "-"), flags) for n in (1, 2))
        equal, loss = first.digest == second.digest, farthest(second.losses, first.losses)
        yield must(
            f"{name}, {rows} x {length}: two runs",
            f"weights {'equal' if equal else 'differ'}, loss {loss:.0e}",
            "loss <= 1e-02",
            loss <= 1e-2,
        )
