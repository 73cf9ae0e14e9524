"""One training step in slow motion, rank by rank: who computes what, who sends what, and when.

    python -m torch.distributed.run --standalone --nproc_per_node=2 \\
        -m labs.explain_step --cpu --steps 2

The flags of llm_ddp_parallel_training.py (the reference) choose model, data and batch. Unless they
do, the tiny model is larger than usual, and DDP's buckets are smaller, so that several are sent and
one can see them hide behind the backward pass.

The lab runs the reference's own `training_step` and looks on from outside (observe.py). Then it
makes the same step twice more from the same weights: by hand, with one all-reduce for every
parameter after the backward pass, and in a single process that takes the samples of all ranks and
knows nothing of DDP and of `training_step` (three_ways.py). All three must agree. step.py puts the
figures together, report.py puts them into words, picture.py draws them.

It writes to runs/explain-<date>-<time>, or to --output-dir: explain.txt, the report on the last
update; explain.png, its picture; explain.json, the figures of all. The weights are not saved.
"""
