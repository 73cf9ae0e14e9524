"""The figures of a step in words, for somebody who sees DDP for the first time."""

from __future__ import annotations

import json
import textwrap

import llm_ddp_parallel_training as ddp
from labs.explain_step.step import covered
from labs.explain_step.three_ways import TOLERANCE, agrees
from labs.shared import report
from labs.shared.report import WIDTH, counted

SHOWN = 4  # samples of a rank; explain.json has them all


def prose(text: str) -> list[str]:
    return report.paragraph(text, "   ").splitlines()


def table(header: list, rows: list[list]) -> list[str]:
    return textwrap.indent(report.table(rows, header), "   ").splitlines()


def title(text: str) -> list[str]:
    return ["", f"== {text} ".ljust(WIDTH, "=")]


def step_report(
    number: int, steps: list[dict], settings: ddp.Settings, device: str, full: bool
) -> list[str]:
    """Update `number` (from 1) as lines; without `full` those that a first reader needs."""
    step = steps[number - 1]
    lines = [
        *title(f"Update {number} of {len(steps)}"),
        *samples_report(step, SHOWN if full else 2),
        *loss_report(step),
        *gradient_report(step, settings, full),
        *digest_report(step),
    ]
    if not step["proof"]:
        return [*lines, "", "One process: nothing was sent. Buckets, their all-reduce and the "
                "proof need two ranks or more."]  # fmt: skip
    lines += bucket_report(number, step, full)
    if full:
        lines += phase_report(step, device)
    return lines + proof_report(step, full)


def samples_report(step: dict, shown: int) -> list[str]:
    lines = ["", "1. Each rank reads its own samples"]
    for rank in step["ranks"]:
        samples, head = rank["samples"], f"rank {rank['rank']}"
        for sample in samples[:shown]:
            quoted = json.dumps(sample["text"], ensure_ascii=False)
            start = quoted if len(quoted) <= 66 else quoted[:64] + '…"'
            lines.append(f"   {head:<8} record {sample['record']:<5} {start}")
            head = ""
        more = len(samples) - shown
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
        text += (
            f" The plain mean of the {len(ranks)} means would be {of_means:.6f}: in it, the tokens "
            "of a rank that has fewer count more."
        )
    heading = "2. Each rank computes the mean loss of its own tokens"
    return ["", heading, *table(head, rows), *prose(text)]


def gradient_report(step: dict, settings: ddp.Settings, full: bool) -> list[str]:
    ranks, layers = step["ranks"], list(step["gradient_norms"])
    columns = [
        *((f"rank {r['rank']}", r["local_gradient_norms"]) for r in ranks),
        ("averaged", step["gradient_norms"]), ("AdamW's step", step["update_norms"]),
        ("weights", step["weight_norms"]),
    ]  # fmt: skip
    names = [*without_prefix(layers[:-1]), "total"]
    rows = [
        [name, *(f"{of[layer]:.6f}" for _, of in columns)]
        for name, layer in zip(names, layers)
        if full or layer == "total"
    ]
    several = "Each rank computes its own gradient; the all-reduce makes one of them"
    lines = ["", f"3. {several if len(ranks) > 1 else 'The gradient'}"]
    lines += table(["norms", *(head for head, _ in columns)], rows)
    if len(ranks) > 1:
        lines += prose(
            "A rank's own gradient, as it was before the all-reduce, is that of its own mean loss. "
            "The averaged one, G, is that of the global mean: the ranks' gradients times the "
            "weights above, added up. It is shorter than their mean: what they disagree about "
            "cancels."
        )
    else:
        lines += prose("In a single process the rank's own gradient is the averaged one, G.")
    return lines + (prose(arithmetic(step, settings)) if full else [])


def arithmetic(step: dict, settings: ddp.Settings) -> str:
    """How training_step gets to G, with the numbers of this step."""
    s, c, n, ranks = settings, step["capacity"], step["tokens"], len(step["ranks"])
    exchange = f"DDP adds up and divides by N = {ranks}"
    clip = "is not clipped (--clip 0)"
    if s.clip:
        clip = f"is below --clip {s.clip:g} and stays as it is"
        if step["clip_factor"] < 1:
            clip = f"is above --clip {s.clip:g} and is multiplied by {step['clip_factor']:.6f}"
    return (
        "How training_step gets there: a rank's backward pass starts from (sum of its losses) / c, "
        f"with c = batch × accumulation × (seq_len − 1) = {s.batch_size} × {s.grad_accum} × "
        f"{s.seq_len - 1} = {c}. {exchange if ranks > 1 else 'N is 1, and nothing is sent'}. "
        f"Times c·N/n = {c} × {ranks} / {n} = {step['correction']:.6f} that is G. Its norm {clip}; "
        f"then AdamW moves the weights, with learning rate {step['learning_rate']:g}."
    )


def digest_report(step: dict) -> list[str]:
    ranks, rows = step["ranks"], []
    for what in ranks[0]["digests"]:
        digests = [r["digests"][what] for r in ranks]
        verdict = "equal" if len(set(digests)) == 1 else "different"
        rows.append([what, *(d[:12] for d in digests), verdict if len(ranks) > 1 else ""])
    head = ["sha256, first digits", *(f"rank {r['rank']}" for r in ranks), ""]
    several = "Equal weights, different gradients, one average, equal weights"
    return ["", f"4. {several if len(ranks) > 1 else 'Digests'}", *table(head, rows)]


def bucket_report(number: int, step: dict, full: bool) -> list[str]:
    ranks, buckets = step["ranks"], step["ranks"][0]["buckets"]
    begins = [[b for name, b, _ in r["phases"] if name == "backward"][-1] for r in ranks]
    names = iter(without_prefix([name for b in buckets for name in b["parameters"]]))
    held = [[next(names) for _ in bucket["parameters"]] for bucket in buckets]
    rows = []
    for i, bucket in enumerate(buckets):
        times = [[1e3 * (r["buckets"][i][x] - b) for x in ("ready", "done")]
                 for r, b in zip(ranks, begins)]  # fmt: skip
        times = [f"{ready:.2f}, {done:.2f}" for ready, done in times]
        rows.append(
            [i, f"{bucket['bytes']:,}", len(held[i]), held[i][0].removeprefix("encoder."), *times]
        )
    head = ["bucket", "bytes", "gradients", "the first of them"]
    size = sum(b["bytes"] for b in buckets)
    sent = f"{counted(len(buckets), 'bucket')}: {size:,} bytes, every trained parameter once"
    lines = ["", f"5. DDP sent {sent}"]
    lines += table([*head, *(f"rank {r['rank']}: ready, done" for r in ranks)], rows)
    order = (
        "In its first backward pass DDP does not know yet in which order gradients arrive, so it "
        "sends them all at the end." if number == 1 else
        "From the second update on, DDP fills its buckets in the order in which the gradients "
        "arrived in the first one."
    )  # fmt: skip
    lines += prose(f"Times are ms since that rank's last backward pass began. {order}")
    for i, names in enumerate(held) if full else ():
        shown = names if len(names) < 5 else [*names[:3], "…", names[-1]]
        lines += prose(f"bucket {i}: {', '.join(shown)}")
    last = [max(r["buckets"][i]["sent"] for r in ranks) for i in range(len(buckets))]
    for rank in ranks:
        over = {what: 1e3 * seconds for what, seconds in rank["overlap"].items()}
        waited = covered((b["sent"], late) for b, late in zip(rank["buckets"], last))
        lines += prose(
            f"rank {rank['rank']}: all-reduces were under way for {over['under_way']:.2f} ms, "
            f"{over['hidden'] / over['under_way']:.0%} of it hidden behind "
            f"{over['backward']:.2f} ms of backward pass"
            + f"; {1e3 * waited:.2f} ms of it waiting for a slower rank to send"
            * full
        )
    return lines


def phase_report(step: dict, device: str) -> list[str]:
    """How long each phase took, and what the lab itself adds."""
    ranks, lines, rows = step["ranks"], [], []
    if device == "cpu":
        lines += prose(
            "On a CPU the cores that compute also add up and send, so what is hidden is not free."
        )
    for phase in dict.fromkeys(name for name, *_ in ranks[0]["phases"]):
        spans = [sum(e - b for name, b, e in r["phases"] if name == phase) for r in ranks]
        rows.append([phase, *(f"{1e3 * seconds:.2f}" for seconds in spans)])
    copies = max(r["overlap"]["copies"] for r in ranks)
    lines += table(["phases, ms", *(f"rank {r['rank']}" for r in ranks)], rows)
    return lines + prose(
        f"(The observer's copies are for this report; up to {1e3 * copies:.2f} ms more of them are "
        "in the backward pass.)"
    )


def proof_report(step: dict, full: bool) -> list[str]:
    rows = [
        [way, *(f"{x:.1e}" if x else "0" for x in apart.values())]
        for way, apart in step["proof"].items()
    ]
    head = ["from one process differ", "loss", "gradient", "largest of it", "of the weights"]
    lines = ["", "6. The same update from the same weights: by hand, and in one process",
             *table(head, rows)]  # fmt: skip
    if full:
        lines += prose(
            "Loss and gradient relative (norm of the difference by norm), the others absolute. "
            "AdamW divides a gradient by its own size, which enlarges the rounding of tiny ones."
        )
    verdict = "agree" if agrees(step) else "do NOT agree"
    return lines + prose(f"DDP, the average by hand and one process {verdict} to {TOLERANCE:g}.")


def race_report(result: dict) -> list[str]:
    if not result:
        return []
    rows = [
        [way, *(f"{1e3 * of[which]:.2f}" for which in ("median", "fastest", "slowest"))]
        for way, of in result["seconds"].items()
    ]
    head = ["ms from the forward pass to the averaged gradient", "median", "fastest", "slowest"]
    how = (
        f"The last batch again, each way in turn, {counted(result['rounds'], 'round')}; the slower "
        "rank of each."
    )
    return [*title("What the averaging costs here"), "", *table(head, rows), *prose(how)]


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


def without_prefix(names: list[str]) -> list[str]:
    """The names without the modules that all of them are in; a number keeps its list's name."""
    parts, shared = [name.split(".") for name in names], 0
    while all(
        p[shared] == parts[0][shared] and len(p) > shared + 1 and not p[shared + 1].isdigit()
        for p in parts
    ):
        shared += 1
    return [".".join(p[shared:]) for p in parts]
