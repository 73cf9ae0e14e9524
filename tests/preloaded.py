"""What the server that forks test processes imports once: the reference and all it loads late."""

import matplotlib.figure
import PIL.PngImagePlugin
import spoiled
import torch._dynamo

import llm_ddp_parallel_training

__all__ = ["PIL", "llm_ddp_parallel_training", "matplotlib", "spoiled", "torch"]
