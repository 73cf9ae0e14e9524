"""Validation and saving: work beside the training."""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from labs.break_it.bug import Bug, figure
from labs.break_it.detectors import gathered


def mean_loss(model, batches):
    """The mean over all tokens of all ranks' batches. Ranks meet."""
    totals = torch.zeros(2, dtype=torch.float64)  # summed loss, tokens
    model.eval()
    with torch.no_grad():
        for batch in batches:
            tokens = (batch["labels"][:, 1:] != -100).sum()
            totals += torch.stack([model(**batch).double() * tokens, tokens.double()])
    dist.all_reduce(totals)
    return float(totals[0] / totals[1])


class ValidationPadding(Bug, name="validation-padding"):
    """Validation that counts padding twice: the sampler repeats samples to make shares even.

    3 samples on 2 ranks become 4. The result then depends on the number of ranks, and runs that
    differ in it cannot be compared. Share out without repeats, and add up before dividing.
    """

    def given(self):
        return self.model, self.validation[:3], self.batch

    def wrong(model, dataset, collate):
        """`DistributedSampler` in validation"""
        share = DistributedSampler(dataset, shuffle=False)
        loader = DataLoader(dataset, 4, sampler=share, collate_fn=collate)
        return mean_loss(model, loader), list(share), len(dataset)

    def right(model, dataset, collate):
        """`range(rank, len(dataset), ranks)`: nothing is repeated"""
        share = range(dist.get_rank(), len(dataset), dist.get_world_size())
        loader = DataLoader(dataset, 4, sampler=share, collate_fn=collate)
        return mean_loss(model, loader), list(share), len(dataset)

    def symptom(self, loss, share, size):
        everything = [self.batch(self.validation[:size])]
        error = abs(loss - mean_loss(self.model, everything))  # on every rank: the same mean
        return error, f"the validation loss is {figure(error)} off that of one process"

    def detector(loss, share, size):
        """gathers which samples were counted"""
        counted = sorted(place for places in gathered(share) for place in places)
        assert counted == list(range(size)), f"of {size} samples these were counted: {counted}"


class ModuleKeys(Bug, name="module-keys"):
    """`module.` keys: what was saved from the wrapper does not fit the model.

    All names of a wrapped model begin with `module.`; loading without looking (`strict=False`)
    then loads nothing at all and leaves random weights. Save the model inside.
    """

    def given(self):
        return DistributedDataParallel(self.model), self.folder / "model.pt"

    def wrong(model, path):
        """`model.state_dict()` of the wrapper"""
        if dist.get_rank() == 0:
            torch.save(model.state_dict(), path)
        return model, path

    def right(model, path):
        """`model.module.state_dict()`"""
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), path)
        return model, path

    def symptom(self, model, path):
        state = torch.load(path, weights_only=True) if self.rank == 0 else {}
        lost = len(state.keys() - model.module.state_dict().keys())
        return lost, f"{lost} of {len(state)} saved tensors have no place in the bare model"

    def detector(model, path):
        """compares the names in the file with those of the bare model"""
        if dist.get_rank() == 0:
            state = torch.load(path, weights_only=True)
            wrong = state.keys() ^ model.module.state_dict().keys()
            assert not wrong, f"names that only file or model has: {', '.join(sorted(wrong)[:2])} …"


def be_late():
    """Ranks are never quite in step: rank 1 comes some milliseconds later here."""
    dist.barrier()
    time.sleep(0.02 * dist.get_rank())


class EveryRankSaves(Bug, name="every-rank-saves"):
    """Saving from every rank into one file: the last writer wins, or two are mixed.

    Whoever opens the file second empties what the first one had finished; what remains is one
    rank's state, or pieces of two.
    """

    def given(self):
        torch.manual_seed(1 + self.rank)
        state = {"model": self.model.state_dict(), "random": torch.get_rng_state()}
        return state, [self.folder / f"{save}.pt" for save in range(10)]

    def wrong(state, paths):
        """`torch.save` on every rank"""
        for path in paths:
            be_late()
            torch.save(state, path)
        return state, paths

    def right(state, paths):
        """rank 0, beside the old file, renamed when complete"""
        for path in paths:
            be_late()
            if dist.get_rank() == 0:
                torch.save(state, path.with_suffix(".part"))
                path.with_suffix(".part").replace(path)
        return state, paths

    def symptom(self, state, paths):
        spoiled = 0
        for path in paths:
            try:
                EveryRankSaves.detector(state, [path])
            except Exception:  # torch raises many kinds for a mixed file
                spoiled += 1
        return spoiled, f"{spoiled} of {len(paths)} files do not hold what rank 0 saved"

    def detector(state, paths):
        """reads the files back"""
        if dist.get_rank() == 0:
            for path in paths:
                loaded = torch.load(path, weights_only=True)
                same = torch.equal(loaded["random"], state["random"])
                assert same, "read back, the file holds another rank's random state"
