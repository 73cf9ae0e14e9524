"""The plan as text: what was asked, tables, and at the end what to do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from labs.shared.report import counted, paragraph, size_of, span_of, table


def report(plan: dict[str, Any]) -> str:
    """All of it, in at most about 60 lines of at most 100 columns (with --all: more lines)."""
    sections = [describe_run(plan), describe_layouts(plan), describe_time(plan)]
    if "scaling" in plan:
        sections += [describe_scaling(plan["scaling"]), describe_faults(plan["faults"])]
    sections += [describe_checkpoints(plan), [paragraph(conclusion(plan))]]
    return "\n\n".join("\n".join(lines) for lines in sections)


def describe_run(plan: dict[str, Any]) -> list[str]:
    m, machine, batch = plan["model"], plan["machine"], plan["batch"]
    lora = "" if m["trained"] == m["parameters"] else f", {m['trained']:,} trained in adapters"
    rows = [
        ("model", f"{m['name']}: {m['parameters']:,} parameters{lora}; "
         f"{counted(m['layers'], 'layer')}, {m['width']} wide, {counted(m['heads'], 'head')}, "
         f"vocabulary {m['vocab']:,}"),
        ("machine", f"{machine['nodes']} × {machine['gpus_per_node']} {machine['name']}"
         + f", {machine['network']} between nodes" * (machine["nodes"] > 1)),
        ("batch", f"per rank {batch['sequences']} × accumulation {batch['accumulation']} × ranks "
         f"{plan['layout']['data']} = {counted(batch['update_sequences'], 'sequence')} = "
         f"{batch['update_tokens']:,} tokens an update"),
    ]  # fmt: skip
    if "data" in plan:
        d = plan["data"]
        per = d["tokens_per_parameter"]
        verdict = "fewer than" if per < 18 else "about" if per < 25 else "more than"
        rows += [
            ("data", f"{size_of(d['bytes'])} at {d['bytes_per_token']:g} bytes a token = "
             f"{d['tokens'] / 1e9:,.5g} billion tokens, epochs: {d['epochs']:g}; "
             f"{size_of(d['node_bytes'])} a node, {size_of(d['rank_bytes'])} a data-parallel "
             f"rank, which reads {size_of(d['rank_bytes_per_second'])}/s; {per:.1f} tokens a "
             f"parameter, {verdict} the 20 that suit the compute (Hoffmann et al. 2022)"),
        ]  # fmt: skip
    return [table(rows, align="<<")]


def describe_layouts(plan: dict[str, Any]) -> list[str]:
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
    return [
        f"memory of the fullest rank in {unit}{room}; sequences a micro-batch as suit each layout",
        table(lines, header, "<<" + ">" * (len(header) - 3) + "<"),
    ]


def describe_time(plan: dict[str, Any]) -> list[str]:
    step, machine = plan["step"], plan["machine"]
    rank = "rank" if machine["name"] == "cpu" else "GPU"
    again = ""
    if plan["hardware_flops"] != plan["model_flops"]:
        again = f" ({plan['hardware_flops'] / 1e12:.1f} with what is computed twice)"
    rate = plan["model_flops"]
    rate_text = f"{rate / 1e12:.1f} TFLOP/s" if rate > 1e12 else f"{rate / 1e9:.1f} GFLOP/s"
    lines = [
        f"an update takes {span_of(step['total'])}: {plan['tokens_per_second']:,.0f} tokens/s, "
        f"{plan['tokens_per_second'] / machine['gpus']:,.0f} a {rank}",
        f"{rate_text} a {rank}{again}, {plan['share_of_peak']:.1%} of the peak; kernels while they "
        f"compute: {machine['kernel_share']:.0%}",
    ]
    rows = [
        (f"  {name}", span_of(value), f"{value / step['total']:.1%}")
        for name, value in step.items()
        if name not in ("total", "communication") and value
    ]
    lines.append(table(rows))
    if plan["gradient_bytes"]:
        plain = plan["layout"]["name"].startswith("ddp")
        what = "DDP all-reduces" if plain else "plain DDP would all-reduce"
        lines.append(f"  {what} {plan['gradient_bytes']:,} bytes of gradients an update")
    if "time" in plan:
        t = plan["time"]
        lines.append(
            f"all of it: {counted(t['updates'], 'update')}, {span_of(t['seconds'])} of training; "
            f"{span_of(t['days'] * 86400)} with failures and saving,\n"
            f"           {t['gpu_hours']:,.0f} GPU-hours, which cost {t['cost']:,.0f} at "
            f"{t['price']:g} each (--price)"
        )
    return lines


def describe_scaling(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for kind, what in (("weak", "same batch a GPU"), ("strong", "same global batch")):
        cells = [f"{one[kind]:.1%}" if one[kind] else "–" for one in rows]
        lines.append((f"  {kind} scaling, {what}", *cells))
    return [table(lines, ("efficiency by number of GPUs", *(one["gpus"] for one in rows)))]


def describe_faults(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        (one["gpus"], f"{one['slowdown'] - 1:.1%}", f"{one['failures_per_day']:.2f}",
         span_of(one["interval_seconds"]), f"{one['useful_share']:.1%}")
        for one in rows
    ]  # fmt: skip
    titles = ("the same run on GPUs", "slow ranks cost", "failures a day", "save every")
    return [table(lines, (*titles, "time that is training"))]


def describe_checkpoints(plan: dict[str, Any]) -> list[str]:
    c = plan["checkpoints"]
    sizes = ", ".join(f"{size_of(size)} {name}" for name, size in c["sizes"].items())
    lines = [
        paragraph(
            f"checkpoints: {sizes}; {c['kept']} kept and the best {size_of(c['stored_bytes'])}"
        )
    ]
    if plan["machine"]["name"] == "cpu":
        return lines
    lines.append(
        f"  a failure every {span_of(c['between_failures_seconds'])}; "
        f"a write takes {span_of(c['write_seconds'])}"
    )
    rows = [
        (f"  {name}", span_of(way["blocking_seconds"]),
         f"{span_of(way['interval_seconds'])} ({counted(way['interval_updates'], 'update')})",
         span_of(way["loss_per_failure_seconds"]), f"{way['useful_share']:.2%}")
        for name, way in c["ways"].items()
    ]  # fmt: skip
    header = ("  written", "stops for", "every (Daly 2006)", "a failure costs", "useful")
    return [*lines, table(rows, header)]


def conclusion(plan: dict[str, Any]) -> str:
    """What to do, in at most three sentences."""
    m, machine, batch = plan["model"], plan["machine"], plan["batch"]
    total, has = plan["memory"]["total"], machine["memory"]
    room = "" if math.isinf(has) else f" of {size_of(has)}"
    took = ""
    if "time" in plan:
        t = plan["time"]
        took = f", and takes {span_of(t['days'] * 86400)} or {t['gpu_hours']:,.0f} GPU-hours"
    how = plan["layout"]["name"] if machine["gpus"] > 1 else "one process"
    if plan["layout"]["chunks"] > 1:
        how += f" in {plan['layout']['chunks']} chunks of layers a rank"
    text = (
        f"Conclusion: {how} with micro-batches of {batch['sequences']} × {batch['seq_len']} tokens "
        f"needs {size_of(total)}{room} a rank{took}."
    )
    if machine["gpus"] > 1 and not how.startswith("ddp"):
        text += (
            f" Plain DDP would need {size_of(16 * m['trained'])} a GPU for weights, gradients and "
            "AdamW's means alone."
        )
    if "faults" in plan:
        way = plan["checkpoints"]["ways"]["background"]
        text += (
            f" Save in the background every {span_of(way['interval_seconds'])} "
            f"({counted(way['interval_updates'], 'update')})."
        )
    return text
