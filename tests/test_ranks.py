"""Ranks that a lab starts on this machine: their results, or the one cause of failure."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist

from labs.shared import ranks
from llm_ddp_parallel_training import RunError, UserError, gather, read_launcher


def work(what: str) -> tuple[int, list[int]]:
    """Rank and the ranks that it met; rank 1 first does `what`."""
    launch = read_launcher()
    print(f"rank {launch.rank} prints", flush=True)
    dist.init_process_group("gloo")
    if launch.rank == 1:
        if what == "fail":
            raise ValueError("a reason")
        if what == "mistake":
            raise UserError("--flag 3: give 2")
        if what == "exit":
            sys.exit(3)
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "hang":
            time.sleep(600)
    return launch.rank, gather(launch.rank, launch)


def test_what_each_rank_returns_comes_back_in_rank_order():
    assert ranks.run_ranks(work, 3, ("meet",)) == [(rank, [0, 1, 2]) for rank in range(3)]


def test_several_groups_side_by_side_know_nothing_of_each_other():
    assert ranks.run_ranks(work, (1, 2), ("meet",)) == [(0, [0]), (0, [0, 1]), (1, [0, 1])]


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("fail", "rank 1 of 2 failed: a reason"),
        ("exit", "rank 1 of 2 ended with status 3"),
        ("die", "rank 1 of 2 was ended by SIGKILL"),
    ],
)
def test_the_rank_that_failed_is_named_and_not_the_one_that_lost_it(what, says, tmp_path):
    with pytest.raises(RunError, match=f"^{says}$"):
        ranks.run_ranks(work, 2, (what,), log=tmp_path / "log")


def test_a_users_mistake_stays_one(tmp_path):
    with pytest.raises(UserError, match=r"^--flag 3: give 2$"):
        ranks.run_ranks(work, 2, ("mistake",), log=tmp_path / "log")


def test_what_ranks_print_goes_to_the_log(tmp_path):
    log = tmp_path / "log"
    ranks.watch_ranks(work, 2, ("fail",), log=log)
    text = log.read_text("utf-8")
    assert "rank 0 prints" in text and "rank 1 prints" in text and "ValueError: a reason" in text


def test_a_rank_that_hangs_is_ended_in_time():
    endings = ranks.watch_ranks(work, 2, ("hang",), seconds=4)
    assert [ending.failure for ending in endings] == ["had not ended after 4 s"] * 2


def test_the_others_may_be_left_to_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "GRACE_S", 0)  # otherwise rank 0 would not live long enough
    endings = ranks.watch_ranks(survive, 2, go_on=True, log=tmp_path / "log")
    assert (endings[0].value, endings[0].failure) == ("alive", None)
    assert endings[1].status == -signal.SIGKILL and endings[1].killed


def survive() -> str:
    """Rank 1 dies, and rank 0 has work for a while."""
    if read_launcher().rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.manual_seed(0)
    time.sleep(2)
    return "alive"
