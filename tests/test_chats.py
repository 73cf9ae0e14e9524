"""What of a conversation is learned: with every kind of record, and every kind of chat template."""

from __future__ import annotations

import json
from collections import Counter
from itertools import compress

import pytest
from qwen_assets import make_tokenizer
from templates import (
    BLANK,
    CHATML,
    CLOSING_ONCE,
    MARKING,
    MARKING_LESS,
    NEVER_CLOSING,
    OPENING,
    REWRITING,
    STRICT,
    USABLE,
    tokenizer_with,
)

import llm_ddp_parallel_training as ddp
from llm_ddp_parallel_training import APPENDED, MARKED, ONE_BY_ONE, UserError


def says(role: str, content: object, **more: object) -> dict:
    return {"role": role, "content": content} | more


CHAT = [
    says("user", "What is a rank?"),
    says("assistant", "A rank is one process.\n"),
    says("user", "And a group?"),
    says("assistant", "\n\nAll of them."),
]
SHORT = [says("user", "Q"), says("assistant", "A"), says("user", "Q2"), says("assistant", "A2")]
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "Weather"}}]
WEATHER = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Rome"}}}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def samples_of(tokenizer, messages: list[dict], tools: object = None) -> tuple[str, list]:
    """The rule that found the answers, and for each sample its text and what of it is learned."""
    record = ddp.read_record(json.loads(json.dumps({"messages": messages, "tools": tools})))
    counts = Counter()
    [row] = ddp.tokenize(tokenizer, [record], counts)
    rules = [rule for rule in ddp.ANSWERS_FOUND if counts[rule]]
    assert len(rules) <= 1 and counts[rules[0] if rules else ""] == (len(row) if rules else 0)
    return rules[0] if rules else "", [
        (tokenizer.decode(ids), tokenizer.decode([*compress(ids, learned)])) for ids, learned in row
    ]


def learned_of(template: str, messages: list[dict], rule: str) -> list[str]:
    """What is learned of each sample; the answers must be found by this rule."""
    found, samples = samples_of(tokenizer_with(template), messages)
    assert found == rule
    return [learned for _, learned in samples]


# What is learned


def test_only_the_assistant_is_learned_including_its_end_of_turn(tokenizer):
    [[(ids, learned)]] = ddp.tokenize(tokenizer, [ddp.read_record({"messages": CHAT})], Counter())
    expected = "A rank is one process.\n<|im_end|>\n\nAll of them.<|im_end|>"
    assert tokenizer.decode([*compress(ids, learned)]) == expected
    assert ids == tokenizer.apply_chat_template(CHAT, tokenize=True)["input_ids"]


def test_an_answer_that_is_also_in_the_question_is_learned_only_as_the_answer(tokenizer):
    twice = [says("user", "rank"), says("assistant", "rank")]
    _, [(text, learned)] = samples_of(tokenizer, twice)
    assert text.count("rank") == 2 and learned == "rank<|im_end|>"


@pytest.mark.parametrize("content", ["null", "absent", "empty", "some"])
@pytest.mark.parametrize("arguments", ["object", "string"])
def test_a_tool_call_is_learned_and_the_tools_are_shown(tokenizer, content, arguments):
    call = json.loads(json.dumps(WEATHER))
    if arguments == "string":
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    calling = {"role": "assistant", "tool_calls": [call]}
    calling |= {"null": {"content": None}, "empty": {"content": ""}, "absent": {}}.get(
        content, {"content": "I look."}
    )
    messages = [
        says("user", "Weather in Rome?"),
        calling,
        says("tool", '{"t": 21}', name="get_weather"),
        says("assistant", "It is 21 degrees."),
    ]
    rule, [(text, learned)] = samples_of(tokenizer, messages, TOOLS)
    said = "I look.\n" if content == "some" else ""
    assert learned == (
        f'{said}<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "Rome"}}}}\n'
        "</tool_call><|im_end|>It is 21 degrees.<|im_end|>"
    )
    assert f"<tools>\n{json.dumps(TOOLS[0])}\n</tools>" in text
    assert '<tool_response>\n{"t": 21}\n</tool_response>' in text
    assert rule == APPENDED


def test_answers_without_weight_are_read_but_not_learned(tokenizer):
    messages = [
        says("user", "1"), says("assistant", "no", weight=0),
        says("user", "2"), says("assistant", "yes", weight=1),
        says("user", "3"), says("assistant", "never", train=False),
        says("user", "4"), says("assistant", "sure", train=True, weight=None),
        says("user", "5"), says("assistant", "good", train=None),
    ]  # fmt: skip
    _, [(text, learned)] = samples_of(tokenizer, messages)
    assert learned == "yes<|im_end|>sure<|im_end|>good<|im_end|>"
    assert "no<|im_end|>" in text and "never<|im_end|>" in text
    bare = [{name: m[name] for name in ("role", "content")} for m in messages]
    assert text == tokenizer.apply_chat_template(bare, tokenize=False)
    # One answer a sample: those that are not learned are no samples.
    assert learned_of(REWRITING, messages[:4], ONE_BY_ONE) == ["yes<|im_end|>"]


def test_a_conversation_may_begin_with_the_assistant_or_let_it_speak_twice(tokenizer):
    begins = [says("assistant", "Hello!"), says("user", "Q"), says("assistant", "A")]
    twice = [says("user", "Q"), says("assistant", "one"), says("assistant", "two")]
    for messages, expected in (
        (begins, "Hello!<|im_end|>A<|im_end|>"),
        (begins[:1], "Hello!<|im_end|>"),
        (twice, "one<|im_end|>two<|im_end|>"),
    ):
        rule, [(text, learned)] = samples_of(tokenizer, messages)
        assert (rule, learned) == (APPENDED, expected)
        assert text == tokenizer.apply_chat_template(messages, tokenize=False)
        assert "".join(learned_of(MARKING, messages, MARKED)) == expected
        _, samples = samples_of(tokenizer_with(REWRITING), messages)
        assert "".join(learned for _, learned in samples) == expected


def test_a_conversation_without_an_answer_teaches_nothing(tokenizer):
    rule, [(_, learned)] = samples_of(tokenizer, CHAT[:1])
    assert (rule, learned) == ("", "")


# Templates


def test_a_template_that_marks_the_assistant_is_believed():
    expected = "A<|im_end|>A2<|im_end|>"
    assert learned_of(MARKING, SHORT, MARKED) == [expected]  # and not the "(note)"
    assert learned_of(MARKING_LESS, SHORT, MARKED) == [expected]
    assert learned_of(MARKING, [SHORT[0], says("assistant", "😀é")], MARKED) == ["😀é<|im_end|>"]
    # Marks that leave out an answer are no help.
    only_last = MARKING.replace(
        "m.role == 'assistant' %}", "m.role == 'assistant' and loop.last %}"
    )
    rule, samples = samples_of(tokenizer_with(only_last), SHORT)
    assert rule != MARKED and [s[1].strip() for s in samples] == ["A<|im_end|>", "A2<|im_end|>"]


def test_a_template_that_rewrites_history_gives_one_sample_an_answer():
    first, second = "<think>\nr\n</think>one", "<think>\ns\n</think>two"
    messages = [SHORT[0], says("assistant", first), SHORT[2], says("assistant", second)]
    tokenizer = tokenizer_with(REWRITING)
    rule, samples = samples_of(tokenizer, messages)
    assert rule == ONE_BY_ONE
    for (text, learned), upto, answer in zip(samples, (1, 3), ("one", "two"), strict=True):
        asked = tokenizer.apply_chat_template(
            messages[:upto], tokenize=False, add_generation_prompt=True
        )
        assert learned == f"{'rs'[upto > 1]}\n</think>{answer}<|im_end|>"
        assert text.rstrip("\n") == asked + learned
    assert "<|im_start|>assistant\none<|im_end|>" in samples[1][0]  # the model sees it like this


@pytest.mark.parametrize("answer", ["A", "<p>A", "<think>", "<", "think", "", "é", " A"])
def test_no_letter_of_an_answer_is_lost_beside_what_the_prompt_opens(answer):
    expected = answer.removeprefix("<think>") + "<|im_end|>"
    messages = [SHORT[0], says("assistant", answer)]
    assert learned_of(REWRITING, messages, ONE_BY_ONE) == [expected]


def test_a_template_that_closes_only_once_gives_one_sample_an_answer():
    assert learned_of(CLOSING_ONCE, SHORT[:2], APPENDED) == ["A<|end|>\n<|im_end|>"]
    tokenizer = tokenizer_with(CLOSING_ONCE)
    rule, samples = samples_of(tokenizer, SHORT)
    assert rule == ONE_BY_ONE
    assert [learned for _, learned in samples] == ["A<|end|>\n<|im_end|>", "A2<|end|>\n<|im_end|>"]
    asked = tokenizer.apply_chat_template(SHORT[:3], tokenize=False, add_generation_prompt=True)
    assert samples[1][0].startswith(asked)


def test_a_turn_that_ends_where_the_next_one_begins_is_learned_with_that_beginning():
    assert learned_of(OPENING, SHORT, APPENDED) == ["A\n<|endoftext|>A2\n<|endoftext|>"]
    assert learned_of(OPENING, SHORT[:3], APPENDED) == ["A\n<|endoftext|>"]
    tokenizer = tokenizer_with(OPENING)
    ends = tokenizer.convert_ids_to_tokens(ddp.end_tokens(tokenizer, chat=True))
    assert sorted(ends) == ["<|endoftext|>", "<|im_end|>"]


def test_the_first_word_of_an_answer_is_learned_behind_a_blank():
    messages = [says("user", "Q"), says("assistant", "rank group"), *SHORT[2:]]
    expected = "rank group<|im_end|>A2<|im_end|>"
    assert learned_of(BLANK, messages, APPENDED) == [expected]


@pytest.mark.parametrize("name", USABLE)
def test_what_is_learned_follows_the_tokens_that_the_model_is_asked_with(name):
    """A prompt is tokenized alone; the tokens before an answer must be the same ones."""
    tokenizer = tokenizer_with(USABLE[name])
    for answer in ("rank", "a process.\n", "üñ", "<p>"):
        [row] = ddp.tokenize(
            tokenizer,
            [{"messages": [SHORT[0], says("assistant", answer)], "tools": None}],
            Counter(),
        )
        (ids, learned) = row[0]
        asked = tokenizer.apply_chat_template(SHORT[:1], tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(asked, add_special_tokens=False)["input_ids"]
        begin = learned.index(True)
        assert ids[: len(prompt)] == prompt
        assert tokenizer.decode(ids[len(prompt) : begin]) in ("", "(note)\n")
        assert learned[begin:] == sorted(learned[begin:], reverse=True)  # one stretch
        [*_, last] = compress(ids, learned)
        assert last in ddp.end_tokens(tokenizer, chat=True)


@pytest.mark.parametrize("name", USABLE)
def test_generation_ends_at_special_tokens_and_never_at_a_letter(name):
    tokenizer = tokenizer_with(USABLE[name])
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    for chat in (True, False):
        ends = ddp.end_tokens(tokenizer, chat)
        assert tokenizer.eos_token_id in ends and set(ends) <= special


def test_an_end_of_turn_that_is_not_the_eos_is_learned_and_nothing_behind_it():
    tokenizer = make_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") not in tokenizer.all_special_ids
    _, [(_, learned)] = samples_of(tokenizer, CHAT[:2])
    assert learned == "A rank is one process.\n<|im_end|>"
    close, eos = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert ddp.end_tokens(tokenizer, chat=False) == [eos]
    assert ddp.end_tokens(tokenizer, chat=True) == sorted([close, eos])


# What is refused, and what is said


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (None, SHORT, "needs a tokenizer with a chat template"),
        (STRICT, [SHORT[1], SHORT[0]], "roles must alternate"),
        (STRICT, [SHORT[0], SHORT[1], SHORT[1]], "roles must alternate"),
        ("{{ messages[0].nothing.there }}", SHORT, "the chat template refuses the record"),
        ("{% broken", SHORT, "the chat template refuses the record"),
        (NEVER_CLOSING, SHORT, "with no special token"),
    ],
    ids=["none", "begins wrong", "twice", "missing", "no template", "never closes"],
)
def test_one_odd_record_is_refused_by_its_line(tmp_path, template, messages, reason):
    path = tmp_path / "chat.jsonl"
    rows = [{"text": "plain"}, {"text": "text"}, {"messages": messages}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    flags = ["--model", "qwen", "--cpu", "--corpus-file", str(path), "--val-fraction", "0"]
    with pytest.raises(UserError) as error:
        ddp.build_data(ddp.parse_settings(flags), tokenizer_with(template))
    assert str(error.value).startswith(f"{path}, line 3: ") and reason in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("template", "rule", "samples"),
    [(CHATML, APPENDED, 5), (MARKING, MARKED, 5), (REWRITING, ONE_BY_ONE, 10)],
    ids=["appended", "marked", "one by one"],
)
def test_the_header_says_how_answers_were_found_and_in_how_many_samples(
    tmp_path, template, rule, samples
):
    path = tmp_path / "chat.jsonl"
    rows = [{"messages": SHORT}] * 5 + [{"text": "plain"}, {"messages": SHORT[:1]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    flags = ["--model", "qwen", "--cpu", "--corpus-file", str(path), "--val-fraction", "0"]
    data = ddp.build_data(ddp.parse_settings(flags), tokenizer_with(template))
    assert f"{rule}: {samples} samples" in data.summary
    assert sum(other in data.summary for other in ddp.ANSWERS_FOUND) == 1
    assert "1 without a token to predict left out" in data.summary
    assert len(data.train) == samples + 1 and data.chat


def test_tools_that_a_template_ignores_are_counted(tmp_path):
    path = tmp_path / "chat.jsonl"
    rows = [{"messages": SHORT, "tools": TOOLS}] * 3 + [{"messages": SHORT}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    flags = ["--model", "qwen", "--cpu", "--corpus-file", str(path)]
    data = ddp.build_data(ddp.parse_settings(flags), tokenizer_with(STRICT))
    assert "tools that the chat template ignores: 3 samples" in data.summary
    data = ddp.build_data(ddp.parse_settings(flags), tokenizer_with(CHATML))
    assert "ignores" not in data.summary
