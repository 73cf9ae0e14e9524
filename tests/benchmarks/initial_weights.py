"""Which initial weights let the tiny model learn most, and how exactly must the rate be chosen?

    python tests/benchmarks/initial_weights.py                      python-docs
    python tests/benchmarks/initial_weights.py TEXT [TEXT ...] --sizes 1x64 2x128 4x256 --seeds 3

For each text, size and kind of initial weights it climbs a grid of learning rates, a factor of √2
apart, until the best one has worse neighbours on both sides. Printed are the loss at the best rate
and what half and twice that rate cost: held-out nats per byte after a fixed number of updates of
8 windows of 64 bytes, whatever the machine's speed. All kinds of one seed see the same batches.
`--kinds 1 --updates 1200 --schedule linear --warmup 0.25` looks only at the reference's own
weights, with the settings that make the choice of the rate easiest.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import llm_ddp_parallel_training as ddp

CPU = torch.device("cpu")
BATCH, WINDOW, HELD_OUT = 8, 64, 256  # windows an update, bytes a window, windows to judge by


def matrices(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in model.named_parameters() if p.ndim >= 2)


def gpt2(model: nn.Module, layers: int) -> None:
    """Normal(0, 0.02), less where a layer feeds the residual stream (Radford et al. 2019)."""
    for name, matrix in matrices(model):
        residual = name.endswith(("out_proj.weight", "linear2.weight"))
        nn.init.normal_(matrix, std=0.02 / math.sqrt(2 * layers if residual else 1))


def pytorch(model: nn.Module, layers: int) -> None:
    """PyTorch's defaults; `nn.TransformerEncoder` copies one layer, here each is drawn anew."""
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            module._reset_parameters()
        elif isinstance(module, (nn.Linear, nn.Embedding)):
            module.reset_parameters()


def fan_in(model: nn.Module, layers: int, head: float = 0.6) -> None:
    """Matrices by fan-in, embeddings large enough that a rate of 1e-2 does not wipe them out."""
    for name, matrix in matrices(model):
        std = 0.3 if "emb" in name else 0.6 / math.sqrt(matrix.shape[1])
        nn.init.normal_(matrix, std=head / math.sqrt(matrix.shape[1]) if "head" in name else std)


def sinusoids(model: nn.Module, layers: int, head: float = 0.6) -> None:
    """`fan_in`, and positions that begin as sinusoids (Vaswani et al. 2017, section 3.5)."""
    fan_in(model, layers, head)
    length, width = model.pos_emb.weight.shape
    angles = torch.arange(length)[:, None] / 10_000 ** (torch.arange(0, width, 2) / width)
    waves = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)
    model.pos_emb.weight.data.copy_(0.3 * math.sqrt(2) * waves)


KINDS: dict[str, Callable | None] = {
    "the reference's own": None,
    "Normal(0, 0.02), as GPT-2": gpt2,
    "PyTorch's defaults": pytorch,
    "by fan-in": fan_in,
    "by fan-in, sinusoids": sinusoids,
    "by fan-in, sinusoids, head 0": lambda model, layers: sinusoids(model, layers, head=0.0),
}


def train(
    data: ddp.Data, settings: ddp.Settings, kind: Callable | None, beta1: float | None
) -> tuple[float, float]:
    """The loss on held-out windows before and after `settings.max_steps` updates."""
    s = settings
    torch.manual_seed(s.seed)
    model = ddp.TinyCausalTransformer(s.d_model, s.layers, s.heads, seq_len=s.seq_len)
    if kind:
        kind(model, s.layers)
    step = max(1, len(data.validation) // HELD_OUT)
    held_out = range(0, step * min(HELD_OUT, len(data.validation)), step)
    judge = ddp.inputs_of(ddp.tiny_collator([data.validation[i] for i in held_out], s.seq_len), CPU)
    with torch.no_grad():
        first = float(model(**judge))
    optimizer = ddp.build_optimizer(model, s)
    for group in optimizer.param_groups if beta1 else ():
        group["betas"] = (beta1, group["betas"][1])
    shuffle = torch.Generator().manual_seed(s.seed)  # of its own: kinds draw differently
    order = torch.randint(len(data.train), (s.max_steps, BATCH), generator=shuffle).tolist()
    for update, batch in enumerate(order):
        for group in optimizer.param_groups:
            group["lr"] = ddp.learning_rate(update, s, s.max_steps)
        windows = ddp.tiny_collator([data.train[i] for i in batch], s.seq_len)
        model(windows["input_ids"], windows["labels"]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), s.clip)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        last = float(model(**judge))
    return first, last if math.isfinite(last) else math.inf


def climb(loss_at: Callable[[float], float], rate: float) -> tuple[float, float, float, float]:
    """The best rate, the loss there, and how much worse half and twice that rate are."""
    losses: dict[int, float] = {}  # by half octaves away from `rate`
    best, new = 0, [-2, 0, 2]
    while new:
        losses.update((k, loss_at(rate * 2 ** (k / 2))) for k in new)
        best = min(losses, key=losses.__getitem__)
        new = [k for k in range(best - 2, best + 3) if k not in losses]
    least = losses[best]
    return rate * 2 ** (best / 2), least, losses[best - 2] - least, losses[best + 2] - least


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("texts", nargs="*", help="UTF-8 texts (default: python-docs)")
    parser.add_argument("--sizes", nargs="+", default=["1x64", "2x128"], help="layers x width")
    parser.add_argument("--updates", type=int, default=400, help="of a run (default: 400)")
    parser.add_argument("--schedule", default="cosine", help="of the rate (default: cosine)")
    parser.add_argument("--warmup", type=float, default=0.1, help="share of the updates (0.1)")
    parser.add_argument("--kinds", type=int, help="only so many kinds (default: all)")
    parser.add_argument("--beta1", type=float, help="of AdamW (default: the reference's own)")
    parser.add_argument("--seeds", type=int, default=1, help="their mean counts (default: 1)")
    args = parser.parse_args()
    print("| text | size | initial weights | first | loss | at rate | at half | at twice |")
    print("|---|---|---|---|---|---|---|---|")
    for text in args.texts or [None]:
        source = ["--corpus-file", text] if text else ["--builtin", "python-docs"]
        for size in args.sizes:
            layers, width = size.split("x")
            words = f"--cpu --corpus-format document --seq-len {WINDOW} --schedule {args.schedule} "
            words += f"--layers {layers} --d-model {width} --batch-size {BATCH} "
            words += f"--max-steps {args.updates} --warmup-steps {int(args.updates * args.warmup)}"
            settings = ddp.parse_settings([*words.split(), *source])
            data = ddp.build_data(settings)
            for name, kind in list(KINDS.items())[: args.kinds]:
                first = 0.0

                def loss_at(rate: float, kind=kind, data=data, settings=settings) -> float:
                    nonlocal first
                    runs = []
                    for settings.seed in range(args.seeds):
                        settings.lr = rate
                        first, last = train(data, settings, kind, args.beta1)
                        runs.append(last)
                    return statistics.mean(runs)

                rate, best, half, twice = climb(loss_at, 0.64 / int(width))
                row = f"| {text or 'python-docs'} | {size} | {name} | {first:.2f} | {best:.3f} "
                print(f"{row}| {rate:.2g} | +{half:.3f} | +{twice:.3f} |", flush=True)


if __name__ == "__main__":
    main()
