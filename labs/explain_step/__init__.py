"""One training step in slow motion, rank by rank: who computes what, who sends what, and when.

    python -m torch.distributed.run --standalone --nproc_per_node=2 \\
        -m labs.explain_step --cpu --steps 2

The flags of llm_ddp_parallel_training.py (the reference) choose model, data and batch. Unless they
do, the tiny model is larger than usual, and DDP's buckets are smaller, so that several are sent and
one can see them hide behind the backward pass.

The lab runs the reference's own `training_step` and looks on from outside (observe.py). Then it
makes the same step twice more from the same weights: by hand, with one all-reduce for every
parameter after the backward pass, and in a single process that takes the samples of all ranks and
knows nothing of DDP and of `training_step` (three_ways.py). All three must agree.

    observe.py     clock, phases, buckets: what can be seen without changing a step
    three_ways.py  DDP, by hand, in one process; and what each way costs
    step.py        all figures of one step
    report.py      the figures in words
    picture.py     a timeline, the gradients, and a trace for a viewer

It writes to runs/explain-<date>-<time>, or to --output-dir: explain.txt, the whole report;
explain.png, the picture; explain.json, all figures; trace.json, for https://ui.perfetto.dev or
chrome://tracing. The weights are not saved.
"""
