"""Each precision beside the CPU, and two ways to compute the same."""

from __future__ import annotations

from collections.abc import Iterator

from gpu.bench import EXACT, LIMITS, Bench, compared, farthest
from gpu.table import Row, must

SHORT = "--seq-len 64 --batch-size 8 --max-steps 3 --log-every 1"


def tiny_precisions(bench: Bench) -> Iterator[Row]:
    """The device in each precision beside the CPU; and two ways to divide a batch."""
    exact = bench.train("cpu", f"{bench.tiny} --precision fp32", device="cpu")
    runs = {}
    for precision in bench.precisions:
        runs[precision] = bench.train(precision, f"{bench.tiny} --precision {precision}")
        yield compared(f"tiny {precision}, device - CPU", runs[precision], exact, precision)
    rows = 16 if bench.cuda else 4
    flags = f"{bench.tiny} --precision fp32 --batch-size {rows // 4} --grad-accum 4"
    difference = farthest(bench.train("accumulated", flags).losses, runs["fp32"].losses)
    yield must(
        f"tiny, {rows // 4} x accumulation 4 - {rows}",
        f"loss {difference:.0e}",
        "<= 1e-06",
        difference <= EXACT,
    )


def qwen_precisions(bench: Bench) -> Iterator[Row]:
    """LoRA in each precision beside the CPU, on padded lines and on packed ones."""
    for name, flags in (("lines", ""), ("packed", "--pack")):
        flags = f"{SHORT} --lora-dropout 0 {flags}"
        exact = bench.qwen(f"{name}-cpu", f"{flags} --precision fp32", device="cpu")
        for precision in bench.precisions:
            run = bench.qwen(f"{name}-{precision}", f"{flags} --precision {precision}")
            yield compared(f"qwen {precision}, {name}, device - CPU", run, exact, precision)


def qwen_checkpointing(bench: Bench) -> Iterator[Row]:
    """--gradient-checkpointing computes again with the dropout masks of the first time."""
    flags = f"{SHORT} --precision fp32 --lora-dropout 0.1 {bench.text}"
    plain = bench.qwen("plain", flags)
    for kind in ("full", "selective"):
        again = bench.qwen(kind, f"{flags} --gradient-checkpointing {kind}")
        loss = farthest(again.losses, plain.losses)
        norm = farthest(*([row["grad_norm"] for row in run.updates] for run in (again, plain)))
        yield must(
            f"qwen --gradient-checkpointing {kind} - without",
            f"loss {loss:.0e}, gradient norm {norm:.0e}",
            "<= 1e-05",
            max(loss, norm) <= 1e-5,
        )


def tiny_compiled(bench: Bench) -> Iterator[Row]:
    """--compile computes the same in another order."""
    plain = bench.train("plain", f"{bench.tiny} --precision fp32")
    compiled = bench.train("compiled", f"{bench.tiny} --precision fp32 --compile")
    difference = farthest(compiled.losses, plain.losses)
    yield must("tiny --compile - without", f"loss {difference:.0e}", "<= 1e-04", difference <= 1e-4)


def long_windows(bench: Bench, length: int = 1024) -> str:
    """Full windows of running text, as many updates as a speed needs."""
    rows, length, updates = (8, length, 40) if bench.cuda else (2, length // 16, 4)
    return (
        f"{bench.text} --seq-len {length} --batch-size {rows} --max-steps {updates} "
        f"--log-every {updates // 4} --val-fraction 0 --precision {bench.half}"
    )


def qwen_compiled(bench: Bench) -> Iterator[Row]:
    """--compile in 16 bits; what it leaves in the cache on disk, the speed check finds."""
    flags = f"{long_windows(bench)} --lora-dropout 0 --max-steps 3 --log-every 1"
    plain = bench.qwen("plain", flags)
    compiled = bench.qwen("compiled", f"{flags} --compile")
    difference, limit = farthest(compiled.losses, plain.losses), LIMITS[bench.half][0]
    yield must(
        f"qwen {bench.half} --compile - without",
        f"loss {difference:.0e}; first update after {compiled.updates[0]['seconds']:.0f} s",
        f"<= {limit:.0e}",
        difference <= limit,
    )
