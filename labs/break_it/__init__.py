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

What is shown is what runs: the functions are printed from their own source. They know nothing of
this lab, and all of them can be copied. bug.py says what a bug is, runner.py makes it.
"""

from labs.break_it import data, gradients, sync, weights, loop, wrapper, saving  # noqa: F401, I001
from labs.break_it.bug import BUGS as BUGS
