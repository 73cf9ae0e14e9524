"""Reading a corpus: what becomes a sample, what a window, and what is refused."""

from __future__ import annotations

import functools
import itertools
import pickle
import random
import re
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, clean_environment, settings_of

import llm_ddp_parallel_training as ddp

BOM = b"\xef\xbb\xbf"
# Pieces that make trouble at the borders of lines, characters and blocks.
PIECES = [*"a bc é € 😀 \n \n \r\n \r\n \r \n\n \u2028 \u0085 \x0b \x0c \t \ufeff".split(" "), " "]
CHUNKS = (7, 16, 64, 1 << 22)


def random_text(random: random.Random, pieces: int) -> bytes:
    """A text of the pieces above, sometimes behind a byte-order mark."""
    text = "".join(random.choice(PIECES) for _ in range(pieces)).encode("utf-8")
    return (BOM if random.random() < 0.3 else b"") + text


def naive_lines(data: bytes) -> tuple[list[str], int]:
    """The samples of a file of lines and its number of blank ones, the simple way."""
    lines = data.removeprefix(BOM).split(b"\n")
    if not lines[-1]:
        lines.pop()  # what follows the last line feed is no line
    lines = [line.removesuffix(b"\r") for line in lines]
    texts = [line.decode("utf-8") for line in lines if any(byte > 32 for byte in line)]
    return texts, len(lines) - len(texts)


def corpus(tmp_path, data: bytes) -> ddp.Corpus:
    path = tmp_path / "corpus.txt"
    path.write_bytes(data)
    return ddp.Corpus(path)


def read_lines(tmp_path, data: bytes) -> list[str]:
    return list(ddp.Lines(corpus(tmp_path, data)))


def read_document(tmp_path, data: bytes) -> bytes:
    document = ddp.Document(corpus(tmp_path, data))
    return bytes(document.read(0, len(document)).astype(np.uint8)) if len(document) else b""


def data_of(tmp_path, data: bytes | str, *flags: object, name: str = "corpus.txt") -> ddp.Data:
    """What the script makes of a file with these contents and flags."""
    path = tmp_path / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode("utf-8"))
    return ddp.build_data(settings_of("--corpus-file", path, *flags))


def refusal(tmp_path, data: bytes | str, *flags: object, name: str = "corpus.txt") -> str:
    """The one line that a user reads who gives a file with these contents."""
    with pytest.raises(ddp.UserError) as error:
        data_of(tmp_path, data, *flags, name=name)
    message = str(error.value)
    assert "\n" not in message
    return message


# What becomes a sample


def test_a_byte_order_mark_does_not_become_part_of_the_first_sample(tmp_path):
    text = "Zürich\nzwei\n".encode()
    assert read_lines(tmp_path, BOM + text) == read_lines(tmp_path, text) == ["Zürich", "zwei"]
    assert read_document(tmp_path, BOM + text) == read_document(tmp_path, text) == text


@pytest.mark.parametrize(
    "data",
    [
        b"a\nb b\nc\n",
        b"a\r\nb b\r\nc\r\n",
        b"a\r\nb b\nc\n",
        b"a\n\n\r\n  \r\nb b\n\t\nc",
        b"\n\na\nb b\nc\r",
    ],
    ids=["LF", "CRLF", "mixed", "blank lines, none at the end", "blank lines first, half a CRLF"],
)
def test_line_endings_and_blank_lines_do_not_change_the_samples(tmp_path, data):
    assert read_lines(tmp_path, data) == ["a", "b b", "c"]


def test_line_endings_do_not_change_a_document(tmp_path):
    assert read_document(tmp_path, b"a\r\n\r\nb\r\n") == b"a\n\nb\n"
    assert read_document(tmp_path, b"a\n\r\nb\n") == b"a\n\nb\n"
    assert read_document(tmp_path, b"a\n\nb") == b"a\n\nb"


@pytest.mark.parametrize("chunk", CHUNKS)
def test_lines_are_the_same_wherever_the_reader_cuts_the_file(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(ddp, "CHUNK", chunk)
    source = random.Random(chunk)
    for _ in range(300):
        data = random_text(source, source.randrange(1, 60))
        lines = ddp.Lines(corpus(tmp_path, data))
        assert (list(lines), lines.blank) == naive_lines(data), data
        sizes = lines.sizes(slice(0, len(lines))).tolist()
        assert sizes == [len(text.encode("utf-8")) for text in lines], data


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("block", [4, 9, 4096])
def test_a_document_is_the_same_wherever_the_reader_cuts_it(tmp_path, monkeypatch, chunk, block):
    monkeypatch.setattr(ddp, "CHUNK", chunk)
    monkeypatch.setattr(ddp.Document, "BLOCK", block)
    source = random.Random(chunk * block)
    for _ in range(100):
        data = random_text(source, source.randrange(1, 60))
        expected = data.removeprefix(BOM).replace(b"\r\n", b"\n")
        document = ddp.Document(corpus(tmp_path, data))
        assert len(document) == len(expected), data
        for _ in range(10):
            if expected:
                begin = source.randrange(len(expected))
                end = source.randint(begin + 1, len(expected))
                assert bytes(document.read(begin, end).astype(np.uint8)) == expected[begin:end]


def test_unicode_line_separators_stay_inside_a_sample(tmp_path):
    sample = "one\u2028two\u2029three\u0085four\x0bfive\x0csix\x1cseven\reight"
    assert read_lines(tmp_path, f"{sample}\nnext\n".encode()) == [sample, "next"]


def test_a_very_long_line_is_one_sample(tmp_path, monkeypatch):
    monkeypatch.setattr(ddp, "CHUNK", 4096)
    long = "Grüße, " * 20_000
    assert read_lines(tmp_path, f"a\n{long}\nb\r\n".encode()) == ["a", long, "b"]
    assert read_lines(tmp_path, long.encode()) == [long]
    assert read_document(tmp_path, long.encode()) == long.encode()


def test_a_file_of_one_line_is_one_sample_with_or_without_a_newline(tmp_path):
    for data in (b"x", b"x\n", b"x\r\n", BOM + b"x"):
        assert read_lines(tmp_path, data) == ["x"]
        built = data_of(tmp_path, data)
        assert (len(built.train), len(built.validation)) == (1, 0)


@pytest.mark.parametrize("lines", [2, 3])
def test_two_and_three_lines_leave_something_to_train_on(tmp_path, lines):
    for fraction in (0, 0.1, 0.5, 0.9):
        built = data_of(tmp_path, "word\n" * lines, "--val-fraction", fraction)
        assert len(built.train) >= 1
        assert len(built.train) + len(built.validation) == lines


def test_blank_lines_are_counted_in_the_log(tmp_path):
    assert "1,234 blank" in data_of(tmp_path, "a\nb\n" + "\n" * 617 + " \r\n" * 617).summary


# What is refused


def naive_position(data: bytes) -> tuple[int, int]:
    """Line number and byte offset of the first byte that is not UTF-8."""
    with pytest.raises(UnicodeDecodeError) as error:
        data.decode("utf-8")
    return data.count(b"\n", 0, error.value.start) + 1, error.value.start


@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_byte_that_is_not_utf8_is_named_by_line_and_offset(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(ddp, "CHUNK", chunk)
    source = random.Random(chunk)
    wrong = [b"\xff", b"\x80", b"\xc3", b"\xe2\x82", b"\xf0\x9f\x98", b"\xed\xa0\x80", b"\xc0\x80",
             b"\xf5\x80\x80\x80", b"\xe2\x28\xa1", b"\x80\x80\x80\x80\x80"]  # fmt: skip
    for _ in range(500):
        before, after = (random_text(source, source.randrange(0, 30)) for _ in range(2))
        data = before + source.choice(wrong) + source.choice([after, b"\n", b"\r\n", b""])
        line, offset = naive_position(data)
        for read in (ddp.Lines, ddp.Document):
            with pytest.raises(ddp.UserError) as error:
                read(corpus(tmp_path, data))
            assert f"corpus.txt, line {line}, byte offset {offset}:" in str(error.value), data


def test_stray_bytes_after_a_whole_character_are_named_not_the_character(tmp_path, monkeypatch):
    monkeypatch.setattr(ddp, "CHUNK", 16)
    for before in range(20):  # so that the border of a piece meets every byte once
        data = b"a" * before + "😀".encode() + b"\x80" * 8 + b"a" * 20
        offset = naive_position(data)[1]
        assert f"byte offset {offset}:" in refusal(tmp_path, data)


def test_a_file_that_ends_inside_a_character_is_refused_at_its_first_byte(tmp_path):
    message = refusal(tmp_path, b"one\ntwo \xe2\x82")
    assert "line 2, byte offset 8:" in message and "UTF-8" in message


@pytest.mark.parametrize("codec", ["utf-16-le", "utf-16-be"])
def test_a_utf16_file_is_recognized(tmp_path, codec):
    message = refusal(tmp_path, "\ufeffhello\n".encode(codec))
    assert "UTF-16" in message and "line 1, byte offset 0:" in message


@pytest.mark.parametrize("data", [b"", BOM, b"\n\n \r\n", b"\r\n"], ids=repr)
@pytest.mark.parametrize("form", ["lines", "document", "jsonl"])
def test_a_file_without_text_is_refused_in_one_line(tmp_path, data, form):
    if form == "document" and b"\n" in data and len(data) > 2:
        assert len(data_of(tmp_path, data, "--corpus-format", form).train)  # newlines are text
    else:
        assert "corpus.txt" in refusal(tmp_path, data, "--corpus-format", form)


def test_a_folder_or_a_missing_file_is_named_as_such(tmp_path):
    with pytest.raises(ddp.UserError, match="not a regular file"):
        ddp.build_data(settings_of("--corpus-file", tmp_path))
    with pytest.raises(ddp.UserError, match=re.escape(str(tmp_path / "missing.txt"))):
        ddp.build_data(settings_of("--corpus-file", tmp_path / "missing.txt"))


# jsonl


def test_jsonl_reads_the_text_of_each_object(tmp_path):
    lines = ['{"text": "one\\ntwo"}', "", '{"id": 7, "text": "Z\\u00fcrich 😀"}', '{"text": ""}']
    built = data_of(tmp_path, "\r\n".join(lines), "--val-fraction", 0, name="c.jsonl")
    assert [text for _, text in map(built.train.__getitem__, range(2))] == [
        "one\ntwo",
        "Zürich 😀",
    ]
    assert len(built.train) == 2
    assert "2 blank" in built.summary
    assert [i for i, _ in map(built.train.__getitem__, range(2))] == [0, 1]


@pytest.mark.parametrize(
    "line",
    [
        "{", "text", '{"text": 5}', '{"text": null}', '{"text": ["a"]}', '{"txt": "a"}', '["text"]',
        '"text"', "7", "null", '{"text": "a"} {"text": "b"}', "{'text': 'a'}",
        '{"text": []}', '{"text": {}}', '{"text": [{"role": "user", "content": "hi"}]}',
        '{"text": "\\ud800"}', '{"text": {"text": "a"}}', "[" * 100_000,
    ],
    ids=lambda line: line[:20],
)  # fmt: skip
def test_a_bad_json_line_is_named_by_its_number(tmp_path, line):
    message = refusal(
        tmp_path, f'{{"text": "good"}}\n\n{line}\n{{"text": "good"}}\n', name="c.jsonl"
    )
    assert "c.jsonl, line 3:" in message
    assert len(message) < 500


# Splits


@pytest.mark.parametrize("size", [1, 2, 3, 10, 99, 1000])
@pytest.mark.parametrize("fraction", [0, 0.1, 0.3, 0.9])
def test_the_validation_split_has_the_asked_size_and_repeats_by_seed(size, fraction):
    held_out = ddp.hold_out(size, fraction, 5)
    assert len(held_out) == min(round(size * fraction), size - 1)
    assert held_out.tolist() == sorted(set(held_out.tolist()))
    assert all(0 <= i < size for i in held_out)
    assert held_out.tolist() == ddp.hold_out(size, fraction, 5).tolist()


def test_another_seed_holds_out_other_samples():
    assert ddp.hold_out(1000, 0.1, 0).tolist() != ddp.hold_out(1000, 0.1, 1).tolist()


def test_leaving_out_samples_keeps_all_others_in_order():
    source = random.Random(0)
    for _ in range(200):
        size = source.randrange(1, 30)
        left_out = sorted(source.sample(range(size), source.randrange(size + 1)))
        kept = [i for i in range(size) if i not in left_out]
        without = ddp.Without(size, np.array(left_out, dtype=np.int64))
        assert len(without) == len(kept)
        assert [int(without[i]) for i in range(len(kept))] == kept
        assert without[np.arange(len(kept))].tolist() == kept


def test_training_and_validation_share_no_sample_and_lose_none(tmp_path):
    texts = [f"sample {i}" for i in range(101)]
    built = data_of(tmp_path, "\n".join(texts), "--val-fraction", 0.2)
    train, validation = (
        [part[i] for i in range(len(part))] for part in (built.train, built.validation)
    )
    assert len(validation) == 20
    assert sorted(train + validation) == list(enumerate(texts))  # ids are places in the file


def test_a_document_is_validated_on_its_tail(tmp_path):
    text = "".join(chr(97 + i % 26) for i in range(1000))
    built = data_of(tmp_path, text, "--corpus-format", "document", "--val-fraction", 0.3)
    assert joined(built.train) == text[:700].encode()
    assert joined(built.validation) == text[700:].encode()


# Windows


def windows(dataset) -> list[np.ndarray]:
    """All windows in order, though read backwards: each must stand for itself."""
    items = [dataset[i] for i in reversed(range(len(dataset)))][::-1]
    assert [i for i, _ in items] == list(range(len(dataset)))
    return [tokens for _, tokens in items]


def joined(dataset) -> bytes:
    """The text that windows over one stream cover, each token once."""
    parts = windows(dataset)
    stream = np.concatenate([parts[0][:1], *(tokens[1:] for tokens in parts)])
    return bytes(stream.astype(np.uint8))


TEXTS = [("é" * (i * 7 % 23) + f"x{i}")[: 1 + i % 40] for i in range(200)]


def stream_of(texts: list[str]) -> list[int]:
    return [token for text in texts for token in (*text.encode("utf-8"), ddp.EOS)]


@pytest.mark.parametrize("seq_len", [2, 3, 16, 64, 5000, 100_000])
@pytest.mark.parametrize("form", ["document", "pack"])
def test_every_token_is_predicted_once_by_windows_that_overlap_by_one(tmp_path, seq_len, form):
    flags = ("--pack",) if form == "pack" else ("--corpus-format", "document")
    built = data_of(tmp_path, "\n".join(TEXTS), *flags, "--val-fraction", 0, "--seq-len", seq_len)
    parts = windows(built.train)
    stream = stream_of(TEXTS) if form == "pack" else list("\n".join(TEXTS).encode("utf-8"))
    assert [int(t) for t in parts[0][:1]] + [int(t) for p in parts for t in p[1:]] == stream
    assert all(a[-1] == b[0] for a, b in itertools.pairwise(parts))
    assert all(len(p) == seq_len for p in parts[:-1])
    assert 2 <= len(parts[-1]) <= seq_len


@pytest.mark.parametrize("seq_len", [2, 3, 16, 64])
def test_split_predicts_every_token_of_a_long_sample_once(tmp_path, seq_len):
    flags = ("--overlong", "split", "--val-fraction", 0, "--seq-len", seq_len)
    built = data_of(tmp_path, "\n".join(TEXTS), *flags)
    samples, current = [], []
    for tokens in windows(built.train):
        assert 2 <= len(tokens) <= seq_len
        assert not current or current[-1] == tokens[0]
        current += tokens.tolist() if not current else tokens[1:].tolist()
        if current[-1] == ddp.EOS:
            samples.append(current)
            current = []
    assert not current
    assert samples == [stream_of([text]) for text in TEXTS]


@pytest.mark.parametrize("flags", [("--pack",), ("--overlong", "split")], ids=str)
def test_windows_never_mix_training_and_validation(tmp_path, flags):
    texts = [f"{i:03}" for i in range(300)]
    built = data_of(tmp_path, "\n".join(texts), *flags, "--val-fraction", 0.3, "--seq-len", 9)
    words = [
        bytes(t for w in windows(part) for t in (w if flags[0] != "--pack" else w[1:]) if t < 256)
        for part in (built.train, built.validation)
    ]
    assert len(words[0]) + len(words[1]) == 900 - 2 * (flags[0] == "--pack")  # first of a stream
    held_out = {texts[i] for i in ddp.hold_out(300, 0.3, 0)}
    stream = "".join(text for text in texts if text in held_out)
    assert stream.endswith(words[1].decode()[-60:])
    assert len(held_out) == 90


def test_overlong_samples_are_cut_or_left_out_and_both_counts_are_logged(tmp_path):
    # 137 samples of 26 tokens with EOS, at 8 tokens a sequence: 18 too many in each.
    text = "short\n" * 50 + "abcdefghijklmnopqrstuvwxy\n" * 137
    flags = ("--seq-len", 8, "--val-fraction", 0)
    cut = data_of(tmp_path, text, *flags, "--overlong", "truncate")
    assert len(cut.train) == 187
    assert "137" in cut.summary and f"{137 * 18:,}" in cut.summary
    left = data_of(tmp_path, text, *flags, "--overlong", "drop")
    assert {left.train[i][1] for i in range(len(left.train))} == {"short"}
    assert len(left.train) == 50
    assert "137" in left.summary and f"{137 * 26:,}" in left.summary
    split = data_of(tmp_path, text, *flags, "--overlong", "split")
    assert len(split.train) == 50 + 137 * 4
    assert "137" in split.summary


def test_a_sample_that_just_fits_is_not_overlong(tmp_path):
    summary = data_of(tmp_path, "1234567\n1234567\n", "--seq-len", 8, "--overlong", "drop").summary
    assert "longer" not in summary


def test_nothing_left_after_drop_is_refused_with_the_flag_to_change(tmp_path):
    message = refusal(tmp_path, "long line\n" * 3, "--overlong", "drop", "--seq-len", 4)
    assert "--seq-len 4" in message and "3 samples" in message


# IndexedTextDataset


def test_indexed_texts_give_record_id_and_text():
    dataset = ddp.IndexedTextDataset(["zero", "eins", "два"])
    assert len(dataset) == 3
    assert [dataset[i] for i in range(3)] == [(0, "zero"), (1, "eins"), (2, "два")]
    assert list(dataset) == [(0, "zero"), (1, "eins"), (2, "два")]
    with pytest.raises(IndexError):
        dataset[3]


def test_an_empty_text_is_refused_by_its_position():
    with pytest.raises(ValueError, match="2"):
        ddp.IndexedTextDataset(["a", "b", "", "c"])


# Memory, and loader workers


MEMORY_CHILD = """
import sys, tracemalloc
from pathlib import Path
import llm_ddp_parallel_training as ddp

status = Path("/proc/self/status")
def private():
    if not status.exists():  # not Linux: what Python and NumPy allocated
        return tracemalloc.get_traced_memory()[0]
    text = status.read_text(encoding="ascii")
    return 1024 * int(text.split("RssAnon:")[1].split()[0])

small, large, *flags = sys.argv[1:]
build = lambda path: ddp.build_data(ddp.parse_settings(["--corpus-file", path, *flags]))
warm = build(small)
if not status.exists():
    tracemalloc.start()
before = private()
data = build(large)
data.train[len(data.train) - 1], data.validation[0]
print(len(data.train), private() - before)
"""


LINE = b"all work and no play makes jack a dull boy; " * 2 + b"and so on.\r\n"


@pytest.mark.parametrize(
    ("line", "count", "form", "limit"),
    [
        (LINE, 2_000_000, "lines", 30e6),
        (LINE, 2_000_000, "document", 30e6),
        (b"short line\n", 10_000_000, "lines", 120e6),
    ],
    ids=["2 million lines", "a document of 200 MB", "10 million lines"],
)
def test_a_rank_does_not_hold_the_corpus_in_its_memory(tmp_path, line, count, form, limit):
    small, large = tmp_path / "small.txt", tmp_path / "large.txt"
    small.write_bytes(line * 1000)
    with open(large, "wb") as file:
        for _ in range(20):
            file.write(line * (count // 20))
    try:
        assert large.stat().st_size == len(line) * count
        run = subprocess.run(
            [sys.executable, "-c", MEMORY_CHILD, small, large, "--corpus-format", form],
            cwd=ROOT, capture_output=True, text=True, encoding="utf-8", timeout=120,
            env=clean_environment(),
        )  # fmt: skip
    finally:
        large.unlink()
    assert run.returncode == 0, run.stderr
    samples, grown = map(int, run.stdout.split())
    assert samples == (count * 9 // 10 if form == "lines" else -(-(178_200_000 - 1) // 63))
    assert grown <= limit


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--pack",),
        ("--overlong", "split"),
        ("--overlong", "drop"),
        ("--corpus-format", "document"),
    ],
    ids=str,
)
def test_loader_workers_read_the_same_samples(tmp_path, flags):
    built = data_of(tmp_path, BOM + "\r\n".join(TEXTS).encode(), *flags, "--seq-len", 16)
    collate = functools.partial(ddp.tiny_collator, seq_len=16)
    train, validation, unpickled = pickle.loads(
        pickle.dumps((built.train, built.validation, collate))
    )
    for mine, theirs in ((built.train, train), (built.validation, validation)):
        assert len(mine) == len(theirs) > 0
        for i in range(len(mine)):
            a, b = collate([mine[i]]), unpickled([theirs[i]])
            assert all(a[name].equal(b[name]) for name in a)


def test_the_built_in_texts_need_no_file():
    lessons = ddp.build_data(settings_of())
    assert len(lessons.train) + len(lessons.validation) >= 24
    docs = ddp.build_data(settings_of("--builtin", "python-docs"))
    assert 300_000 < 63 * len(docs.train) < 3_000_000
