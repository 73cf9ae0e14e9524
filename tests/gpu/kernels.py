"""Which attention kernels a step takes, and how often it waits for the GPU."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator

from gpu.bench import Bench
from gpu.table import Row, must

ATTENTION = "_scaled_dot_product_"


@contextlib.contextmanager
def around_steps(context: Callable) -> Iterator[None]:
    """Every `training_step` inside runs in a `context()`."""
    import llm_ddp_parallel_training as ddp

    step = ddp.training_step

    def in_context(*arguments, **options):
        with context():
            return step(*arguments, **options)

    ddp.training_step = in_context
    try:
        yield
    finally:
        ddp.training_step = step


def attention(bench: Bench) -> Iterator[Row]:
    """None of the runs may fall to the plain kernel, which keeps T² scores in every layer."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Kernels(TorchDispatchMode):
        """The names of attention kernels; the plain one is products and a softmax of their own."""

        def __torch_dispatch__(self, function, kinds, arguments=(), options=None):
            name = function.__name__.partition(".")[0]
            if name.startswith(ATTENTION):
                seen.add(name.removeprefix(ATTENTION).partition("_backward")[0])
            elif name in ("_softmax", "_safe_softmax"):  # the loss has a log-softmax
                seen.add("math")
            return function(*arguments, **(options or {}))

    length = 256 if bench.cuda else 32
    size = f"--seq-len {length} --batch-size 2 --max-steps 1 --val-fraction 0"
    for name, train, flags in (
        (f"qwen {bench.half}, full windows", bench.qwen, f"--precision {bench.half} {bench.text}"),
        (f"qwen {bench.half}, packed", bench.qwen, f"--precision {bench.half} --pack"),
        (f"qwen {bench.half}, padded", bench.qwen, f"--precision {bench.half}"),
        ("qwen fp32, full windows", bench.qwen, f"--precision fp32 {bench.text}"),
        ("qwen fp32, padded", bench.qwen, "--precision fp32"),
        (f"tiny {bench.half}", bench.train, f"--precision {bench.half} --builtin python-docs"),
        ("tiny fp32", bench.train, "--precision fp32 --builtin python-docs"),
    ):
        seen: set[str] = set()
        with around_steps(Kernels):
            train(name.replace(" ", "-"), f"{flags} {size}")
        yield must(
            f"{name}: attention kernels",
            ", ".join(sorted(seen)) or "none",
            "none that keeps all scores",
            bool(seen) and "math" not in seen,
        )


def synchronizations(bench: Bench) -> Iterator[Row]:
    """How often an update waits for the GPU, by PyTorch's own count; on the CPU, what would."""
    import torch
    from readings import readings_of_a_step

    counts: list[int] = []

    @contextlib.contextmanager
    def counted() -> Iterator[None]:
        if not bench.cuda:
            with readings_of_a_step() as seen:
                yield
            counts.append(len(seen))
            return
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")
        counts.append(sum("synchronizing CUDA operation" in str(w.message) for w in said))

    cases = [
        ("tiny fp32", bench.train, "--precision fp32 --builtin python-docs"),
        (f"qwen {bench.half}, padded", bench.qwen, f"--precision {bench.half}"),
        (f"qwen {bench.half}, packed", bench.qwen, f"--precision {bench.half} --pack"),
        (f"qwen {bench.half}, full", bench.qwen, f"--precision {bench.half} {bench.text}"),
    ]
    if bench.cuda:
        cases.append(("tiny fp16", bench.train, "--precision fp16 --builtin python-docs"))
    for name, train, flags in cases:
        counts.clear()
        size = "--seq-len 32 --batch-size 2 --grad-accum 3 --max-steps 5 --val-fraction 0"
        with around_steps(counted):
            train(name.replace(" ", "-"), f"{flags} {size}")
        yield must(
            f"{name}, 3 micro-batches: waits for the GPU",
            f"{counts[2:]} an update, after {counts[:2]}",  # kernels are loaded, scales found
            "1 an update",
            set(counts[2:]) == {1},
        )
