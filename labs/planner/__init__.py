"""Memory, time, scaling and checkpoints of a training run, before it is paid for.

The exercise: 13 billion parameters, 200 GB of text, 4 nodes of 8 A100:

    python -m labs.planner --params 13e9 --data 200GB --gpu a100-80gb --nodes 4 --gpus-per-node 8

Runs of llm_ddp_parallel_training.py by its own flags:

    python -m labs.planner --model tiny --d-model 256 --layers 4 --seq-len 256 --batch-size 16
    python -m labs.planner --model qwen --batch-size 4 --seq-len 256 --gpu t4-16gb

Other models by name, with LoRA or in full; for programs, and as a picture:

    python -m labs.planner --model llama-3.1-8b --tokens 10e9 --gpu h100-80gb --nodes 2
    python -m labs.planner --model qwen2.5-0.5b --lora-r 8 --gpu rtx-4090-24gb --json
    python -m labs.planner --params 13e9 --gpu a100-80gb --nodes 4 --picture memory.png

It needs Python alone: no torch, no GPU (matplotlib for the picture). Every figure that is an
assumption and not arithmetic has a flag. Read it in this order: models, machines, runs; memory;
time; faults; choose. The other files hold no physics.
"""

from labs.planner.flags import flag_parser
from labs.planner.machines import GPUS
from labs.planner.models import MODELS, PlanError
from labs.planner.plan import make_plan
from labs.planner.read import read_run
from labs.planner.runs import Layout, Run
from labs.planner.time import flops_per_token

__all__ = [
    "GPUS", "MODELS", "Layout", "PlanError", "Run", "flag_parser", "flops_per_token", "make_plan",
    "read_run",
]  # fmt: skip
