"""Draws the pictures of wiki/Understanding-Gradients.md from what the labs measured.

    python -m torch.distributed.run --standalone --nproc_per_node=2 -m labs.explain_step \\
        --cpu --steps 2 --output-dir runs/small
    python -m torch.distributed.run --standalone --nproc_per_node=2 -m labs.explain_step \\
        --cpu --steps 2 --d-model 256 --layers 4 --bucket-cap-mb 4 --output-dir runs/large
    python -m labs.break_it --all --json runs/bugs.json
    python -m labs.strategies --strategy one --report runs/one.json
    python -m labs.strategies --strategy ddp --ranks 2 --report runs/ddp.json
    python -m labs.strategies --strategy fsdp --ranks 2 --report runs/fsdp.json
    python docs/draw_claims.py runs wiki/images
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RANKS = ("tab:blue", "tab:orange")
WRONG, RIGHT = "tab:red", "tab:green"


def read(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


def save(figure: plt.Figure, path: Path) -> None:
    figure.savefig(path, dpi=90)
    plt.close(figure)


def draw_agreement(steps: list[dict], path: Path) -> None:
    """Claims 1 to 4: digests, samples, local gradients, and the difference to one process."""
    figure, ((a, b), (c, d)) = plt.subplots(2, 2, figsize=(12, 7), layout="constrained")
    ranks = steps[0]["ranks"]

    names = list(ranks[0]["digests"])
    for x, name in enumerate(names):
        digests = [rank["digests"][name][:6] for rank in ranks]
        for y, digest in enumerate(digests):
            color = RIGHT if len(set(digests)) == 1 else WRONG
            a.add_patch(plt.Rectangle((x - 0.45, y - 0.4), 0.9, 0.8, color=color, alpha=0.3))
            a.text(x, y, digest, ha="center", va="center", family="monospace")
    a.set(xlim=(-0.6, len(names) - 0.4), ylim=(len(ranks) - 0.4, -0.6))
    a.set_xticks(range(len(names)), [name.replace(" ", "\n") for name in names])
    a.set_yticks(range(len(ranks)), [f"rank {r}" for r in range(len(ranks))])
    a.set_title("1, 3. One update: sha256 on each rank (green: equal)")

    at = 0
    for u, step in enumerate(steps, 1):
        for rank in step["ranks"]:
            records = [sample["record"] for sample in rank["samples"]]
            places = [at + rank["rank"] + len(ranks) * i for i in range(len(records))]
            label = f"rank {rank['rank']}" if u == 1 else None
            b.scatter(places, records, color=RANKS[rank["rank"]], label=label)
        at += sum(len(rank["samples"]) for rank in step["ranks"])
        b.axvline(at - 0.5, color="gray", lw=0.8)
        b.text(at - 0.7, -3.6, f"update {u} ends", ha="right", fontsize=8, color="gray")
    b.set(xlabel="place in the order of the epoch", ylabel="record id", ylim=(-4.5, 38))
    b.set_title("2. An epoch: every record once, on one rank")
    b.legend(loc="upper right", fontsize=8, ncols=2)

    layers = list(steps[0]["gradient_norms"])
    for i, rank in enumerate(steps[0]["ranks"]):
        values = [rank["local_gradient_norms"][layer] for layer in layers]
        places = [x + (i - 1) * 0.27 for x in range(len(layers))]
        c.bar(places, values, 0.27, color=RANKS[i], label=f"rank {i}, own gradient")
    averaged = [steps[0]["gradient_norms"][layer] for layer in layers]
    c.bar([x + 0.27 for x in range(len(layers))], averaged, 0.27, color="black", label="averaged")
    names = [layer.replace("encoder.", "") for layer in layers]
    c.set_xticks(range(len(layers)), names, fontsize=8)
    c.set_ylabel("norm")
    c.set_title("3. Local gradients differ; the averaged one is shorter")
    c.legend(fontsize=8)

    ways = list(steps[0]["proof"])
    least = 1e-12  # a logarithmic axis has no 0
    for i, way in enumerate(ways):
        error = max(step["proof"][way]["gradient_relative"] for step in steps)
        d.barh(i, max(error, least), color=RIGHT, height=0.5)
        text = f"{error:.1e}" if error else "0: the same bits"
        d.text(1.5 * max(error, least), i, text, va="center")
    d.axvline(1e-6, color=WRONG, ls="--", label="allowed: 1e-6")
    d.set(xscale="log", xlim=(least / 10, 1e-4), ylim=(-0.6, len(ways) - 0.1))
    d.set_xlabel("relative difference of the gradient from that of one process")
    d.set_yticks(range(len(ways)), [way.replace("all-reduce ", "all-reduce\n") for way in ways])
    d.set_title("4. The averaged gradient is that of the joined batch")
    d.legend(fontsize=8, loc="upper left")
    save(figure, path)


def draw_overlap(small: dict, large: dict, path: Path) -> None:
    """Claims 5 and 6: when which gradients are sent, and what of it hides behind backward."""
    figure, (a, b) = plt.subplots(1, 2, figsize=(12, 4), layout="constrained")
    rank = large["ranks"][0]
    order = model_order(rank["buckets"])
    start = next(begin for name, begin, _ in rank["phases"] if name == "backward")
    for number, bucket in enumerate(rank["buckets"]):
        places = [order.index(name) for name in bucket["parameters"]]
        ready = 1e3 * (bucket["ready"] - start)
        a.scatter([ready] * len(places), places, s=18)
        middle = (ready, (min(places) + max(places)) / 2)
        a.annotate(f"bucket {number}", middle, xytext=(8, 0), textcoords="offset points",
                   va="center", fontsize=8)  # fmt: skip
    a.set(xlabel="ms of the backward pass until the bucket is full",
          ylabel="parameter, counted from the input")  # fmt: skip
    a.set(title="5. Buckets fill from the last layer to the first")
    a.margins(0.25, 0.08)

    for y, step in enumerate((small, large)):
        overlap = step["ranks"][0]["overlap"]
        hidden, exposed = (1e3 * overlap[what] for what in ("hidden", "exposed"))
        b.barh(y, hidden, color=RIGHT, label="hidden behind backward" if y else None)
        b.barh(y, exposed, left=hidden, color=WRONG, label="waited for" if y else None)
        share = hidden / (hidden + exposed)
        b.text(hidden + exposed, y, f"  {share:.0%} hidden", va="center")
    labels = []
    for what, step in (("default size", small), ("4 layers, 256 wide", large)):
        count = len(step["ranks"][0]["buckets"])
        labels.append(f"{what}\n{count} bucket{'s' * (count > 1)}")
    b.set_yticks((0, 1), labels)
    b.set(xlabel="ms in which all-reduces are under way", title="6. What hides, and what does not")
    b.set_xlim(0, 1.25 * b.get_xlim()[1])
    b.legend(fontsize=8, loc="lower right")
    save(figure, path)


def model_order(buckets: list[dict]) -> list[str]:
    """Parameter names from the input to the output of the tiny model."""
    parts = ("token_emb", "pos_emb", "encoder", "norm", "lm_head")
    inside = ("norm1", "in_proj", "out_proj", "norm2", "linear1", "linear2", "")

    def place(name: str) -> tuple:
        part = next(i for i, part in enumerate(parts) if name.startswith(part))
        layer = int(name.split(".")[2]) if part == 2 else 0
        return part, layer, next(i for i, word in enumerate(inside) if word in name)

    return sorted((name for bucket in buckets for name in bucket["parameters"]), key=place)


BUGS = (  # claim, bug, what its number is, and how it is written
    (7, "no-sync-on-last", "largest difference between\nthe ranks' weights", "{:.1e}"),
    (8, "mean-of-means", "gradient: relative distance\nfrom that of one process", "{:.1e}"),
    (9, "no-set-epoch", "share of samples at the same\nplace in both epochs", "{:.0%}"),
    (10, "validation-padding", "validation loss: distance\nfrom that of one process", "{:.1e}"),
    (11, "clip-before-unscale", "norm of the gradient used;\nthe limit is 0.1", "{:.2g}"),
    (12, "rank-0-collective", "ranks that wait for ever", "{:.0f}"),
)


def draw_bugs(bugs: dict, path: Path) -> None:
    """Claims 7 to 12: each symptom, wrong and right."""
    figure, axes = plt.subplots(2, 3, figsize=(12, 5.5), layout="constrained")
    for axis, (claim, name, unit, form) in zip(axes.flat, BUGS):
        values = [bugs[name][version]["number"] for version in ("wrong", "right")]
        axis.bar(("wrong", "right"), values, color=(WRONG, RIGHT), width=0.5)
        for x, value in enumerate(values):
            axis.text(x, value, form.format(value), ha="center", va="bottom")
        axis.set_ylim(0, 1.15 * max(values))
        axis.set_yticks([])
        axis.set(title=f"{claim}. {name}", xlabel=unit)
    save(figure, path)


def draw_memory(reports: dict[str, dict], path: Path) -> None:
    """Claims 13 and 14: what each rank holds between two updates."""
    figure, axes = plt.subplots(figsize=(12, 3), layout="constrained")
    bars = [(name, rank) for name, report in reports.items() for rank in report["ranks"]]
    left = [0.0] * len(bars)
    for part in ("parameters", "gradients", "optimizer"):
        values = [rank[part] / 1e6 for _, rank in bars]
        axes.barh(range(len(bars)), values, left=left, label=part)
        left = [x + value for x, value in zip(left, values)]
    for y, total in enumerate(left):
        axes.text(total, y, f" {total:.2f} MB", va="center")
    seen: dict[str, int] = {}
    labels = []
    for name, _ in bars:
        labels.append(f"{name}, rank {seen.setdefault(name, 0)}")
        seen[name] += 1
    axes.set_yticks(range(len(bars)), labels)
    axes.set(xlabel="MB", title="13. DDP: every rank holds everything. 14. FSDP: half on two ranks")
    axes.set_xlim(0, 1.2 * max(left))
    axes.invert_yaxis()
    axes.legend(fontsize=8, loc="lower right")
    save(figure, path)


def main(folder: Path, to: Path) -> None:
    small, large = (read(folder / name / "explain.json")["steps"] for name in ("small", "large"))
    draw_agreement(small, to / "claims-1-4.png")
    draw_overlap(small[-1], large[-1], to / "claims-5-6.png")
    draw_bugs(read(folder / "bugs.json"), to / "claims-7-12.png")
    ways = {name: read(folder / f"{name}.json") for name in ("one", "ddp", "fsdp")}
    draw_memory(ways, to / "claims-13-14.png")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
