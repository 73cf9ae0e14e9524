"""A complete training loop with DistributedDataParallel (DDP) to copy: plain PyTorch, and exact.

    python labs/ddp_in_100_lines.py
    python -m torch.distributed.run --standalone --nproc_per_node=2 labs/ddp_in_100_lines.py

torchrun numbers the processes that it starts: the ranks. Each trains a replica of the model on its
share of the samples. Sums are added up and divided once, so any number of ranks learns the same.
"""

import os
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, DistributedSampler

EPOCHS, LEARNING_RATE, CLIP = 3, 1e-2, 1.0
BATCH, ACCUMULATE = 4, 2  # samples in a micro-batch of a rank, and its micro-batches in an update
DROPOUT, SEED = 0.1, 1  # without dropout, equal RANKS × BATCH × ACCUMULATE give equal losses
CHECKPOINT = Path("ddp_in_100_lines.pt")  # a run goes on from it; delete it to begin again
IGNORE = -100  # a target that does not count
RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
GPU = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # one for each rank
DEVICE = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if GPU else "cpu")

# YOUR DATA: two Datasets of (inputs, targets), and such a pair in which no target counts.
LINES = [torch.tensor(list(line)) for line in Path(os.__file__).read_bytes().splitlines() if line]
TOKENS = nn.utils.rnn.pad_sequence(LINES, batch_first=True, padding_value=IGNORE)
SAMPLES = list(zip(TOKENS[:, :-1].clamp(min=0), TOKENS[:, 1:]))  # a byte predicts the next one
TRAIN, VALIDATION = SAMPLES[10:100], SAMPLES[:10]
EMPTY = (TRAIN[0][0], torch.full_like(TRAIN[0][1], IGNORE))


# With S_rj the summed loss of micro-batch j on rank r, and n targets in all of them together, the
# gradient to follow is that of the mean: G = Σ_r Σ_j ∇S_rj / n. Backward passes add up over j, but
# DDP averages over the N ranks: it leaves g = Σ_r Σ_j ∇S_rj / N. Hence G = g · N / n.
def add_up(model, batches):
    """→ summed loss and number of targets, over all ranks. In training mode, .grad then holds g."""
    sums = torch.zeros(2, dtype=torch.float64, device=DEVICE)
    for j, (inputs, targets) in enumerate(batches, start=1):
        # In no_sync, which must hold the forward pass too, gradients add up on their own rank.
        local = model.training and RANKS > 1 and j < ACCUMULATE
        with model.no_sync() if local else nullcontext(), torch.set_grad_enabled(model.training):
            logits = model(inputs.to(DEVICE)).flatten(0, -2)  # [B·T, classes]
            targets = targets.to(DEVICE).flatten()
            loss = nn.functional.cross_entropy(logits, targets, reduction="sum")
            if model.training:
                loss.backward()  # ranks meet in the last one: DDP averages what has added up
        sums += torch.stack([loss.detach(), (targets != IGNORE).sum()])
    if RANKS > 1:
        distributed.all_reduce(sums)  # ranks meet
    return sums.tolist()


def main():
    if RANKS > 1:  # plain python starts a single process, which needs no group
        distributed.init_process_group("nccl" if GPU else "gloo")  # ranks meet
    torch.manual_seed(SEED)  # the same initial weights on all ranks
    # YOUR MODEL: any nn.Module from inputs [B, …] to logits [B, …, classes]
    bare = nn.Sequential(nn.Embedding(256, 64), nn.Dropout(DROPOUT), nn.Linear(64, 256)).to(DEVICE)
    optimizer = torch.optim.AdamW(bare.parameters(), LEARNING_RATE)
    saved = torch.load(CHECKPOINT, "cpu", weights_only=True) if CHECKPOINT.exists() else {}
    if saved:  # each rank has read it; to the CPU, or else all copies would land on GPU 0
        bare.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    model = nn.parallel.DistributedDataParallel(bare) if RANKS > 1 else bare  # ranks meet
    # Empty samples round up to whole updates. DistributedSampler would repeat real ones instead.
    train = TRAIN + [EMPTY] * (-len(TRAIN) % (RANKS * BATCH * ACCUMULATE))
    sampler = DistributedSampler(train, RANKS, RANK, seed=SEED)  # equally many for each rank
    loader = DataLoader(train, BATCH * ACCUMULATE, sampler=sampler)
    validation_loader = DataLoader(VALIDATION, BATCH, sampler=range(RANK, len(VALIDATION), RANKS))
    for epoch in range(saved.get("epochs", 0), EPOCHS):
        sampler.set_epoch(epoch)  # another order in each epoch, the same on all ranks
        torch.manual_seed(SEED + 1 + epoch * RANKS + RANK)  # but another dropout on each rank
        for inputs, targets in loader:
            loss, n = add_up(model, zip(inputs.split(BATCH), targets.split(BATCH)))
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad *= RANKS / n  # from g to G
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)  # by now the same on all ranks
            optimizer.step()
            optimizer.zero_grad()
            if RANK == 0:
                print(f"epoch {epoch + 1}: loss {loss / n:.6f}")
        loss, n = add_up(bare.eval(), validation_loader)  # not DDP, which may wait for other ranks
        bare.train()
        if RANK == 0:
            print(f"epoch {epoch + 1}: validation loss {loss / n:.6f}")
            saved = {"model": bare.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**saved, "epochs": epoch + 1}, f"{CHECKPOINT}.new")
            os.replace(f"{CHECKPOINT}.new", CHECKPOINT)  # a kill while saving spares the last one
    if RANKS > 1:
        time.sleep(0.2)  # Gloo's threads still need the interpreter: without it, they abort
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
