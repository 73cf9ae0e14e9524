"""Several ranks, and what a launch by torchrun chooses and leaves behind."""

from __future__ import annotations

import copy
import os
import socket
from collections.abc import Iterator

from gpu.bench import EXACT, LIMITS, Bench, farthest, spread
from gpu.table import Row, must


def one_rank_group(bench: Bench) -> Iterator[Row]:
    """NCCL with a single rank: the script's own group, DDP and step, beside the bare model.

    NCCL refuses two ranks on a GPU, and a single rank has no group by contract; so the group is
    made here. All that the script sends through it is tried: gradients, sums in float64, objects.
    """
    import torch
    import torch.distributed as dist

    import llm_ddp_parallel_training as ddp

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    settings = ddp.parse_settings([*bench.tiny.split(), "--precision", "fp32"])
    launch = ddp.read_launcher()
    launch.watch.timeout = 60  # a single rank has no time-out either
    ddp.choose_device(launch, bench.device)
    ddp.join_group(launch)
    backend = dist.get_backend()
    run = ddp.build_tiny(launch, settings)
    models = {"bare": run.model, "group": copy.deepcopy(run.model)}
    losses: dict[str, list[float]] = {name: [] for name in models}
    half = settings.batch_size // 2
    for name, model in models.items():
        optimizer = ddp.build_optimizer(model, settings)
        scaler = torch.amp.GradScaler("cuda", enabled=False)
        wrapped = ddp.wrap_in_ddp(model, launch) if name == "group" else model
        for update in range(5):
            items = [run.data.train[2 * half * update + i] for i in range(2 * half)]
            halves = [run.collate(items[:half]), run.collate(items[half:])]
            step = ddp.training_step(wrapped, optimizer, scaler, halves, launch, settings)
            losses[name].append(step.loss)
    pairs = zip(models["bare"].parameters(), models["group"].parameters())
    weight = max(float((a - b).detach().abs().max()) for a, b in pairs)
    loss = max(abs(a - b) for a, b in zip(*losses.values()))
    yield must(
        f"{backend}, 1 rank with DDP - bare",
        f"loss {loss:.0e}, weights {weight:.0e}, after 5 updates",
        "<= 1e-06, nccl on CUDA",
        loss <= EXACT and weight <= EXACT and backend == ("nccl" if bench.cuda else "gloo"),
    )
    total = torch.tensor([0.1, 2.0], dtype=torch.float64, device=launch.device)
    dist.all_reduce(total)
    (gathered,) = ddp.gather(("random", torch.get_rng_state()), launch)
    arrived = total.tolist() == [0.1, 2.0] and gathered[0] == "random"
    ddp.tear_down()
    yield must(
        f"{backend}, the other messages of a run",
        "float64 sum, objects, barrier, teardown: " + ("as sent" if arrived else "changed"),
        "as sent",
        arrived and not dist.is_initialized(),
    )


def together(bench: Bench, backend: str) -> Iterator[Row]:
    """2 ranks x 4 samples are 1 rank x 8: with `no_sync`, in 16 bits, compiled."""
    where = "2 GPUs" if backend == "nccl" else "one device"
    long = "--max-steps 10 --log-every 1 --eval-every 5"
    for name, one, two, precision in (
        ("accumulation 2", "--batch-size 16", "--batch-size 4 --grad-accum 2", "fp32"),
        ("", "--batch-size 8", "--batch-size 4", "fp16" if bench.cuda else "bf16"),
        ("--compile", "--batch-size 8", "--batch-size 4 --compile", "fp32"),
    ):
        if "compile" in two and not bench.cuda:
            continue  # takes a minute there, and has a test of its own
        folder = f"{precision}-{len(two)}"
        flags = f"--precision {precision} {long}"
        single = bench.train(f"{folder}-one", f"{flags} {one}")
        pair = bench.launch(f"{folder}-two", 2, f"{flags} {two}")
        loss, weight = farthest(pair.losses, single.losses), spread(single, pair)
        limit = EXACT if precision == "fp32" and not name.startswith("-") else LIMITS[precision][0]
        exact = limit > EXACT or weight <= EXACT  # AdamW blows other rounding up in the weights
        equal = "equal on all 2 ranks" in pair.said
        yield must(
            f"{precision}, 2 ranks - 1, on {where} {name}".rstrip(),
            f"{pair.choice('backend')}: loss {loss:.0e}, weights {weight:.0e}, ranks "
            + ("equal" if equal else "differ"),
            f"{backend}, equal ranks, <= {limit:.0e}",
            pair.choice("backend") == backend and equal and loss <= limit and exact,
        )


def two_ranks(bench: Bench) -> Iterator[Row]:
    """They share the device, which NCCL refuses: the script takes Gloo by itself."""
    yield from together(bench, "gloo")


def two_gpus(bench: Bench) -> Iterator[Row]:
    """Where there are two; else this is not known. The rehearsal has ranks on the CPU."""
    if bench.cuda and bench.facts["cards"] < 2:
        yield Row("2 ranks - 1, on 2 GPUs", "not run: there is one GPU")
    else:
        yield from together(bench, "nccl" if bench.cuda else "gloo")


def command_lines(bench: Bench) -> Iterator[Row]:
    """The project's CUDA command lines, as they stand in its README, and what they leave behind."""
    tiny = {"run.json", "metrics.jsonl", "loss_curve.png", "tiny_transformer.pt"}
    qwen = {"run.json", "metrics.jsonl", "loss_curve.png", "adapter/adapter_model.safetensors",
            "adapter/adapter_config.json", "adapter/tokenizer.json"}  # fmt: skip
    short = "--batch-size 1 --seq-len 64 --max-steps 2"
    for name, ranks, flags, files in (
        ("tiny-1", 1, "--model tiny --batch-size 2 --max-steps 2", tiny),
        ("qwen-1", 1, f"--model qwen {short}", qwen),
        ("qwen-2", 2, f"--model qwen {short}", qwen),
    ):
        paths = {"base_model": bench.base} if files is qwen else {}
        run = bench.launch(name, ranks, flags, **paths)
        missing = [file for file in sorted(files) if not (run.folder / file).is_file()]
        device, want = run.choice("device"), "cuda:0" if bench.cuda else "cpu"
        same = ranks == 1 or f"equal on all {ranks} ranks" in run.said
        yield must(
            f"{ranks} rank{'s' * (ranks > 1)}: {flags.partition(' --batch')[0]}",
            f"{device}, {run.choice('precision')}, backend {run.choice('backend')}, "
            + (f"lacks {', '.join(missing)}" if missing else "all files"),
            f"{want}, all files" + ", equal ranks" * (ranks > 1),
            device == want and not missing and same,
        )
