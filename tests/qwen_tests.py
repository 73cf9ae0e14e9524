"""What the tests of --model qwen share: settings, small models with adapters, runs in this process.

Everything is offline: a small Qwen2 of random weights, and a tokenizer made here.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import warnings

import torch
import torch.nn.functional as F
from conftest import Finished, command, largest_difference, run_command
from qwen_assets import make_model
from safetensors.torch import load_file
from torch import nn

import llm_ddp_parallel_training as ddp

TEXTS = [
    "Each rank computes gradients on its own batch.",
    "A rank.",
    "What is a rank? A rank is one process of the group.\nIt has a number.",
    "The sampler gives every rank a different part of the data.",
    "ü – a system",
]
CHAT = {
    "messages": [
        {"role": "user", "content": "What is a rank?"},
        {"role": "assistant", "content": "A rank is one process.\n"},
        {"role": "user", "content": "And a group?"},
        {"role": "assistant", "content": "\n\nAll of them."},
    ],
    "tools": None,
}


def first_turns(chat: dict, count: int) -> dict:
    """A conversation up to a message."""
    return chat | {"messages": chat["messages"][:count]}


def settings_of(*flags: object) -> ddp.Settings:
    settings = ddp.parse_settings(["--model", "qwen", "--cpu", *map(str, flags)])
    settings.precision = "fp32" if settings.precision == "auto" else settings.precision
    return settings


def adapted(model, *flags, trained=True):
    """The model with LoRA as the script adds it; `trained`: B is no longer zero."""
    model = ddp.add_lora(model, settings_of("--lora-r", 4, "--lora-alpha", 8, *flags))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if trained and "lora_B" in name:
            nn.init.normal_(parameter, 0, 0.1)
    return model.train()


def lora_model(tokenizer, *flags, tied=True, trained=True):
    flags = flags or ("--lora-dropout", 0)
    return adapted(make_model(tokenizer, tied), *flags, trained=trained)


def batch_of(tokenizer, contents, *flags) -> dict:
    """Texts, conversations or lists of pieces as one batch."""
    return ddp.qwen_collator(tokenizer, settings_of(*flags))(list(enumerate(contents)))


def sample_of(tokenizer, content):
    """The only sample of a text or conversation: (ids, learned)."""
    [[sample]] = ddp.tokenize(tokenizer, [content], ddp.Counter())
    return sample


def loss_of(module, batch):
    return module(**ddp.inputs_of(batch, torch.device("cpu")))


def plain_loss(model, batch):
    """What transformers and PyTorch make of a padded batch, by way of all logits."""
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits.float()
    targets = batch["labels"][:, 1:].flatten()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets, ignore_index=ddp.IGNORE)


def gradients(module, loss):
    loss.backward()
    got = {n: p.grad.clone() for n, p in module.named_parameters() if p.requires_grad}
    module.zero_grad()
    return got


def assert_same(module, loss_a, loss_b, tolerance):
    """Both functions give the same loss, and the same gradients relative to the largest one."""
    a, b = loss_a(), loss_b()
    assert abs(a.item() - b.item()) <= tolerance
    grad_a, grad_b = gradients(module, a), gradients(module, b)
    scale = max(float(g.abs().max()) for g in grad_a.values())
    assert scale > 0
    assert largest_difference(grad_a, grad_b) <= tolerance * max(scale, 1)


def kept_bytes(function):
    """Bytes of what a forward pass keeps for the backward pass, parameters included."""
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor  # held, so no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def built(base, *flags):
    """A run as `main` makes it."""
    settings, launch = settings_of("--base-model", base, *flags), ddp.Launch()
    return ddp.build_qwen(launch, settings), launch, settings


def run_here(*flags) -> Finished:
    """The script's main() in this process: one rank, on the CPU. Warnings go to `err`."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    main = ddp.main.__wrapped__  # without torchrun's @record
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        with warnings.catch_warnings(record=True) as warned:
            warnings.resetwarnings()
            for quiet in (DeprecationWarning, PendingDeprecationWarning, ResourceWarning):
                warnings.simplefilter("ignore", quiet)  # as Python does outside of tests
            try:
                main(["--model", "qwen", "--cpu", "--threads", "1", *map(str, flags)])
            except SystemExit as ending:
                status = ending.code
    shown = "".join(f"{w.category.__name__}: {w.message}\n" for w in warned)
    return Finished(status, out.getvalue(), shown + err.getvalue())


def here(folder, *flags) -> Finished:
    """Such a run, into a folder, that must succeed."""
    finished = run_here("--output-dir", folder, *flags)
    assert finished.status == 0, finished.out + finished.err
    return finished


def launch(ranks, folder, *flags, **options) -> Finished:
    """A run under the launcher that must succeed."""
    args = command(ranks, "--model", "qwen", "--cpu", "--output-dir", folder, *flags)
    finished = run_command(args, **options)
    assert finished.status == 0, finished.out + finished.err
    return finished


def adapter_of(folder):
    return load_file(folder / "adapter/adapter_model.safetensors")


def adapter_digest(folder):
    """The digest that a run prints, computed from the file that it wrote."""
    tensors = {
        "model." + name.replace(".weight", ".default.weight"): tensor
        for name, tensor in adapter_of(folder).items()
    }
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def quiet(err):
    """Nothing on standard error but torchrun's note on OMP_NUM_THREADS."""
    return not any(word in err for word in ("Warning", "warning:", "TOKENIZERS", "Traceback"))
