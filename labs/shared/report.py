"""Text that a lab prints: tables, figures with units, one-line errors. Needs Python alone.

Everything is plain text of at most 100 columns, the same on a terminal, in a pipe and in a wiki.
"""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
from collections.abc import Sequence

WIDTH = 100  # columns


def table(rows: Sequence[Sequence[object]], header: Sequence[object] = (), align: str = "") -> str:
    """Rows of cells as text in columns, two spaces apart; `None` is an empty cell.

    `align` has a sign a column, "<" or ">"; without it the first column is left-aligned, the rest
    right-aligned. If the last column is left-aligned, its text is wrapped to end within `WIDTH`.
    """
    lines = [["" if cell is None else str(cell) for cell in row] for row in [header, *rows] if row]
    if not lines:
        return ""
    align = align or "<" + ">" * (len(lines[0]) - 1)
    widths = [max(map(len, column)) for column in zip(*lines)]
    before = sum(widths[:-1]) + 2 * (len(widths) - 1)  # the last column begins there
    text = []
    for *cells, last in lines:
        start = "".join(f"{cell:{a}{w}}  " for cell, a, w in zip(cells, align, widths))
        if align[-1] == "<":
            parts = textwrap.wrap(last, max(20, WIDTH - before), break_on_hyphens=False) or [""]
        else:
            parts = [f"{last:>{widths[-1]}}"]
        text += [start + parts[0], *(" " * before + part for part in parts[1:])]
    return "\n".join(line.rstrip() for line in text)


def paragraph(text: str, indent: str = "") -> str:
    """Prose wrapped at `WIDTH`, each line after `indent`."""
    return textwrap.fill(
        text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )


def counted(number: int, noun: str) -> str:
    """'1 layer', '2 layers', '1,000 layers'; 'batch' becomes 'batches'."""
    plural = "es" if noun.endswith(("ch", "s", "x")) else "s"
    return f"{number:,} {noun}{plural * (number != 1)}"


def size_of(count: float) -> str:
    """Bytes in the largest decimal unit that leaves a figure above 1: '1.5 GB'."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= scale:
            return f"{count / scale:,.1f} {unit}"
    return f"{count:,.0f} B"


def span_of(seconds: float) -> str:
    """Seconds in the largest unit that leaves a figure above 1: '1.33 min', '12.5 ms'."""
    units = (("days", 86400), ("hours", 3600), ("min", 60), ("s", 1), ("ms", 1e-3))
    unit, scale = next((one for one in units if seconds >= one[1]), units[-1])
    figure = seconds / scale
    return f"{figure:,.0f} {unit}" if figure >= 100 else f"{figure:.3g} {unit}"


def show(text: str) -> None:
    """Prints to a terminal of any encoding, and to a reader who may leave (`| head`).

    A disk that is full ends the process with status 1 and one line.
    """
    with contextlib.suppress(AttributeError):  # a notebook's stream has no codec
        sys.stdout.reconfigure(errors="backslashreplace")  # ASCII has no "×"
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the end
    except OSError as error:
        print(f"error: cannot write the result: {error.strerror}", file=sys.stderr)
        os._exit(1)  # nothing more can be flushed
