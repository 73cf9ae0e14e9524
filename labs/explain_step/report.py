"""The figures of a step in words, for somebody who sees DDP for the first time."""

from __future__ import annotations

import json
import textwrap

import llm_ddp_parallel_training as ddp
from labs.explain_step.three_ways import TOLERANCE, agrees, capacity
from labs.shared import report
from labs.shared.report import WIDTH, counted

SHOWN = 2  # samples of a rank; explain.json has them all


def prose(text: str) -> list[str]:
    return report.paragraph(text, "   ").splitlines()


def table(header: list, rows: list[list]) -> list[str]:
    return textwrap.indent(report.table(rows, header), "   ").splitlines()


def by_rank(step: dict, after: str = "") -> list[str]:
    return [f"rank {r['rank']}{after}" for r in step["ranks"]]


def as_text(steps: list[dict], settings: ddp.Settings) -> str:
    """The last update in words."""
    number, step = len(steps), steps[-1]
    lines = [f"== Update {number} of {number} ".ljust(WIDTH, "="), *samples_report(step)]
    lines += loss_report(step)
    if step["proof"]:
        lines += gradient_report(step, settings) + digest_report(step)
        lines += bucket_report(number, step) + proof_report(step)
    else:
        lines += ["", "One process: nothing was sent. All that is left needs two ranks or more."]
    return "\n".join(lines)


def samples_report(step: dict) -> list[str]:
    lines = ["", "1. Each rank reads its own samples"]
    for rank in step["ranks"]:
        samples, head = rank["samples"], f"rank {rank['rank']}"
        for sample in samples[:SHOWN]:
            quoted = json.dumps(sample["text"], ensure_ascii=False)
            start = quoted if len(quoted) <= 66 else quoted[:64] + '…"'
            lines.append(f"   {head:<8} record {sample['record']:<5} {start}")
            head = ""
        more = len(samples) - SHOWN
        lines += [f"            and {more} more"] if more > 0 else []
        if not samples:
            lines.append(f"   {head:<8} none: the epoch has run out of samples, so it gets padding")
    union = sorted(x["record"] for rank in step["ranks"] for x in rank["samples"])
    same = "the" if union == step["expected_records"] else "NOT the"
    return lines + prose(
        f"Together they are {same} {counted(len(step['expected_records']), 'sample')} that one "
        "process with this global batch would take next."
    )


def loss_report(step: dict) -> list[str]:
    ranks, n = step["ranks"], step["tokens"]
    rows = []
    for r in ranks:
        weight = f"{r['tokens']} / {n} = {r['weight']:.6f}"
        rows.append([r["rank"], r["tokens"], f"{r['local_loss']:.6f}", weight])
    head = ["rank", "valid tokens", "mean loss over them", "weight in the global mean"]
    terms = " + ".join(f"{r['weight']:.6f} × {r['local_loss']:.6f}" for r in ranks)
    mean = sum(r["weight"] * r["local_loss"] for r in ranks)
    text = f"global mean = {terms} = {mean:.6f}; training_step says {step['loss']:.6f}."
    if len(ranks) > 1:
        of_means = sum(r["local_loss"] for r in ranks) / len(ranks)
        text += f" The plain mean of the means, {of_means:.6f}, gives small ranks too much weight."
    heading = "2. Each rank computes the mean loss of its own tokens"
    return ["", heading, *table(head, rows), *prose(text)]


def gradient_report(step: dict, settings: ddp.Settings) -> list[str]:
    norms = [r["local_gradient_norms"] for r in step["ranks"]]
    norms += [step["gradient_norms"], step["update_norms"]]
    head = ["norms", *by_rank(step), "averaged", "AdamW's step"]
    row = ["total", *(f"{of_layers['total']:.6f}" for of_layers in norms)]
    title = "3. Each rank computes its own gradient; the all-reduce makes one of them"
    s, c, n, ranks = settings, capacity(settings), step["tokens"], len(step["ranks"])
    text = (
        "A rank's own gradient, as it was before the all-reduce, is that of its own mean loss. The "
        "averaged one, G, is that of the global mean: the ranks' gradients times the weights "
        "above, added up. It is shorter than their mean: what they disagree about cancels. "
        "How training_step gets there: a rank's backward pass starts from (sum of its losses) / c, "
        f"with c = batch × accumulation × (seq_len − 1) = {s.batch_size} × {s.grad_accum} × "
        f"{s.seq_len - 1} = {c}; DDP adds up and divides by N = {ranks}; times c·N/n = {c} × "
        f"{ranks} / {n} = {c * ranks / n:.6f} that is G. Clipping multiplies it by "
        f"{step['clip_factor']:.6f}."
    )
    return ["", title, *table(head, [row]), *prose(text)]


def digest_report(step: dict) -> list[str]:
    ranks, rows = step["ranks"], []
    for what in ranks[0]["digests"]:
        digests = [r["digests"][what] for r in ranks]
        verdict = "equal" if len(set(digests)) == 1 else "different"
        rows.append([what, *(d[:12] for d in digests), verdict])
    title = "4. Equal weights, different gradients, one average, equal weights"
    return ["", title, *table(["sha256, first digits", *by_rank(step), ""], rows)]


def bucket_report(number: int, step: dict) -> list[str]:
    ranks, buckets = step["ranks"], step["ranks"][0]["buckets"]
    begins = [[b for name, b, _ in r["phases"] if name == "backward"][-1] for r in ranks]
    rows = []
    for i, bucket in enumerate(buckets):
        names = bucket["parameters"]
        times = []
        for rank, begin in zip(ranks, begins):
            ready, done = (1e3 * (rank["buckets"][i][x] - begin) for x in ("ready", "done"))
            times.append(f"{ready:.2f}, {done:.2f}")
        rows.append([i, f"{bucket['bytes']:,}", len(names), without_module(names[0]), *times])
    head = ["bucket", "bytes", "gradients", "the first of them", *by_rank(step, ": ready, done")]
    size = sum(b["bytes"] for b in buckets)
    sent = f"{counted(len(buckets), 'bucket')}: {size:,} bytes, every trained parameter once"
    lines = ["", f"5. DDP sent {sent}", *table(head, rows)]
    order = (
        "In its first backward pass DDP does not know yet in which order gradients arrive, so it "
        "sends them all at the end."
        if number == 1
        else "From the second update on, DDP fills its buckets in the order in which the gradients "
        "arrived in the first one."
    )
    lines += prose(f"Times are ms since that rank's last backward pass began. {order}")
    for rank in ranks:
        over = rank["overlap"]
        lines += prose(
            f"rank {rank['rank']}: {1e3 * over['under_way']:.2f} ms of all-reduces, "
            f"{over['hidden'] / over['under_way']:.0%} of it hidden behind "
            f"{1e3 * over['backward']:.2f} ms of backward pass"
        )
    return lines


def proof_report(step: dict) -> list[str]:
    rows = [
        [way, *(f"{x:.1e}" if x else "0" for x in apart.values())]
        for way, apart in step["proof"].items()
    ]
    head = ["from one process differ", "loss", "gradient", "largest of it", "of the weights"]
    title = "6. The same update from the same weights: by hand, and in one process"
    verdict = "agree" if agrees(step) else "do NOT agree"
    said = f"DDP, the average by hand and one process {verdict} to {TOLERANCE:g}."
    return ["", title, *table(head, rows), *prose(said)]


def conclusion(steps: list[dict]) -> str:
    """What to take home."""
    ranks = steps[-1]["ranks"]
    if len(ranks) == 1:
        return "One process computes the gradient of its batch and follows it; nothing is sent."
    if not all(map(agrees, steps)):
        return "The three ways do NOT agree: this step is not that of one process."
    over = [r["overlap"] for r in ranks]
    hidden = sum(o["hidden"] for o in over) / sum(o["under_way"] for o in over)
    return (
        f"Each of {len(ranks)} ranks computed the gradient of its own samples, and the average is "
        "that of one process with all samples: the same step, to rounding. It travelled in "
        f"{counted(len(ranks[0]['buckets']), 'bucket')}, for {hidden:.0%} of the time behind the "
        "backward pass; DDP changes when things are sent, and not what is computed."
    )


def without_module(name: str) -> str:
    """A parameter's or layer's name from its list of layers on, which is what tells them apart."""
    before, layers, after = name.rpartition("layers.")
    return layers + after if before else name
