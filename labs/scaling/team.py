"""What is measured, and teams of 1, 2, … processes that take turns.

Machines are noisy and drift. So each number of ranks has a team, started once, and all measurements
take turns in short blocks, round after round, while the other teams sleep.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import math
from collections.abc import Sequence

import torch.distributed as dist

from labs.scaling.rank import Rank


@dataclasses.dataclass(frozen=True)
class Block:
    """One thing that is measured, by one team.

    `what` is "weak" or "strong" scaling; "no_sync", without the all-reduce of the gradients;
    "independent", processes that know nothing of each other; "all cores", one process with the
    threads of all; "link", plain all-reduces.
    """

    what: str
    ranks: int
    batch: int  # sequences per rank
    threads: int


def plan(teams: Sequence[int], batch: int, threads: int, cores: int) -> list[Block]:
    """All that is measured; `teams` are numbers of ranks, `batch` sequences per rank."""
    blocks = []
    whole = batch * math.lcm(*teams)  # the global batch of strong scaling, a multiple of all ranks
    for ranks in teams:
        blocks.append(Block("weak", ranks, batch, threads))
        blocks.append(Block("strong", ranks, whole // ranks, threads))
        if ranks > 1:
            blocks += [Block(w, ranks, batch, threads) for w in ("no_sync", "independent", "link")]
        elif threads < cores:
            blocks.append(Block("all cores", 1, batch, cores))
    return blocks


def take_turns(port: int, flags: Sequence[str], blocks: Sequence[Block], rounds: int) -> dict:
    """What every rank of every team does; what this one measured, by block, a list of rounds.

    Block k may begin when the store at `port` holds "turn k"; who ends it sets "turn k + 1". Round
    0 warms up: it finds out how many steps make a block.
    """
    rank = Rank(flags)
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=False, wait_for_workers=False,
        timeout=datetime.timedelta(days=1),  # the lab ends all teams when one fails
    )  # fmt: skip
    teams, turn = len({block.ranks for block in blocks}), itertools.count()
    found: dict[Block, list] = {block: [] for block in blocks if block.ranks == rank.ranks}
    leads = rank.launch.rank == 0
    rank.meet()
    if rank.ranks == blocks[-1].ranks:
        rank.introduce()
    if leads and store.add("ready", 1) == teams:
        store.set("turn 0", "")
    for number in range(rounds + 1):
        # Every other round runs backwards: what drifts one way does not favour the last.
        for block in blocks if number % 2 else reversed(blocks):
            now = next(turn)
            if block in found:
                store.wait([f"turn {now}"])
                result = rank.measure(block, found[block])
                if number:
                    found[block].append(result)
                rank.meet()
                if leads:
                    store.set(f"turn {now + 1}", "")
    return {"found": found, "bytes": rank.bytes}
