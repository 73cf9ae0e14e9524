"""The model and the run that the flags describe."""

from __future__ import annotations

import argparse
import dataclasses

from labs.planner.machines import machine_of
from labs.planner.models import MODELS, Model, PlanError, model_of_size, tiny_model
from labs.planner.runs import Run


def read_model(args: argparse.Namespace) -> Model:
    """The model that the flags describe. Raises `PlanError` where they contradict each other."""
    if args.params and args.model:
        raise PlanError("--params contradicts --model; give one of them")
    if args.model == "tiny":
        width, layers, heads = args.d_model or 64, args.layers or 1, args.heads or 4
        model = tiny_model(width, layers, heads, args.seq_len or 64)
    elif args.params:
        model = model_of_size(args.params, args.vocab or 32000)
    else:
        model = MODELS["qwen2.5-0.5b" if args.model == "qwen" else args.model]
    given = {
        "width": args.d_model, "layers": args.layers, "heads": args.heads, "ffn": args.ffn,
        "vocab": args.vocab, "kv_heads": args.kv_heads,
    }  # fmt: skip
    if args.heads and model.kv_heads == model.heads:
        given["kv_heads"] = args.kv_heads or args.heads
    model = dataclasses.replace(model, **{k: v for k, v in given.items() if v})
    for what, count in (("heads", model.heads), ("key-value heads", model.kv_heads)):
        if args.tensor and count % args.tensor:
            raise PlanError(
                f"--tensor {args.tensor} does not divide the {count} {what} of the model; "
                "possible: " + ", ".join(str(t) for t in range(1, count + 1) if count % t == 0)
            )
    if model.width % model.heads:
        raise PlanError(f"--heads {model.heads} does not divide --d-model {model.width}")
    if model.heads % model.kv_heads:
        raise PlanError(f"--kv-heads {model.kv_heads} does not divide --heads {model.heads}")
    return model


def read_run(args: argparse.Namespace) -> Run:
    """The run that the flags describe, with a micro-batch of 1; fills in the defaults in `args`."""
    if not args.model and not args.params:
        args.model = "tiny"
    if args.data and args.tokens:
        raise PlanError("--data contradicts --tokens; give one of them")
    args.exact = args.model in ("tiny", "qwen")  # the run as it is, not as it could be
    model = read_model(args)
    usual = {"tiny": 64, "qwen": 256}.get(args.model) or model.positions or 4096
    args.seq_len = args.seq_len or usual
    args.bytes_per_token = args.bytes_per_token or (1.0 if args.model == "tiny" else 4.0)
    if args.exact:
        args.batch_size, args.grad_accum = args.batch_size or 8, args.grad_accum or 1
        args.tensor, args.pipeline = args.tensor or 1, args.pipeline or 1
    args.strategy = args.strategy or ("ddp" if args.exact else "auto")
    args.lora_r = args.lora_r or (8 if args.model == "qwen" else 0)
    if args.model == "tiny" and (args.lora_r or args.gradient_checkpointing):
        raise PlanError("--lora-r and --gradient-checkpointing need another model than tiny")
    if args.chunks and args.chunks * (args.pipeline or 1) > model.layers:
        raise PlanError(f"--chunks {args.chunks}: there are not so many layers on a pipeline rank")

    name = args.gpu or ("cpu" if args.exact else "a100-80gb")
    instead = {n: getattr(args, n) for n in ("network", "peak", "share")}
    per_node = args.gpus_per_node or (1 if args.exact else 8)
    machine = machine_of(name, args.nodes, per_node, memory=args.gpu_memory, **instead)
    mixed = args.precision in ("bf16", "fp16") or (args.precision == "auto" and name != "cpu")
    mixed = mixed and args.model != "tiny"  # whose activations count in fp32
    targets = tuple(part.strip() for part in args.lora_targets.split(",") if part.strip())
    if args.lora_r:
        model.lora(args.lora_r, targets)  # names wrong targets
    if args.strategy == "hsdp" and (args.nodes == 1 or machine.gpus_per_node == 1):
        raise PlanError(
            "--strategy hsdp divides a replica among the GPUs of a node and copies it across "
            "nodes: give more than one of both"
        )
    given = {name: getattr(args, name) for name in ("lora_r", "jitter", "overlap", "read_rate")}
    given |= {"mixed": mixed, "lora_targets": targets}
    given |= {"dropout": args.dropout > 0, "saving": args.save_every > 0}
    return Run(model, machine, args.seq_len, batch=1, **given)
