"""What a run with LoRA leaves behind: the adapter and the merged model, as others load them."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from conftest import clean_environment, run_command
from qwen_assets import make_tokenizer, save_folder
from qwen_tests import TEXTS, adapted, lora_model, sample_of, settings_of
from safetensors.torch import load_file, save_file
from torch import nn

import llm_ddp_parallel_training as ddp

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


FRESH_PROCESS = """
import socket, sys, warnings
def no(*args): raise SystemExit("network used")
socket.socket.connect = socket.getaddrinfo = no
warnings.simplefilter("ignore", FutureWarning)  # PEFT uses a name that transformers renamed
import torch, transformers
transformers.logging.disable_progress_bar()
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
base, run = sys.argv[1:]
want = load_file(f"{run}/want.safetensors")
plain = AutoModelForCausalLM.from_pretrained(base)
loaded = {
    "auto": AutoPeftModelForCausalLM.from_pretrained(f"{run}/adapter"),
    "peft": PeftModel.from_pretrained(plain, f"{run}/adapter"),
    "merged": AutoModelForCausalLM.from_pretrained(f"{run}/merged"),
}
for name, model in loaded.items():
    with torch.no_grad():
        print(name, float((model.eval()(want["ids"]).logits - want["logits"]).abs().max()))
for folder in ("adapter", "merged"):
    assert AutoTokenizer.from_pretrained(f"{run}/{folder}").chat_template
"""


def write_results(model, tokenizer, folder, chat):
    for name, write in ddp.qwen_results(model, tokenizer, chat).items():
        ddp.write_whole(folder / name, write)


def logits_of(model, ids):
    with torch.no_grad():
        return model.eval()(ids).logits


def test_adapter_and_merged_model_give_the_same_logits_in_a_fresh_process(tmp_path, small_qwen):
    settings = settings_of("--base-model", small_qwen, "--lora-r", 4, "--merge")
    base, tokenizer = ddp.load_base(settings)
    model = adapted(base, "--lora-dropout", 0)
    ids = torch.tensor([sample_of(tokenizer, TEXTS[2])[0]])
    want = logits_of(model, ids)
    with model.disable_adapter():
        assert (logits_of(model, ids) - want).abs().max() > 0.1
    save_file({"ids": ids, "logits": want}, tmp_path / "want.safetensors")
    numbers = sum(p.numel() for p in model.parameters() if p.requires_grad)
    write_results(model, tokenizer, tmp_path, chat=True)

    file = tmp_path / "adapter/adapter_model.safetensors"
    tensors = load_file(file)
    assert all("lora_" in name for name in tensors)
    assert sum(t.numel() for t in tensors.values()) == numbers
    assert 0 <= file.stat().st_size - 4 * numbers < 4096  # the rest is the header
    assert not list((tmp_path / "merged").glob("adapter*"))

    args = [sys.executable, "-c", FRESH_PROCESS, str(small_qwen), str(tmp_path)]
    environment = clean_environment(OMP_NUM_THREADS="1")  # as here: sums have one order
    fresh = run_command(args, cwd=tmp_path, env=environment)
    assert fresh.status == 0 and fresh.err == "", fresh.err
    differences = {line.split()[0]: float(line.split()[1]) for line in fresh.out.splitlines()}
    assert differences.keys() == {"auto", "peft", "merged"}
    assert differences["auto"] <= 1e-6 and differences["peft"] <= 1e-6
    assert differences["merged"] <= 1e-4


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_merged_model_is_right_with_tied_and_untied_heads(tmp_path, tied):
    from transformers import AutoModelForCausalLM

    settings = settings_of("--base-model", save_folder(tmp_path / "base", tied), "--merge")
    base, tokenizer = ddp.load_base(settings)
    model = adapted(base, "--lora-dropout", 0)
    ids = torch.tensor([sample_of(tokenizer, TEXTS[2])[0]])
    want = logits_of(model, ids)
    write_results(model, tokenizer, tmp_path, chat=False)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert (logits_of(merged, ids) - want).abs().max() <= 1e-4
    assert (merged.lm_head.weight is merged.model.embed_tokens.weight) == tied


def test_a_half_precision_base_is_merged_in_fp32_and_rounded_once(tmp_path, small_qwen):
    settings = settings_of("--base-model", small_qwen, "--merge", "--precision", "bf16")
    base, tokenizer = ddp.load_base(settings)
    model = adapted(base, "--lora-dropout", 0)
    layer = model.get_base_model().model.layers[1].self_attn.q_proj
    lora_a, lora_b = (m["default"].weight.detach() for m in (layer.lora_A, layer.lora_B))
    want = (layer.base_layer.weight.float() + 8 / 4 * lora_b @ lora_a).to(torch.bfloat16)
    write_results(model, tokenizer, tmp_path, chat=False)
    merged = load_file(tmp_path / "merged/model.safetensors")
    assert {t.dtype for t in merged.values()} == {torch.bfloat16}
    assert torch.equal(merged["model.layers.1.self_attn.q_proj.weight"], want)


def test_a_merged_chat_model_stops_where_the_training_ended_a_turn(tmp_path, small_qwen):
    settings = settings_of("--base-model", small_qwen, "--merge")
    base, _ = ddp.load_base(settings)
    base.generation_config.eos_token_id = [5, 7]
    tokenizer = make_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"  # and a turn ends in <|im_end|>
    close, eos = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    write_results(adapted(base), tokenizer, tmp_path, chat=True)
    saved = json.loads((tmp_path / "merged/generation_config.json").read_text("utf-8"))
    assert set(saved["eos_token_id"]) == {5, 7, close, eos}  # the base's own stay


def test_answers_are_repeatable_and_leave_the_model_in_training_mode(tokenizer):
    model = lora_model(tokenizer)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, 0, 1.0)
    ask = ("What is a rank?", True)
    base, new = (ddp.qwen_answer(model, tokenizer, *ask, base=b, length=12) for b in (True, False))
    assert base != new and model.training
    assert ddp.qwen_answer(model, tokenizer, *ask, base=True, length=12) == base
