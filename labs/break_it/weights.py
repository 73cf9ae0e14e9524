"""Weights, statistics and random numbers: what must be alike on all ranks, and what must not."""

from __future__ import annotations

import multiprocessing

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from labs.break_it.bug import Bug, gradient_is_off, weights_differ
from labs.break_it.detectors import gathered, like_one_process, same_weights
from llm_ddp_parallel_training import TinyCausalTransformer


class DifferentWeights(Bug, name="different-weights"):
    """Different initial weights: gradients are averaged by hand, but the replicas never were equal.

    DDP sends rank 0's weights to all when it is built. Without it, a seed that contains the rank,
    or no seed at all, gives every rank another model; equal updates keep them apart for ever.
    """

    def given(self):
        return self.own_batches(1)

    def wrong(batch):
        """the seed contains the rank, and nobody sends the weights"""
        torch.manual_seed(dist.get_rank())
        model = TinyCausalTransformer()
        model(**batch).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        torch.optim.AdamW(model.parameters(), lr=3e-4).step()
        return model

    def right(batch):
        """rank 0's weights are broadcast, as DDP does when it wraps"""
        torch.manual_seed(dist.get_rank())
        model = TinyCausalTransformer()
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, src=0)
        model(**batch).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        torch.optim.AdamW(model.parameters(), lr=3e-4).step()
        return model

    symptom = weights_differ
    detector = same_weights


class SameDropout(Bug, name="same-dropout"):
    """The same dropout masks on all ranks: what one rank leaves out, all leave out.

    The masks come from the seed that made the weights alike, so the ranks' noise does not average
    out. Weights first, from one seed; then a seed that contains the rank.
    """

    def given(self):
        model, self.masks = TinyCausalTransformer(dropout=0.2), []
        dropout = next(part for part in model.modules() if isinstance(part, nn.Dropout))
        dropout.register_forward_hook(lambda _, __, out: self.masks.append(out == 0))
        return DistributedDataParallel(model), *self.own_batches(1)

    def wrong(model, batch):
        """one seed for weights and dropout"""
        torch.manual_seed(0)
        model(**batch).backward()

    def right(model, batch):
        """after the weights, a seed that contains the rank"""
        torch.manual_seed(1 + dist.get_rank())
        model(**batch).backward()

    def symptom(self):
        return alike(self.masks[0], "mask")

    def detector():
        """compares the seeds of the ranks' generators"""
        # Not their states: these also differ between ranks that drew unequal amounts of one stream.
        seeds = gathered(torch.initial_seed())  # on a GPU: torch.cuda.initial_seed()
        assert len(set(seeds)) == len(seeds), f"the ranks draw from the seeds {seeds}"


def alike(mask: torch.Tensor, what: str) -> tuple[float, str]:
    """The symptom of equal random numbers. Of bits that are set with 0.8, 0.8² + 0.2² are alike."""
    first, second = gathered(mask)
    share = float((first == second).float().mean())
    return share, f"{share:.1%} of the {what} is alike on both ranks (by chance: 68 %)"


def augmented(texts):
    """A batch of texts with random bytes left out, as an augmentation: the mask of what stays."""
    return torch.rand(len(texts), 64) > 0.2


class SameWorkerNoise(Bug, name="same-worker-noise"):
    """Equal noise in the loaders' workers: what one rank augments, all ranks augment alike.

    A worker's seed is drawn from the generator of the process that starts it, and that was seeded
    alike on all ranks, for equal weights. So N ranks see fewer variations than one.
    """

    def given(self):
        if "fork" in multiprocessing.get_all_start_methods():  # workers that need not import torch
            multiprocessing.set_start_method("fork", force=True)
        return (range(64),)

    def wrong(dataset):
        """workers are seeded by the seed that made the weights alike"""
        torch.manual_seed(0)
        loader = DataLoader(dataset, 16, num_workers=1, collate_fn=augmented)
        return loader, torch.cat(list(loader))

    def right(dataset):
        """the loader gets a generator whose seed contains the rank"""
        seeds = torch.Generator().manual_seed(1 + dist.get_rank())
        loader = DataLoader(dataset, 16, num_workers=1, collate_fn=augmented, generator=seeds)
        return loader, torch.cat(list(loader))

    def symptom(self, loader, masks):
        return alike(masks, "noise")

    def detector(loader, *noise):
        """compares the seeds that the ranks' workers would get next"""
        state = torch.get_rng_state() if loader.generator is None else loader.generator.get_state()
        seeds = gathered(torch.Generator().set_state(state).initial_seed())
        assert len(set(seeds)) == len(seeds), f"the ranks' workers are seeded from {seeds}"


class NormalizedModel(nn.Module):
    """Predicts each byte from the one before, with a normalization in between."""

    def __init__(self, norm):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(258, 32), norm, nn.Linear(32, 258)

    def forward(self, input_ids, labels):
        hidden = self.embed(input_ids[:, :-1]).flatten(0, 1)  # (B · (T - 1), 32)
        logits = self.head(self.norm(hidden))
        return F.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100)


class BatchNormPerRank(Bug, name="batchnorm-per-rank"):
    """BatchNorm statistics per rank: each rank normalizes by its own part of the batch.

    The result depends on how many ranks share a batch, and the running means that are saved are
    rank 0's. On GPUs `nn.SyncBatchNorm.convert_sync_batchnorm(model)` before wrapping helps.
    """

    def given(self):
        torch.manual_seed(0)
        own = self.batch(self.dataset[4 * self.rank : 4 * self.rank + 4], cut=8)
        return ({key: tensor[:, :8] for key, tensor in own.items()},)  # without padding

    def wrong(batch):
        """BatchNorm under DDP"""
        model = DistributedDataParallel(NormalizedModel(nn.BatchNorm1d(32)))
        model(**batch).backward()
        return model, [batch]

    def right(batch):
        """a norm within the sample (LayerNorm, GroupNorm), or on GPUs `SyncBatchNorm`"""
        model = DistributedDataParallel(NormalizedModel(nn.LayerNorm(32)))
        model(**batch).backward()
        return model, [batch]

    symptom = gradient_is_off
    detector = like_one_process
