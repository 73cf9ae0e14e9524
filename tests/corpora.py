"""What the tests of corpora share: a file with given contents, read or refused."""

from __future__ import annotations

import re

import pytest
from conftest import settings_of

import llm_ddp_parallel_training as ddp

BOM = b"\xef\xbb\xbf"


def data_of(tmp_path, data: bytes | str, *flags: object, name: str = "corpus.txt") -> ddp.Data:
    """What the script makes of a file with these contents and flags."""
    path = tmp_path / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode("utf-8"))
    return ddp.build_data(settings_of("--corpus-file", path, *flags))


def texts_of(tmp_path, data: bytes | str, name: str = "c.jsonl") -> list[str]:
    """The training texts of such a file, in order, nothing held out."""
    train = data_of(tmp_path, data, "--val-fraction", 0, name=name).train
    return [train[i][1] for i in range(len(train))]


def refusal(tmp_path, data: bytes | str, *flags: object, name: str = "corpus.txt") -> str:
    """The one line that a user reads who gives a file with these contents."""
    with pytest.raises(ddp.UserError) as error:
        data_of(tmp_path, data, *flags, name=name)
    message = str(error.value)
    assert not re.search(r"[\n\r]", message)
    assert len(message) < 500
    return message
