"""The classic bugs of distributed training, each made for real on two ranks of this machine's CPU.

    python -m labs.break_it
    python -m labs.break_it --bug mean-of-means
    python -m labs.break_it --all

Most of these bugs raise no error. The loss falls, only more slowly, or the run is fine until it is
resumed, so each one is shown in four parts:

    the code     as a diff: `-` is the wrong version, `+` the right one, unmarked lines are in both
    symptom      a number measured with the wrong version and with the right one; or where each rank
                 waits or fails
    detector     a few lines to copy into a test or a training script
    verdict      what the detector said to the wrong version; it must be silent on the right one

What is shown is what runs: the functions are printed from their own source. They are plain
functions that know nothing of this lab, and all of them can be copied.

    bug.py        what a bug is, and what all of them train: a small model on a few sentences
    detectors.py  the detectors that serve several bugs
    data.py, gradients.py, sync.py, weights.py, loop.py, wrapper.py, saving.py    the bugs
    runner.py     two fresh processes for each version
    picture.py    six symptoms, wrong and right
"""

from __future__ import annotations

from labs.break_it import data, gradients, loop, saving, sync, weights, wrapper
from labs.break_it.bug import Bug

BUGS: dict[str, type[Bug]] = {
    bug.name: bug
    for part in (data, gradients, sync, weights, loop, wrapper, saving)
    for bug in part.BUGS
}
