"""Chat templates of the kinds that models have, all for the test tokenizer."""

from __future__ import annotations

from qwen_assets import TEMPLATE, make_tokenizer

PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"

# As Qwen2.5: it only appends, and marks nothing.
CHATML = TEMPLATE

# It says itself what is the assistant's; the note before an answer is not.
MARKING = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n(note)\n"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n"
    "{% else %}" + TURN + "{% endif %}{% endfor %}" + PROMPT
)  # fmt: skip

# The same, but the end of the turn stands outside of its mark.
MARKING_LESS = MARKING.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")

# Reasoning models: the thoughts of earlier turns are left out, and the prompt opens new ones.
REWRITING = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' }}"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)

# EOS stands once, behind all of the conversation.
CLOSING_ONCE = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<|user|>\n' + m.content + '<|end|>\n' }}"
    "{% elif m.role == 'assistant' %}{{ '<|assistant|>\n' + m.content + '<|end|>\n' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)

# A turn ends where the next one begins: <|endoftext|> opens one.
OPENING = (
    "{% for m in messages %}<|endoftext|>{{ m.role }}\n{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|endoftext|>assistant\n{% endif %}"
)

# The header of an answer ends in a blank, which the tokenizer joins with the first word.
BLANK = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

# Nothing but letters closes an answer.
NEVER_CLOSING = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}" + (
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}" + TURN + "{% endfor %}" + PROMPT
)

USABLE = {
    "chatml": CHATML, "marking": MARKING, "marking less": MARKING_LESS, "rewriting": REWRITING,
    "closing once": CLOSING_ONCE, "opening": OPENING, "blank": BLANK, "strict": STRICT,
}  # fmt: skip


def tokenizer_with(template: str | None):
    """The test tokenizer with another chat template."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return tokenizer
