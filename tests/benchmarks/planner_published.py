"""What `labs.planner` prints for runs that others have published, beside what they measured.

    python tests/benchmarks/planner_published.py            the table of wiki/Planning.md
    python tests/benchmarks/planner_published.py --flags    with the flags of each run
    python tests/benchmarks/planner_published.py --widths   speeds by width: MPT, 125M to 30B

One set of assumptions for all: only facts of a run (model, machine, layout, batch) are given as
flags. Each figure is read from the report as the command prints it.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from labs.planner import flag_parser, make_plan
from labs.planner.report import report

FIGURES = {  # what is compared: (unit, where the report has it)
    "hardware": ("TFLOP/s", r"\(([\d.]+) with what is computed twice\)"),
    "model": ("TFLOP/s", r"^([\d.]+) TFLOP/s a GPU"),
    "speed": ("tokens/s", r"tokens/s, ([\d,]+) a GPU"),
    "update": ("s", r"^an update takes ([\d.]+) (?:s|min)"),
    "days": ("days", r"of training; ([\d.]+) days with failures"),
    "hours": ("GPU-hours", r"([\d,]+) GPU-hours, which"),
    "memory": ("GB", r"needs ([\d.]+) GB"),
    "failures": ("failures", r"^16384 +[\d.]+% +([\d.]+) "),
}


@dataclasses.dataclass(frozen=True)
class Published:
    """A run: the flags that state its facts, what was measured, and who says so."""

    run: str
    flags: str
    figure: str
    value: float
    source: str

    def predicted(self) -> float:
        """What the command prints for it."""
        text = report(make_plan(flag_parser().parse_args(self.flags.split())))
        found = re.search(FIGURES[self.figure][1], text, re.M)
        value = float(found[1].replace(",", ""))
        if self.figure == "failures":
            value *= 54
        return value * 60 if self.figure == "update" and found[0].endswith("min") else value


MEGATRON = "Narayanan et al. 2021, table 1"  # counts what is computed twice; plain DDP
KORTHIKANTI = "Korthikanti et al. 2022, table 5"
LLAMA_2 = "Touvron et al. 2023, table 2"
LLAMA_3 = "Llama team 2024, table 4"
TITAN_A100 = "torchtitan, docs/performance.md"
# Its H100 have 96 GB and 500 W; their peak lies between the SXM's 989 and the NVL's 835 TFLOP/s.
TITAN_H100 = "torchtitan, benchmarks/llama3_h100_202412"
H100_500W = "--gpu h100-80gb --gpu-memory 102GB --peak 912e12"

GIB = 2**30 / 1e9  # in GB

TENSOR_8 = "--gpu a100-80gb --tensor 8 --strategy ddp"
FSDP_A100 = "--gpu a100-80gb --nodes 8 --strategy fsdp --tensor 1 --pipeline 1 --grad-accum 1"
FSDP_H100 = (
    f"--model llama-3.1-8b {H100_500W} --seq-len 8192 --batch-size 2 --grad-accum 1 "
    "--strategy fsdp --tensor 1 --pipeline 1 --gradient-checkpointing selective"
)
LLAMA_405B = (
    "--model llama-3.1-405b --gpu h100-80gb --tensor 8 --pipeline 16 --seq-len 8192 "
    "--global-batch 16.8e6"
)

RUNS = [
    *(
        Published(
            f"GPT {name}, {8 * nodes:,} A100",
            f"--model gpt-{name.lower()} --nodes {nodes} --pipeline {stages} --global-batch "
            f"{2048 * batch} {TENSOR_8} --gradient-checkpointing full",
            "hardware", value, MEGATRON,
        )
        for name, nodes, stages, batch, value in (
            ("18B", 32, 1, 1024, 135), ("39B", 64, 2, 1536, 138), ("76B", 128, 4, 1792, 140),
            ("146B", 192, 8, 2304, 148), ("310B", 240, 16, 2160, 155), ("530B", 315, 35, 2520, 163),
            ("1T", 384, 64, 3072, 163),
        )
    ),
    Published(
        "GPT-3 175B, 1,024 A100, 300B tokens",
        f"--model gpt-3-175b --nodes 128 --pipeline 8 --tokens 300e9 --global-batch {2048 * 1536} "
        f"{TENSOR_8} --gradient-checkpointing full",
        "days", 34, "Narayanan et al. 2021, section 5.1",
    ),
    *(
        Published(
            f"GPT {name}, {gpus} A100, {how}, an update",
            f"--model gpt-{model} --nodes {gpus // 8} --pipeline {gpus // 8} --chunks {chunks} "
            f"--global-batch {2048 * gpus} --batch-size 1 {TENSOR_8} "
            f"--gradient-checkpointing {how}",
            "update", value, KORTHIKANTI,
        )
        for name, model, gpus, chunks, how, value in (
            ("175B", "3-175b", 64, 3, "selective", 13.75),
            ("530B", "530b", 280, 3, "selective", 37.83),
            ("1T", "1t", 512, 1, "selective", 71.49),
        )
    ),
    *(
        Published(
            f"Llama 2 {name}, 2T tokens",
            f"--model llama-2-{name.lower()} --gpu a100-80gb --nodes 128 --tokens 2e12",
            "hours", value, LLAMA_2,
        )
        for name, value in (("7B", 184_320), ("13B", 368_640), ("70B", 1_720_320))
    ),
    Published(
        "Llama 3 8B, 64 A100, selective", f"{FSDP_A100} --model llama-3.1-8b --batch-size 1 "
        "--seq-len 8192 --gradient-checkpointing selective", "speed", 2973, TITAN_A100,
    ),
    Published(
        "Llama 3 70B, 64 A100, full", f"{FSDP_A100} --model llama-3.1-70b --batch-size 1 "
        "--seq-len 8192 --gradient-checkpointing full", "speed", 331, TITAN_A100,
    ),
    Published(
        "Llama 2 13B, 64 A100, none", f"{FSDP_A100} --model llama-2-13b --batch-size 2 "
        "--gradient-checkpointing none", "speed", 2162, TITAN_A100,
    ),
    Published("Llama 3 405B, 8,192 H100", f"{LLAMA_405B} --nodes 1024", "model", 430, LLAMA_3),
    Published("Llama 3 405B, 16,384 H100", f"{LLAMA_405B} --nodes 2048", "model", 400, LLAMA_3),
    Published(
        "Llama 3 405B, 16,384 H100, 54 days", f"{LLAMA_405B} --nodes 2048", "failures", 419,
        "Llama team 2024, section 3.3.4",
    ),
    *(
        Published(
            f"Llama 3.1 8B, {8 * nodes} H100, {how}", f"{FSDP_H100} --nodes {nodes}", figure, value,
            TITAN_H100,
        )
        for nodes, how, figure, value in (
            (1, "selective", "speed", 5762), (1, "torch.compile", "speed", 6667),
            (1, "selective", "memory", 82.4 * GIB), (16, "selective", "speed", 5605),
            (16, "selective", "memory", 67.0 * GIB),
        )
    ),
    Published(
        "GPT-2 124M, 8 A100-40GB, 295B tokens",
        "--model gpt-2-124m --gpu a100-40gb --strategy ddp --batch-size 12 --grad-accum 5 "
        "--tokens 294.9e9", "days", 4, "nanoGPT, README",
    ),
]  # fmt: skip


def table() -> list[str]:
    """The rows of the wiki's table, in Markdown."""
    lines, sources = [], list(dict.fromkeys(one.source for one in RUNS))
    for one in RUNS:
        predicted, unit = one.predicted(), FIGURES[one.figure][0]
        figures = f"{predicted:,.4g} | {one.value:,.4g}"
        if max(predicted, one.value) > 9999:
            figures = f"{predicted:,.0f} | {one.value:,.0f}"
        number = sources.index(one.source) + 1
        lines.append(f"| {one.run}: {unit} [{number}] | {figures} | {predicted / one.value:.2f} |")
    return lines


# layers, width, heads; sequence, micro-batch, accumulation, tokens/s a GPU, full checkpointing
MPT = {
    "125M": (12, 768, 12), "350M": (24, 1024, 16), "760M": (24, 1536, 12), "1B": (24, 2048, 16),
    "3B": (32, 2560, 20), "7B": (32, 4096, 32), "13B": (40, 5120, 40), "30B": (48, 7168, 56),
}  # fmt: skip
SPEEDS = {  # on 8 GPUs, up to 8,192 tokens: llm-foundry, scripts/train/benchmarking/README.md
    "a100-80gb": {
        "125M": [(4096, 16, 2, 118396, 0), (2048, 32, 2, 141737, 0), (1024, 64, 2, 156468, 0)],
        "350M": [(4096, 16, 2, 49555, 0), (2048, 32, 2, 58782, 0), (1024, 64, 2, 64813, 0)],
        "760M": [(8192, 6, 2, 20933, 0), (4096, 12, 2, 27351, 0), (2048, 24, 2, 32434, 0)],
        "1B": [(8192, 3, 4, 13814, 0), (4096, 7, 4, 17807, 0), (2048, 14, 4, 20513, 0),
               (1024, 18, 4, 22112, 0)],
        "3B": [(8192, 3, 6, 7695, 0), (4096, 5, 6, 9457, 0), (2048, 10, 2, 10811, 0),
               (1024, 20, 6, 11580, 0)],
        "7B": [(8192, 8, 2, 3206, 1), (4096, 16, 2, 3684, 1), (2048, 6, 2, 4641, 0),
               (1024, 64, 2, 4357, 1)],
        "13B": [(8192, 5, 3, 1795, 1), (4096, 10, 3, 2060, 1), (2048, 2, 3, 2262, 0),
                (1024, 40, 3, 2330, 1)],
        "30B": [(8192, 1, 21, 574, 1), (4096, 1, 21, 814, 1), (2048, 3, 21, 916, 1),
                (1024, 6, 21, 946, 1)],
    },
    "h100-80gb": {
        "760M": [(8192, 6, 2, 41825, 0), (4096, 12, 2, 55459, 0), (1024, 48, 2, 78581, 0)],
        "1B": [(8192, 3, 4, 29157, 0), (4096, 7, 4, 38535, 0), (2048, 14, 1, 45455, 0),
               (1024, 18, 4, 48910, 0)],
        "3B": [(8192, 3, 6, 16578, 0), (4096, 5, 6, 20964, 0), (1024, 20, 6, 27046, 0)],
        "7B": [(8192, 8, 2, 6935, 1), (4096, 16, 2, 8611, 1), (2048, 6, 1, 10643, 0),
               (1024, 64, 2, 10203, 1)],
        "13B": [(4096, 10, 3, 4717, 1), (2048, 2, 1, 4792, 0), (1024, 40, 3, 5502, 1)],
        "30B": [(8192, 1, 21, 1384, 1), (4096, 1, 21, 1802, 1), (2048, 3, 21, 2002, 1),
                (1024, 6, 21, 2084, 1)],
    },
}  # fmt: skip


def by_width(gpu: str) -> dict[str, float]:
    """Predicted to published speed by model, the geometric mean over lengths."""
    ratios = {}
    for name, rows in SPEEDS[gpu].items():
        layers, width, heads = MPT[name]
        logs = []
        for length, batch, accum, published, again in rows:
            flags = (
                f"--model gpt-2-124m --d-model {width} --layers {layers} --heads {heads} --ffn "
                f"{4 * width} --vocab 50368 --seq-len {length} --batch-size {batch} --grad-accum "
                f"{accum} --strategy fsdp --tensor 1 --pipeline 1 --gpu {gpu} --gpu-memory 1TB "
                f"--gradient-checkpointing {'full' if again else 'none'}"
            )
            one = Published(name, flags, "speed", published, "llm-foundry")
            logs.append(math.log(one.predicted() / published))
        ratios[name] = math.exp(statistics.mean(logs))
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--flags", action="store_true", help="also the flags of each run")
    parser.add_argument("--widths", action="store_true", help="speeds by width")
    args = parser.parse_args()
    if args.widths:
        for gpu in SPEEDS:
            shown = ", ".join(f"{name} {ratio:.2f}" for name, ratio in by_width(gpu).items())
            print(f"{gpu}: predicted to published {shown}")
        return
    print("| run | predicted | published | ratio |\n|---|---|---|---|")
    for one, line in zip(RUNS, table()):
        print(line)
        if args.flags:
            print(f"    python -m labs.planner {one.flags}")
    for number, source in enumerate(dict.fromkeys(one.source for one in RUNS), 1):
        print(f"[{number}] {source}")


if __name__ == "__main__":
    main()
