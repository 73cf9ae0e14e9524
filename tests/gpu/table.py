"""Rows of the table, and what they decide."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass
class Row:
    """A line of the table; the verdict is pass, FAIL, met, missed or, for a note, empty."""

    check: str
    found: str
    wanted: str = ""
    verdict: str = ""

    def __str__(self) -> str:
        return f"| {self.check:47} | {self.found:66} | {self.wanted:30} | {self.verdict:7} |"


HEADER = (
    f"{Row('check', 'found', 'wanted', 'verdict')}\n|{'-' * 49}|{'-' * 68}|{'-' * 32}|{'-' * 9}|"
)


def must(check: str, found: str, wanted: str, good: bool) -> Row:
    """Decides about the exit status."""
    return Row(check, found, wanted, "pass" if good else "FAIL")


def aim(check: str, found: str, wanted: str, good: bool) -> Row:
    """Is reported, and decides about nothing."""
    return Row(check, found, wanted, "met" if good else "missed")


def status_of(rows: Sequence[Row]) -> int:
    """0 unless a check on exactness failed, or did not come to its end."""
    return 1 if any(row.verdict == "FAIL" for row in rows) else 0


def summary(rows: Sequence[Row]) -> str:
    """How many rows have which verdict."""
    verdicts = [row.verdict for row in rows]
    kinds = [kind for kind in ("pass", "FAIL", "met", "missed") if kind in verdicts]
    return ", ".join(f"{verdicts.count(kind)} {kind}" for kind in kinds)
