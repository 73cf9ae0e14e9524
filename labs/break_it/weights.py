"""Weights, statistics and random numbers: what must be alike on all ranks, and what must not."""

from __future__ import annotations

import multiprocessing
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from labs.break_it.bug import Bug, gradient_is_off, short_texts, weights_differ
from labs.break_it.detectors import gathered, like_one_process, same_weights
from llm_ddp_parallel_training import TinyCausalTransformer


class DifferentWeights(Bug):
    """Different initial weights: gradients are averaged by hand, but the replicas never were equal.

    DDP sends rank 0's weights to all when it is built. Without it, a seed that contains the rank,
    or no seed at all, gives every rank another model; equal updates keep them apart for ever.
    """

    name = "different-weights"

    def given(self) -> tuple:
        return (self.own_batches(2),)

    @staticmethod
    def wrong(batches):
        """the seed contains the rank, and nobody sends the weights"""
        torch.manual_seed(dist.get_rank())
        model = TinyCausalTransformer()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        for batch in batches:
            model(**batch).backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
                parameter.grad /= dist.get_world_size()
            optimizer.step()
            optimizer.zero_grad()
        return model

    @staticmethod
    def right(batches):
        """rank 0's weights are broadcast, as DDP does when it wraps"""
        torch.manual_seed(dist.get_rank())
        model = TinyCausalTransformer()
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, src=0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        for batch in batches:
            model(**batch).backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
                parameter.grad /= dist.get_world_size()
            optimizer.step()
            optimizer.zero_grad()
        return model

    symptom = weights_differ
    detector = staticmethod(same_weights)


class SameDropout(Bug):
    """The same dropout masks on all ranks: what one rank leaves out, all leave out.

    The masks come from the seed that made the weights alike, so the ranks' noise does not average
    out. Weights first, from one seed; then a seed that contains the rank.
    """

    name = "same-dropout"

    def given(self) -> tuple:
        model, self.masks = TinyCausalTransformer(dropout=0.2), []
        dropout = next(part for part in model.modules() if isinstance(part, nn.Dropout))
        dropout.register_forward_hook(lambda _, __, out: self.masks.append(out == 0))
        return DistributedDataParallel(model), *self.own_batches(1)

    @staticmethod
    def wrong(model, batch):
        """one seed for weights and dropout"""
        torch.manual_seed(0)
        model(**batch).backward()

    @staticmethod
    def right(model, batch):
        """after the weights, a seed that contains the rank"""
        torch.manual_seed(1 + dist.get_rank())
        model(**batch).backward()

    def symptom(self):
        first, second = gathered(self.masks[0])
        alike = float((first == second).float().mean())
        return alike, f"{alike:.1%} of the mask is alike on both ranks (by chance: 68 %)"

    @staticmethod
    def detector():
        """compares the seeds of the ranks' generators"""
        # Not their states: these also differ between ranks that drew unequal amounts of one stream.
        seeds = gathered(torch.initial_seed())  # on a GPU: torch.cuda.initial_seed()
        assert len(set(seeds)) == len(seeds), f"the ranks draw from the seeds {seeds}"


class NoisyTexts(Dataset):
    """Texts with random bytes left out, as an augmentation; an item is the mask of what stays."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, place: int) -> torch.Tensor:
        return torch.rand(64) > 0.2


class SameWorkerNoise(Bug):
    """Equal noise in the loaders' workers: what one rank augments, all ranks augment alike.

    A worker's seed is drawn from the generator of the process that starts it, and that was seeded
    alike on all ranks, for equal weights. So the ranks' random crops, masks and noise are equal,
    sample by sample, and N ranks see fewer variations than one.
    """

    name = "same-worker-noise"

    def given(self) -> tuple:
        if "fork" in multiprocessing.get_all_start_methods():  # workers that need not import torch
            multiprocessing.set_start_method("fork", force=True)
        return (NoisyTexts(64),)

    @staticmethod
    def wrong(dataset):
        """workers are seeded by the seed that made the weights alike"""
        torch.manual_seed(0)
        loader = DataLoader(dataset, 16, num_workers=1)
        return loader, torch.cat(list(loader))

    @staticmethod
    def right(dataset):
        """the loader gets a generator whose seed contains the rank"""
        seeds = torch.Generator().manual_seed(1 + dist.get_rank())
        loader = DataLoader(dataset, 16, num_workers=1, generator=seeds)
        return loader, torch.cat(list(loader))

    def symptom(self, loader, masks):
        first, second = gathered(masks)
        alike = float((first == second).float().mean())
        return alike, f"{alike:.1%} of the noise is alike on both ranks (by chance: 68 %)"

    @staticmethod
    def detector(loader, *noise: Any):
        """compares the seeds that the ranks' workers would get next"""
        state = torch.get_rng_state() if loader.generator is None else loader.generator.get_state()
        seeds = gathered(torch.Generator().set_state(state).initial_seed())
        assert len(set(seeds)) == len(seeds), f"the ranks' workers are seeded from {seeds}"


class NormalizedModel(nn.Module):
    """Predicts each byte from the one before, with a normalization in between."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(258, 32), norm, nn.Linear(32, 258)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids[:, :-1]).flatten(0, 1)  # (B · (T - 1), 32)
        logits = self.head(self.norm(hidden))
        return F.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100)


class BatchNormPerRank(Bug):
    """BatchNorm statistics per rank: each rank normalizes by its own part of the batch.

    The result depends on how many ranks share a batch, and with a few samples a rank the statistics
    are noise. The running means that are saved are rank 0's: DDP sends its buffers to all. On GPUs
    `nn.SyncBatchNorm.convert_sync_batchnorm(model)` before wrapping makes the statistics common.
    """

    name = "batchnorm-per-rank"

    def given(self) -> tuple:
        torch.manual_seed(0)
        own = self.batch(short_texts(self.dataset[4 * self.rank : 4 * self.rank + 4]))
        return ({key: tensor[:, :8] for key, tensor in own.items()},)  # without padding

    @staticmethod
    def wrong(batch):
        """BatchNorm under DDP"""
        model = DistributedDataParallel(NormalizedModel(nn.BatchNorm1d(32)))
        model(**batch).backward()
        return model, [batch]

    @staticmethod
    def right(batch):
        """a norm within the sample (LayerNorm, GroupNorm), or on GPUs `SyncBatchNorm`"""
        model = DistributedDataParallel(NormalizedModel(nn.LayerNorm(32)))
        model(**batch).backward()
        return model, [batch]

    symptom = gradient_is_off
    detector = staticmethod(like_one_process)


BUGS = (DifferentWeights, SameDropout, SameWorkerNoise, BatchNormPerRank)
