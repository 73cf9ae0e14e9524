"""Offline stand-ins for Qwen2.5: a byte-level BPE tokenizer and Qwen2 models of random weights."""

from __future__ import annotations

import json
import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported; launches inherit it

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# As Qwen2.5 renders a chat: a default system prompt, tools in the system's turn, calls of the
# assistant and answers of tools in tags, and no mark of what is generated.
TEMPLATE = """\
{%- set begin, end = '<|im_start|>', '<|im_end|>\\n' %}
{%- set own = messages[0].role == 'system' %}
{{- begin ~ 'system\\n' ~ (messages[0].content if own else 'You are a helpful assistant.') }}
{%- if tools %}
    {{- '\\n\\n# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' ~ tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\n\\nCall one within <tool_call></tool_call> tags.' }}
{%- endif %}
{{- end }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- begin ~ 'user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- end }}{%- endif %}
    {%- elif message.role == 'assistant' and message.tool_calls %}
        {{- begin ~ 'assistant' }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls %}
            {%- set call = call.function or call %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments | tojson ~ '}\\n</tool_call>' }}
        {%- endfor %}
        {{- end }}
    {%- elif not (message.role == 'system' and loop.first) %}
        {{- begin ~ message.role + '\\n' + message.content + end }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- begin ~ 'assistant\\n' }}{%- endif %}
"""
CORPUS = [
    "Each rank computes gradients on its own batch, and an all-reduce averages them.",
    "The sampler gives every rank a different part of the data.",
    "What is a rank? A rank is one process of the group.\nIt has a number.",
    "a system prompt, a user, an assistant: You are a helpful assistant.",
]


def make_tokenizer() -> Qwen2Tokenizer:
    """A byte-level BPE tokenizer with Qwen's special tokens, trained on a few sentences."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    bpe.train_from_iterator(CORPUS * 4, trainer)
    model = json.loads(bpe.to_str())["model"]
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in model["merges"]]
    tokenizer = Qwen2Tokenizer(
        vocab=model["vocab"], merges=merges, unk_token=None, eos_token="<|im_end|>",
        pad_token="<|endoftext|>", extra_special_tokens=["<|im_start|>"], model_max_length=32768,
    )  # fmt: skip
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(tokenizer: Qwen2Tokenizer, tied: bool = True) -> Qwen2ForCausalLM:
    """A two-layer Qwen2 (hidden 32, 4 heads, 2 key/value heads), in eval mode as when loaded."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer) + 13,  # Qwen's table is longer than its tokenizer
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=tied,
        bos_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.pad_token_id,
        pad_token_id=None, attn_implementation="sdpa",
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():  # larger weights than the default, so that mistakes show
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
    return model.eval()


def save_folder(path: Path, tied: bool = True) -> Path:
    """Such a model with its tokenizer as a folder for --base-model."""
    transformers.logging.disable_progress_bar()
    tokenizer = make_tokenizer()
    make_model(tokenizer, tied).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def full_config(layers: int = 24) -> Qwen2Config:
    """The architecture of Qwen2.5-0.5B-Instruct."""
    return Qwen2Config(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=layers,
        num_attention_heads=14, num_key_value_heads=2, max_position_embeddings=32768,
        rope_parameters={"rope_theta": 1000000.0, "rope_type": "default"}, rms_norm_eps=1e-6,
        tie_word_embeddings=True, attn_implementation="sdpa",
    )  # fmt: skip
