"""The order of samples: the same for any number of ranks, and the same number of steps on all."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
from conftest import settings_of
from torch.utils.data import DataLoader, DistributedSampler

import llm_ddp_parallel_training as ddp

SIZES = (0, 1, 2, 3, 4, 5, 7, 12, 13, 100)


def sampler_of(size: int, ranks: int = 1, rank: int = 0, seed: int = 0) -> ddp.EpochSampler:
    """What a rank uses, as `train` chooses it."""
    if ranks == 1:
        return ddp.EpochSampler(size, seed)
    return ddp.ShardSampler(size, seed, ranks, rank)


def order_of(size: int, epoch: int = 1, start: int = 0, ranks: int = 1, seed: int = 0) -> list[int]:
    """The order of all ranks together, taking one sample of each in turn."""
    shares = []
    for rank in range(ranks):
        sampler = sampler_of(size, ranks, rank, seed)
        sampler.set_epoch(epoch, start)
        shares.append(list(sampler))
        assert len(sampler) == len(shares[-1])
    turns = itertools.zip_longest(*shares)
    return [index for turn in turns for index in turn if index is not None]


def test_every_epoch_has_its_own_order_and_a_seed_repeats_it():
    assert order_of(100, epoch=1) != order_of(100, epoch=2)
    assert order_of(100, epoch=2) == order_of(100, epoch=2)
    assert order_of(100, epoch=1, seed=0) != order_of(100, epoch=1, seed=1)
    assert order_of(100, epoch=1) != list(range(100))


def test_an_epoch_can_be_walked_twice():
    sampler = sampler_of(10)
    sampler.set_epoch(3)
    assert list(sampler) == list(sampler)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("size", SIZES)
def test_the_ranks_together_see_every_sample_once(size, ranks):
    assert sorted(order_of(size, ranks=ranks)) == list(range(size))


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("size", SIZES)
def test_many_ranks_walk_the_order_of_one_rank(size, ranks):
    for epoch in (1, 2):
        assert order_of(size, epoch, ranks=ranks) == order_of(size, epoch)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_starting_inside_an_epoch_continues_its_order(ranks):
    whole = order_of(13, epoch=4)
    for start in range(14):
        assert order_of(13, epoch=4, start=start, ranks=ranks) == whole[start:]


def test_several_ranks_use_a_distributed_sampler():
    sampler = sampler_of(10, ranks=3, rank=2)
    assert isinstance(sampler, DistributedSampler)
    assert (sampler.num_replicas, sampler.rank) == (3, 2)
    sampler.set_epoch(1)
    assert isinstance(next(iter(sampler)), int)
    assert not isinstance(sampler_of(10), DistributedSampler)


def updates(size: int, ranks: int, rank: int, batch: int, accumulation: int, start: int = 0):
    """The updates of an epoch on one rank: a list of micro-batches for each."""
    settings = settings_of("--batch-size", batch, "--grad-accum", accumulation, "--seq-len", 4)
    sampler = sampler_of(size, ranks, rank)
    sampler.set_epoch(1, start)
    loader = DataLoader(
        ddp.IndexedTextDataset(["abc"] * size), batch_size=batch, sampler=sampler,
        collate_fn=functools.partial(ddp.tiny_collator, seq_len=4),
    )  # fmt: skip
    return list(ddp.updates_of_epoch(loader, sampler, settings))


def record_ids(update: list[dict]) -> list[int]:
    return [i for batch in update for i in batch["record_ids"].tolist()]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_all_ranks_take_the_same_number_of_steps_over_the_same_global_batches(
    ranks, batch, accumulation
):
    for size in (1, 2, 3, 5, 6, 7, 12, 13):
        everyone = [updates(size, ranks, rank, batch, accumulation) for rank in range(ranks)]
        counts = [[len(update) for update in updates_of_rank] for updates_of_rank in everyone]
        assert all(other == counts[0] for other in counts), "a rank would wait for ever"
        whole, order = batch * accumulation * ranks, order_of(size)
        assert len(counts[0]) == math.ceil(size / whole)
        assert all(1 <= count <= accumulation for count in counts[0])
        for k, shares in enumerate(zip(*everyone, strict=True)):
            seen = [i for share in shares for i in record_ids(share) if i >= 0]
            assert sorted(seen) == sorted(order[k * whole : (k + 1) * whole])
            assert all(len(b["record_ids"]) <= batch for share in shares for b in share)


def test_a_resumed_epoch_has_the_updates_that_were_left():
    whole = updates(13, 2, 1, 2, 1)
    rest = updates(13, 2, 1, 2, 1, start=8)  # two global batches of four were done
    assert [record_ids(update) for update in rest] == [record_ids(update) for update in whole[2:]]


def test_a_rank_without_samples_gets_a_row_of_padding_that_weighs_nothing():
    (update,) = updates(1, ranks=2, rank=1, batch=4, accumulation=1)
    (batch,) = update
    assert batch["record_ids"].tolist() == [-1]
    assert batch["input_ids"].tolist() == [[ddp.PAD] * 4]
    assert batch["labels"].tolist() == [[-100] * 4]
    model = ddp.TinyCausalTransformer(seq_len=4)
    loss = model(batch["input_ids"], batch["labels"])
    loss.backward()
    assert loss.item() == 0
    assert all(torch.count_nonzero(p.grad) == 0 for p in model.parameters())
