"""The plan as text: what was asked, tables, and at the end what to do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from labs.planner.models import PlanError
from labs.shared.report import counted, paragraph, size_of, span_of, table


def report(plan: dict[str, Any]) -> str:
    """All of it, in at most about 60 lines of at most 100 columns (with --all: more lines)."""
    sections = [describe_run(plan), describe_layouts(plan), describe_time(plan)]
    if "scaling" in plan:
        sections += [describe_scaling(plan["scaling"]), describe_faults(plan["faults"])]
    sections += [describe_checkpoints(plan), paragraph(conclusion(plan))]
    return "\n\n".join(sections)


def describe_run(plan: dict[str, Any]) -> str:
    m, machine, batch = plan["model"], plan["machine"], plan["batch"]
    lora = "" if m["trained"] == m["parameters"] else f", {m['trained']:,} trained in adapters"
    network = f", {machine['network']} between nodes" * (machine["nodes"] > 1)
    rows = [
        ("model", f"{m['name']}: {m['parameters']:,} parameters{lora}; "
         f"{counted(m['layers'], 'layer')}, {m['width']} wide, {counted(m['heads'], 'head')}, "
         f"vocabulary {m['vocab']:,}"),
        ("machine", f"{machine['nodes']} × {machine['gpus_per_node']} {machine['name']}{network}"),
        ("batch", f"per rank {batch['sequences']} × accumulation {batch['accumulation']} × ranks "
         f"{plan['layout']['data']} = {counted(batch['update_sequences'], 'sequence')} = "
         f"{batch['update_tokens']:,} tokens an update"),
    ]  # fmt: skip
    if d := plan.get("data"):
        per = d["tokens_per_parameter"]
        verdict = "fewer than" if per < 18 else "about" if per < 25 else "more than"
        text = (
            f"{size_of(d['bytes'])} at {d['bytes_per_token']:g} bytes a token = "
            f"{d['tokens'] / 1e9:,.5g} billion tokens, epochs: {d['epochs']:g}; "
            f"{size_of(d['node_bytes'])} a node, {size_of(d['rank_bytes'])} a data-parallel rank, "
            f"which reads {size_of(d['rank_bytes_per_second'])}/s; {per:.1f} tokens a parameter, "
            f"{verdict} the 20 that suit the compute (Hoffmann et al. 2022)"
        )
        rows.append(("data", text))
    return table(rows, align="<<")


def describe_layouts(plan: dict[str, Any]) -> str:
    """Memory and speed by layout, each with the portions that suit it."""
    has, rows = plan["machine"]["memory"], plan["layouts"]
    unit, scale = ("GB", 1e9) if plan["memory"]["total"] > 1e9 else ("MB", 1e6)
    host = [p for p in ("reused", "heap", "saving") if any(one["memory"][p] for one in rows)]
    parts = ["copies", "activations", "loss", *host]
    lines = []
    for one in rows:
        m = one["memory"]
        values = [m["weights"] + m["gradients"] + m["optimizer"], *(m[p] for p in parts)]
        shown = [f"{v / scale:.1f}" if v < 100 * scale else f"{v / scale:.0f}" for v in values]
        again = {"none": "", "selective": "sel.", "full": "full"}[one["checkpointing"]]
        remark = f"{one['slower']:.0%} {one['cause']}" if one["slower"] > 0.005 else "no faster"
        remark = one["problem"] or ("chosen" if one["chosen"] else remark)
        total = f"{m['total'] / scale:.1f}"
        lines.append((one["way"], again, one["sequences"], *shown, total, remark))
    short = ["activ." if part == "activations" else part for part in parts]
    header = ("layout", "ckpt", "seqs", "states", *short, "total", "slower")
    room = "" if math.isinf(has) else f" (of {size_of(has)})"
    what = (
        f"memory of the fullest rank in {unit}{room}; sequences a micro-batch as suit each layout"
    )
    return what + "\n" + table(lines, header, "<<" + ">" * (len(header) - 3) + "<")


def describe_time(plan: dict[str, Any]) -> str:
    step, machine, rate = plan["step"], plan["machine"], plan["model_flops"]
    rank = "rank" if machine["name"] == "cpu" else "GPU"
    again = f" ({plan['hardware_flops'] / 1e12:.1f} with what is computed twice)"
    again *= plan["hardware_flops"] != rate
    rate_text = f"{rate / 1e12:.1f} TFLOP/s" if rate > 1e12 else f"{rate / 1e9:.1f} GFLOP/s"
    rows = [
        (f"  {name}", span_of(value), f"{value / step['total']:.1%}")
        for name, value in step.items()
        if name not in ("total", "communication") and value
    ]
    lines = [
        f"an update takes {span_of(step['total'])}: {plan['tokens_per_second']:,.0f} tokens/s, "
        f"{plan['tokens_per_second'] / machine['gpus']:,.0f} a {rank}",
        f"{rate_text} a {rank}{again}, {plan['share_of_peak']:.1%} of the peak; kernels while they "
        f"compute: {machine['kernel_share']:.0%}",
        table(rows),
    ]
    if plan["gradient_bytes"]:
        plain = plan["layout"]["name"].startswith("ddp")
        what = "DDP all-reduces" if plain else "plain DDP would all-reduce"
        lines.append(f"  {what} {plan['gradient_bytes']:,} bytes of gradients an update")
    if t := plan.get("time"):
        lines.append(
            f"all of it: {counted(t['updates'], 'update')}, {span_of(t['seconds'])} of training; "
            f"{span_of(t['days'] * 86400)} with failures and saving,\n"
            f"           {t['gpu_hours']:,.0f} GPU-hours, which cost {t['cost']:,.0f} at "
            f"{t['price']:g} each (--price)"
        )
    return "\n".join(lines)


def describe_scaling(rows: Sequence[dict[str, Any]]) -> str:
    lines = []
    for kind, what in (("weak", "same batch a GPU"), ("strong", "same global batch")):
        cells = [f"{one[kind]:.1%}" if one[kind] else "–" for one in rows]
        lines.append((f"  {kind} scaling, {what}", *cells))
    return table(lines, ("efficiency by number of GPUs", *(one["gpus"] for one in rows)))


def describe_faults(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        (one["gpus"], f"{one['slowdown'] - 1:.1%}", f"{one['failures_per_day']:.2f}",
         span_of(one["interval_seconds"]), f"{one['useful_share']:.1%}")
        for one in rows
    ]  # fmt: skip
    titles = ("the same run on GPUs", "slow ranks cost", "failures a day", "save every")
    return table(lines, (*titles, "time that is training"))


def describe_checkpoints(plan: dict[str, Any]) -> str:
    c = plan["checkpoints"]
    sizes = ", ".join(f"{size_of(size)} {name}" for name, size in c["sizes"].items())
    kept = f"{c['kept']} kept and the best {size_of(c['stored_bytes'])}"
    text = paragraph(f"checkpoints: {sizes}; {kept}")
    if plan["machine"]["name"] == "cpu":
        return text
    between, write = span_of(c["between_failures_seconds"]), span_of(c["write_seconds"])
    rows = [
        (f"  {name}", span_of(way["blocking_seconds"]),
         f"{span_of(way['interval_seconds'])} ({counted(way['interval_updates'], 'update')})",
         span_of(way["loss_per_failure_seconds"]), f"{way['useful_share']:.2%}")
        for name, way in c["ways"].items()
    ]  # fmt: skip
    header = ("  written", "stops for", "every (Daly 2006)", "a failure costs", "useful")
    return f"{text}\n  a failure every {between}; a write takes {write}\n{table(rows, header)}"


def conclusion(plan: dict[str, Any]) -> str:
    """What to do, in at most three sentences."""
    machine, batch, has = plan["machine"], plan["batch"], plan["machine"]["memory"]
    need = size_of(plan["memory"]["total"]) + ("" if math.isinf(has) else f" of {size_of(has)}")
    how = plan["layout"]["name"] if machine["gpus"] > 1 else "one process"
    if plan["layout"]["chunks"] > 1:
        how += f" in {plan['layout']['chunks']} chunks of layers a rank"
    portions = f"micro-batches of {batch['sequences']} × {batch['seq_len']} tokens"
    text = f"Conclusion: {how} with {portions} needs {need} a rank"
    if t := plan.get("time"):
        text += f", and takes {span_of(t['days'] * 86400)} or {t['gpu_hours']:,.0f} GPU-hours"
    text += "."
    if machine["gpus"] > 1 and not how.startswith("ddp"):
        states = size_of(16 * plan["model"]["trained"])
        text += (
            f" Plain DDP would need {states} a GPU for weights, gradients and AdamW's means alone."
        )
    if "faults" in plan:
        way = plan["checkpoints"]["ways"]["background"]
        updates = counted(way["interval_updates"], "update")
        text += f" Save in the background every {span_of(way['interval_seconds'])} ({updates})."
    return text


def draw_memory(plan: dict[str, Any], path: Path) -> None:
    """Stacked bars of memory per layout, with the limit of the GPU; PNG, SVG or PDF by suffix."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PlanError("--picture needs matplotlib: pip install matplotlib") from None
    if path.is_dir() or not path.suffix:  # matplotlib would write to another name
        raise PlanError(f"--picture {str(path)!r}: give a file name that ends in .png")

    machine, rows = plan["machine"], {one["name"]: one["memory"] for one in plan["layouts"]}
    figure = Figure(figsize=(10, 1.6 + 0.34 * len(rows)), layout="constrained")
    axes, left = figure.subplots(), [0.0] * len(rows)
    for part in plan["memory"]:
        values = [one[part] / 1e9 for one in rows.values()]
        if part not in ("total", "reused") and any(values):
            axes.barh(list(rows), values, left=left, label=part)
            left = [a + b for a, b in zip(left, values)]
    if not math.isinf(machine["memory"]):
        label = f"{machine['name']}: {size_of(machine['memory'])}"
        axes.axvline(machine["memory"] / 1e9, color="black", linestyle="--", label=label)
    title = f"{plan['model']['name']} parameters on {machine['nodes']} × {machine['gpus_per_node']}"
    axes.set_title(f"{title} GPUs, sequences of {plan['batch']['seq_len']} tokens")
    axes.set_xlabel("GB on the fullest rank")
    axes.invert_yaxis()
    axes.legend(loc="lower right")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise PlanError(f"--picture {path}: {error}") from None
