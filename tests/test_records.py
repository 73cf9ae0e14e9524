"""Records as people have them: which file it is, which shapes are read, what is refused and how."""

from __future__ import annotations

import gzip
import importlib.util
import json
import sys

import pytest
from conftest import main_here, settings_of
from corpora import BOM, data_of, refusal, texts_of

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


# Which file it is

ROWS = [{"text": f"sample {i}"} for i in range(5)]
EXPECTED = [row["text"] for row in ROWS]
FORMS = {
    "lines.jsonl": lines(*ROWS),
    "lines.json": lines(*ROWS),
    "array.json": json.dumps(ROWS),
    "pretty-array.json": json.dumps(ROWS, indent=2),
    "pretty-records.json": "\n".join(json.dumps(row, indent=2) for row in ROWS),
    "blank-lines-first.json": "\n\n" + json.dumps(ROWS, indent=2),
    "crlf.json": json.dumps(ROWS, indent=2).replace("\n", "\r\n"),
    "UPPER.JSONL": lines(*ROWS),
    "table.csv": "text\n" + "\n".join(f'"{text}"' for text in EXPECTED) + "\n",
    "more-columns.csv": "id,text\n" + "\n".join(f"{i},{t}" for i, t in enumerate(EXPECTED)),
    "table.tsv": "id\ttext\n" + "\n".join(f"{i}\t{t}" for i, t in enumerate(EXPECTED)),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("how", ["plain", "with a byte-order mark", "gzipped"])
def test_every_form_of_file_gives_the_same_samples(tmp_path, name, how):
    data = FORMS[name].encode()
    if how == "gzipped":
        assert texts_of(tmp_path, gzip.compress(data), name=name + ".gz") == EXPECTED
        assert texts_of(tmp_path, gzip.compress(data), name=name) == EXPECTED  # told by content
    else:
        assert texts_of(tmp_path, BOM * (how != "plain") + data, name=name) == EXPECTED


def test_a_gzipped_text_gives_the_samples_of_the_text(tmp_path):
    assert texts_of(tmp_path, gzip.compress(b"a\r\nb\n"), name="c.txt.gz") == ["a", "b"]
    cut = gzip.compress(b"text\n" * 1000)[:-10]
    assert "c.txt.gz" in refusal(tmp_path, cut, name="c.txt.gz")


def test_a_cell_of_a_table_is_the_text_that_stands_in_it(tmp_path):
    cells = ["007", "1.50", "NA", "None", "true", "2020-01-01", "12345678901234567890123"]
    assert texts_of(tmp_path, "text\n" + "\n".join(cells), name="c.csv") == cells
    assert texts_of(tmp_path, 'text,x\n"a\nb, ""c""",1\n', name="c.csv") == ['a\nb, "c"']
    assert texts_of(tmp_path, "text\n\nlast\n", name="c.csv") == ["last"]


@pytest.mark.parametrize(
    "data",
    [
        lines(*ROWS), "\n  " + lines(*ROWS), json.dumps(ROWS), json.dumps(ROWS, indent=2),
        json.dumps([{"text": "long " * 50}] * 8000), json.dumps(["a", "b"]),
        json.dumps([{"text": "long " * 50}] * 8000, indent=2),
        '{"type": "table"}\n', "[" * 100_000 + "\n",
    ],
    ids=["lines", "blank", "array", "pretty", "2 MB", "strings", "2 MB pretty", "one", "deep"],
)  # fmt: skip
@pytest.mark.parametrize("name", ["corpus.txt", "corpus", "corpus.md", "corpus.txt.gz"])
def test_json_by_another_name_is_refused_unless_it_is_called_lines(tmp_path, data, name):
    content = gzip.compress(data.encode()) if name.endswith(".gz") else data
    message = refusal(tmp_path, content, name=name)
    assert "looks like JSON" in message and ".jsonl" in message
    assert "--corpus-format lines" in message
    built = data_of(tmp_path, content, "--corpus-format", "lines", name=name)
    assert len(built.train) + len(built.validation) == len([x for x in data.split("\n") if x])


@pytest.mark.parametrize(
    "data",
    [
        "prompt,completion\na,b\nc,d\n", "question,answer\na,b\nc,d\n", "q\ta\nx\ty\nz\tw\n",
        'text,label\n"one, two",1\n"three",0\n', "question;answer\na;b\n",
    ],
    ids=["csv", "other names", "tsv", "quoted", "semicolons"],
)  # fmt: skip
def test_a_table_by_another_name_is_refused_unless_it_is_called_lines(tmp_path, data):
    message = refusal(tmp_path, data)
    assert "looks like a table" in message and ".csv" in message + ".csv" * (".tsv" in message)
    assert "--corpus-format lines" in message
    built = data_of(tmp_path, data, "--corpus-format", "lines", "--val-fraction", 0)
    assert len(built.train) == len(data.split("\n")) - 1


@pytest.mark.parametrize(
    "data",
    [
        "[1] Smith, J., and Doe, A. A paper.\n[2] Another one, of 2001.\n",
        "{} is the empty set.\nSo is { }.\n",
        '"Hello", she said, and left.\n"Bye", said he, and stayed.\n',
        "First, there was light.\nThen, there was text.\nLast, there was loss.\n",
        "One tab\there\nand none here\n",
    ],
    ids=["references", "braces", "quotes", "commas", "one tab"],
)
def test_prose_is_not_taken_for_json_or_a_table(tmp_path, data):
    built = data_of(tmp_path, data, "--val-fraction", 0)
    assert [built.train[i][1] for i in range(len(built.train))] == data.splitlines()


def test_a_named_format_is_taken_at_its_word(tmp_path):
    built = data_of(tmp_path, "a,b\n1,2\n", "--corpus-format", "lines", name="c.csv")
    assert len(built.train) + len(built.validation) == 2
    built = data_of(tmp_path, lines(*ROWS), "--corpus-format", "document", name="c.jsonl")
    assert built.summary.startswith("document of")
    built = data_of(tmp_path, lines(*ROWS), "--corpus-format", "jsonl", "--val-fraction", 0)
    assert [built.train[i][1] for i in range(5)] == EXPECTED


def test_parquet_without_its_package_is_one_line_with_the_remedy(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "datasets" else find(n))
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "c.parquet").write_bytes(b"PAR1")
    ended = main_here("--cpu", "--corpus-file", tmp_path / "c.parquet", "--dry-run")
    assert ended.status == 2 and ended.err.count("\n") == 1
    assert "c.parquet" in ended.err and "pip install datasets" in ended.err


def test_a_parquet_file_gives_its_rows(tmp_path, monkeypatch):
    pytest.importorskip("datasets", reason="reads parquet where it is installed")
    from datasets import Dataset

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    rows = [{"text": None, "messages": CHAT}, {"text": "abc", "messages": None}]
    Dataset.from_list(rows).to_parquet(tmp_path / "c.parquet")
    built = ddp.build_data(settings_of("--corpus-file", tmp_path / "c.parquet"))
    assert len(built.train) + len(built.validation) == 2


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
        ({"conversations": "x"}, ['"x"', "human"]),
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
        "role": {"messages": [U | {"role": half}, A]},
        "arguments": {"messages": [U, A | {"tool_calls": [call]}]},
        "arguments in a string": {"messages": [U, A | {"tool_calls": [call_text]}]},
        "tools": {"messages": [U, A], "tools": [{"type": "function", "x": half}]},
        "completion": {"prompt": "x", "completion": half},
    }[where]


@pytest.mark.parametrize(
    "where",
    ["text", "content", "part", "role", "arguments", "arguments in a string", "tools",
     "completion"],
)  # fmt: skip
def test_half_a_character_is_refused_wherever_it_stands(tmp_path, where):
    message = refusal(tmp_path, lines(TEXT, surrogate(where)), name="c.jsonl")
    assert "c.jsonl, line 2: " in message and "surrogate" in message
    assert len(texts_of(tmp_path, lines(TEXT, surrogate(where, half="whole 😀")))) == 2


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("c.json", json.dumps([TEXT, TEXT, {"txt": "x"}], indent=1)),
        ("c.json", "\n".join(json.dumps(r, indent=1) for r in (TEXT, TEXT, {"txt": "x"}))),
        ("c.csv", 'prompt,completion\n"a\nb",c\nd,e\nonly one cell\n'),
    ],
    ids=["array", "pretty", "csv"],
)
def test_what_has_no_lines_is_named_by_the_number_of_the_record(tmp_path, name, data):
    message = refusal(tmp_path, data, name=name)
    assert f"{name}, record 3: " in message


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("c.json", '[\n{"text": "a"},\n{"text": "b"\n]'),
        ("c.json", "[" * 100_000),
        ("c.jsonl", json.dumps([TEXT])),
        ("c.csv", ""),
        ("c.csv", "text\n"),
        ("c.json", "[]"),
    ],
    ids=["broken", "deep", "array called lines", "nothing", "header only", "empty array"],
)
def test_a_file_without_a_record_is_one_line(tmp_path, name, data):
    assert name in refusal(tmp_path, data, name=name)


@pytest.mark.parametrize("name", ["c.jsonl", "c.json", "c.csv"])
def test_a_byte_that_is_not_utf8_is_named_in_records_too(tmp_path, name):
    data = b'[\n{"text": "caf\xe9"}]' if name == "c.json" else b'\n{"text": "caf\xe9"}\n'
    message = refusal(tmp_path, data, name=name)
    assert f"{name}, line 2, byte offset" in message and "0xe9 is not UTF-8" in message
