"""Which file it is: JSON, tables, gzip, by name and by content, and how a bad one is refused."""

from __future__ import annotations

import gzip
import importlib.util
import json
import sys

import pytest
from conftest import main_here, settings_of
from corpora import BOM, data_of, refusal, texts_of

import llm_ddp_parallel_training as ddp

TEXT = {"text": "one\ntwo"}
CHAT = [{"role": "user", "content": "Say"}, {"role": "assistant", "content": "y"}]


def lines(*records: object) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


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
        'prompt,completion\n"one\ntwo, three",x\n"four",y\n',
    ],
    ids=["csv", "other names", "tsv", "quoted", "semicolons", "cells of several lines"],
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


# What is refused


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
