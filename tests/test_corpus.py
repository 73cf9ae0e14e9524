"""Reading a corpus: what becomes a sample, and what is refused; memory."""

from __future__ import annotations

import random
import re
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, clean_environment, settings_of
from corpora import BOM, data_of, refusal

import llm_ddp_parallel_training as ddp

# Pieces that make trouble at the borders of lines, characters and blocks.
PIECES = [*"a bc é € 😀 \n \n \r\n \r\n \r \n\n \u2028 \u0085 \x0b \x0c \t \ufeff".split(" "), " "]


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


def samples_of(tmp_path, data: bytes, form: str = "lines") -> ddp.Samples:
    """The samples of a file, or the one that is the whole document."""
    path = tmp_path / "corpus.txt"
    path.write_bytes(data)
    buffer = ddp.read_corpus(settings_of("--corpus-file", path, "--corpus-format", form))
    samples = ddp.Samples(buffer, str(path))
    return samples.part(0, len(buffer)) if form == "document" else samples


def read_lines(tmp_path, data: bytes) -> list[str]:
    return list(samples_of(tmp_path, data))


def read_document(tmp_path, data: bytes) -> bytes:
    return bytes(samples_of(tmp_path, data, "document").tokens(0, 0, 10**9).astype(np.uint8))


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


def test_lines_of_any_bytes_are_those_that_python_sees(tmp_path):
    source = random.Random(0)
    for _ in range(500):
        data = random_text(source, source.randrange(1, 60))
        lines = samples_of(tmp_path, data)
        assert (list(lines), lines.blank) == naive_lines(data), data
        sizes = lines.sizes(slice(0, len(lines))).tolist()
        assert sizes == [len(text.encode("utf-8")) for text in lines], data


def test_a_document_of_any_bytes_is_itself_with_line_feeds(tmp_path):
    source = random.Random(0)
    for _ in range(500):
        data = random_text(source, source.randrange(1, 60))
        # A CR at the very end is half a CRLF.
        expected = re.sub(rb"\r(\n|\Z)", b"\n", data.removeprefix(BOM))
        document = samples_of(tmp_path, data, "document")
        assert document.sizes(slice(1)).tolist() == [len(expected)], data
        for _ in range(10):
            begin = source.randrange(len(expected) + 1)
            end = source.randint(begin, len(expected) + 1)
            tokens = document.tokens(0, begin, end)
            assert tokens.dtype == np.uint16
            assert bytes(tokens.astype(np.uint8)) == expected[begin:end]


def test_unicode_line_separators_stay_inside_a_sample(tmp_path):
    sample = "one\u2028two\u2029three\u0085four\x0bfive\x0csix\x1cseven\reight"
    assert read_lines(tmp_path, f"{sample}\nnext\n".encode()) == [sample, "next"]


def test_a_very_long_line_is_one_sample(tmp_path):
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


def test_a_byte_that_is_not_utf8_is_named_by_line_and_offset(tmp_path):
    source = random.Random(0)
    wrong = [b"\xff", b"\x80", b"\xc3", b"\xe2\x82", b"\xf0\x9f\x98", b"\xed\xa0\x80", b"\xc0\x80",
             b"\xf5\x80\x80\x80", b"\xe2\x28\xa1", b"\x80\x80\x80\x80\x80"]  # fmt: skip
    for _ in range(150):
        before, after = (random_text(source, source.randrange(0, 30)) for _ in range(2))
        data = before + source.choice(wrong) + source.choice([after, b"\n", b"\r\n", b""])
        line, offset = naive_position(data)
        for form in ("lines", "document", "jsonl"):
            message = refusal(tmp_path, data, "--corpus-format", form)
            assert f"corpus.txt, line {line}, byte offset {offset}:" in message, data


def test_stray_bytes_after_a_whole_character_are_named_not_the_character(tmp_path):
    data = b"aaa" + "😀".encode() + b"\x80" * 8 + b"a" * 20
    assert f"byte offset {naive_position(data)[1]}:" in refusal(tmp_path, data)


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


# Memory, and the built-in texts


MEMORY_CHILD = """
import ctypes, sys, tracemalloc
from pathlib import Path
import llm_ddp_parallel_training as ddp

status, libc = Path("/proc/self/status"), ctypes.CDLL(None)
def private():
    if not status.exists():  # not Linux: what Python and NumPy allocated
        return tracemalloc.get_traced_memory()[0]
    if hasattr(libc, "malloc_trim"):  # what is held, and not what the heap keeps of what was freed
        libc.malloc_trim(0)
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
        (LINE, 2_000_000, "lines", 30e6),  # 12 bytes a line: two offsets, and a place in the order
        (LINE, 2_000_000, "document", 30e6),
        (b"short line\n", 10_000_000, "lines", 140e6),
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


def test_the_built_in_texts_need_no_file():
    lessons = ddp.build_data(settings_of())
    assert len(lessons.train) + len(lessons.validation) >= 24
    docs = ddp.build_data(settings_of("--builtin", "python-docs"))
    assert 300_000 < 63 * len(docs.train) < 3_000_000
