"""Records in the shapes that people have: what each becomes, and how a wrong one is named."""

from __future__ import annotations

import json

import pytest
from conftest import main_here, settings_of
from corpora import refusal, texts_of

import llm_ddp_parallel_training as ddp

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Say"},
    {"role": "assistant", "content": "y"},
]
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "Weather"}}]
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Rome"}}}
TEXT = {"text": "one\ntwo"}


def read(record: object) -> object:
    """What a line with this record becomes."""
    return ddp.read_record(json.loads(json.dumps(record)))


def lines(*records: object) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


# Shapes

SHAPES = {
    "messages": {"messages": CHAT},
    "prompt and completion": {"system": "Be brief.", "prompt": "Say", "completion": "y"},
    "prompt and completion, lists": {"prompt": CHAT[:2], "completion": CHAT[2:]},
    "conversations": {
        "conversations": [
            {"from": "system", "value": "Be brief."},
            {"from": "human", "value": "Say"},
            {"from": "gpt", "value": "y"},
        ]
    },
    "conversations, other names": {
        "system": "Be brief.",
        "conversations": [{"from": "user", "value": "Say"}, {"from": "assistant", "value": "y"}],
    },
    "instruction": {"system": "Be brief.", "instruction": "Say", "input": "", "output": "y"},
    "instruction without input": {"system": "Be brief.", "instruction": "Say", "output": "y"},
    "nulls beside it": {"text": None, "messages": CHAT, "prompt": None, "tools": None},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_becomes_the_same_conversation(shape):
    assert read(SHAPES[shape]) == {"messages": CHAT, "tools": None}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_tiny_model_reads_what_is_said(tmp_path, shape):
    (path := tmp_path / "c.jsonl").write_text(lines(*[SHAPES[shape]] * 3), encoding="utf-8")
    built = ddp.build_data(settings_of("--corpus-file", path, "--pack", "--val-fraction", 0))
    tokens = b"Be brief.\nSay\ny"
    _, window = built.train[0]
    assert bytes(t for t in window.tolist() if t < 256) == (tokens * 3)[:64]
    assert not built.chat  # nothing is masked


@pytest.mark.parametrize("how", ["", "--overlong split", "--overlong drop", "--pack", "--dry-run"])
def test_the_tiny_model_trains_on_chats_whatever_becomes_of_long_ones(tmp_path, how):
    (path := tmp_path / "c.jsonl").write_text(lines(*SHAPES.values()), encoding="utf-8")
    flags = (*how.split(), "--corpus-file", path, "--max-steps", 1, "--output-dir", tmp_path / "r")
    finished = main_here("--cpu", *flags)
    assert finished.status == 0, finished.err
    assert how != "--dry-run" or "[[Be brief.\nSay\ny]]" in finished.out


def test_an_instruction_with_an_input_asks_both():
    record = read({"instruction": "Translate.", "input": "Hallo", "output": "Hello"})
    assert [m["content"] for m in record["messages"]] == ["Translate.\n\nHallo", "Hello"]


def test_text_is_text():
    assert read(TEXT) == "one\ntwo"
    assert read(TEXT | {"id": 7, "tools": None}) == "one\ntwo"


def test_parts_of_text_are_joined():
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    found = read({"messages": [{"role": "assistant", "content": parts}]})
    assert found["messages"] == [{"role": "assistant", "content": "Hello"}]


@pytest.mark.parametrize("content", ["null", "absent", "empty"])
@pytest.mark.parametrize("arguments", ["object", "string"])
@pytest.mark.parametrize("flat", [False, True])
def test_a_tool_call_comes_with_any_content_and_its_arguments_as_an_object(
    content, arguments, flat
):
    function = dict(CALL["function"])
    if arguments == "string":
        function["arguments"] = json.dumps(function["arguments"])
    call = function if flat else {"type": "function", "function": function}
    message = {"role": "assistant", "tool_calls": [call]}
    message |= {} if content == "absent" else {"content": None if content == "null" else ""}
    expected = CALL["function"] if flat else CALL
    for tools in (TOOLS, json.dumps(TOOLS)):
        found = read({"messages": [message], "tools": tools})
        assert found["messages"] == [{"role": "assistant", "content": "", "tool_calls": [expected]}]
        assert found["tools"] == TOOLS


def test_what_is_not_to_be_learned_is_kept_for_every_shape_with_turns():
    for mark in ({"weight": 0}, {"train": False}):
        turns = [{"from": "human", "value": "Say"}, {"from": "gpt", "value": "y"} | mark]
        for record in (
            {"messages": [CHAT[1], CHAT[2] | mark]},
            {"conversations": turns},
            {"prompt": [CHAT[1]], "completion": [CHAT[2] | mark]},
        ):
            assert mark.items() <= read(record)["messages"][-1].items()


# What is refused

U, A = CHAT[1], CHAT[2]
PICTURE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}


@pytest.mark.parametrize(
    ("record", "reasons"),
    [
        ({"txt": "a", "id": 1}, ["txt", "id", '"text"', '"messages"', '"conversations"']),
        ({}, ["no keys"]),
        ({"messages": [U, A | {"weight": 0.5}]}, ["message 2: weight is 0.5", "0 or 1"]),
        ({"prompt": "x"}, ["prompt", '"completion"']),
        ({"text": 5}, ["text", "5"]),
        ({"text": None}, ["text", "null"]),
        ({"text": ["a"]}, ["text", '["a"]']),
        ({"text": {"text": "a"}}, ["text"]),
        ({"messages": []}, ["messages", "at least one"]),
        ({"messages": "just a text"}, ["messages", "list"]),
        ({"messages": {"role": "user", "content": "x"}}, ["messages", "list"]),
        ({"messages": ["x"]}, ["message 1", "role"]),
        ({"messages": [{"content": "x"}]}, ["message 1", "role"]),
        ({"messages": [U, {"role": "assistant"}]}, ["message 2", "content", "null"]),
        ({"messages": [U, {"role": "assistant", "content": 5}]}, ["message 2", "content", "5"]),
        ({"messages": [PICTURE, A]}, ["message 1", "image_url"]),
        ({"messages": [U, A | {"tool_calls": "x"}]}, ["message 2", "tool_calls"]),
        ({"messages": [U, A | {"tool_calls": ["x"]}]}, ["message 2", "tool_calls"]),
        ({"messages": [U, A], "tools": "no json"}, ["tools"]),
        ({"prompt": 5, "completion": "y"}, ["message 1", "content", "5"]),
        ({"prompt": "x", "completion": None}, ["null"]),
        ({"instruction": 5, "output": "y"}, ["5"]),
        ({"instruction": "x", "output": None}, ["null"]),
        ({"messages": [U, {"role": "bot", "content": "y"}]}, ["message 2", '"bot"', "assistant"]),
        ({"messages": [U, A | {"tool_calls": [{"function": "x"}]}]}, ["message 2", "tool call"]),
        ([U, A], [".json file"]),
        ({"conversations": "x"}, ['"x"', "list of at least one message"]),
        ({"conversations": [{"from": "human"}]}, ["message 1", "null"]),
        ({"conversations": [{"value": "x"}]}, ['{"value": "x"}', "human"]),
        ({"conversations": [{"from": "function_call", "value": "{}"}]}, ["function_call"]),
        (["text"], ["record", '["text"]']),
        ("text", ["record"]),
        (7, ["record"]),
        (None, ["record", "null"]),
    ],
    ids=str,
)
def test_a_wrong_record_is_named_by_its_line_and_what_is_wrong_with_it(tmp_path, record, reasons):
    message = refusal(tmp_path, "\n" + lines(TEXT, record, TEXT), name="c.jsonl")
    assert "c.jsonl, line 3: " in message
    assert all(reason in message.partition("line 3: ")[2] for reason in reasons), message
    assert "object has no" not in message and "expected str" not in message


@pytest.mark.parametrize(
    "line",
    ["{", "text", "{'text': 'a'}", '{"text": "a"} {"text": "b"}', "[" * 100_000],
    ids=lambda line: line[:20],
)
def test_a_line_that_is_no_json_is_named_by_its_number(tmp_path, line):
    message = refusal(tmp_path, f"{lines(TEXT)}\n{line}\n{lines(TEXT)}", name="c.jsonl")
    assert "c.jsonl, line 3:" in message


def surrogate(where: str, half: str = "cut \ud83d") -> dict:
    """A record with half a character, as a cut escape of JSON leaves one."""
    call = {"function": {"name": "f", "arguments": {"x": half}}}
    call_text = {"function": {"name": "f", "arguments": json.dumps({"x": half})}}
    return {
        "text": {"text": half},
        "content": {"messages": [U | {"content": half}, A]},
        "part": {"messages": [U | {"content": [{"type": "text", "text": half}]}, A]},
        "arguments": {"messages": [U, A | {"tool_calls": [call]}]},
        "arguments in a string": {"messages": [U, A | {"tool_calls": [call_text]}]},
        "tools": {"messages": [U, A], "tools": [{"type": "function", "x": half}]},
        "completion": {"prompt": "x", "completion": half},
    }[where]


@pytest.mark.parametrize(
    "where",
    ["text", "content", "part", "arguments", "arguments in a string", "tools", "completion"],
)  # fmt: skip
def test_half_a_character_is_refused_wherever_it_stands(tmp_path, where):
    message = refusal(tmp_path, lines(TEXT, surrogate(where)), name="c.jsonl")
    assert "c.jsonl, line 2: " in message and "surrogate" in message
    assert len(texts_of(tmp_path, lines(TEXT, surrogate(where, half="whole 😀")))) == 2
