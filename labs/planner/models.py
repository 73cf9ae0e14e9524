"""The shape of a causal Transformer, and how many parameters each part of it has."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence


class PlanError(Exception):
    """The question makes no sense; its text is the one line that the user sees."""


@dataclasses.dataclass(frozen=True)
class Model:
    """The shape of a causal Transformer; `parameters` counts it exactly."""

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    gated: bool = True  # three feed-forward matrices (SwiGLU), else two
    tied: bool = False  # the head is the embedding
    positions: int = 0  # learned position embeddings
    biases: str = ""  # "qkv", or "all"

    @property
    def kv_width(self) -> int:
        return self.width // self.heads * self.kv_heads

    @property
    def matrices(self) -> int:
        """Parameters of a layer that tensor parallelism divides."""
        attention = 2 * self.width * (self.width + self.kv_width)
        bias = (self.width + 2 * self.kv_width) * bool(self.biases)
        bias += self.ffn * (self.biases == "all")
        return attention + bias + (3 if self.gated else 2) * self.width * self.ffn

    @property
    def norms(self) -> int:
        """Parameters of a layer that it does not divide; with `biases` all, LayerNorms."""
        return (6 if self.biases == "all" else 2) * self.width

    def stage_layers(self, pipeline: int, stage: int) -> int:
        """Layers of a stage; the last ones get what is left over."""
        return self.layers * (stage + 1) // pipeline - self.layers * stage // pipeline

    def part(self, tensor: int = 1, pipeline: int = 1, stage: int = 0) -> int:
        """Parameters on one rank of a pipeline stage."""
        layers = self.stage_layers(pipeline, stage)
        divided, whole = layers * self.matrices, layers * self.norms
        if stage == 0:
            divided, whole = divided + self.vocab * self.width, whole + self.positions * self.width
        if stage == pipeline - 1:
            if not self.tied or pipeline > 1:
                divided += self.vocab * self.width
            whole += (2 if self.biases == "all" else 1) * self.width
        return math.ceil(divided / tensor) + whole

    @property
    def parameters(self) -> int:
        return self.part()

    def adapted(self, targets: Sequence[str]) -> list[tuple[int, int]]:
        """(inputs, outputs) of the layers named. Raises `PlanError` for unknown names."""
        h, kv, f = self.width, self.kv_width, self.ffn
        sizes = {
            "q_proj": (h, h), "k_proj": (h, kv), "v_proj": (h, kv), "o_proj": (h, h),
            "gate_proj": (h, f), "up_proj": (h, f), "down_proj": (f, h),
        }  # fmt: skip
        unknown = [name for name in targets if name not in sizes]
        if unknown or not targets:
            raise PlanError(
                f"--lora-targets: unknown {', '.join(unknown) or '(nothing)'}; known: "
                + ", ".join(sizes)
            )
        return [sizes[name] for name in sorted(set(targets))]

    def lora(self, r: int, targets: Sequence[str]) -> int:
        """Parameters of adapters A [r, in] and B [out, r] on the layers named (Hu et al. 2021)."""
        return self.layers * r * sum(i + o for i, o in self.adapted(targets))


def tiny_model(width: int, layers: int, heads: int, seq_len: int) -> Model:
    """The `TinyCausalTransformer` of llm_ddp_parallel_training.py."""
    return Model(
        "tiny", layers, width, heads, heads, 4 * width, 258, gated=False, positions=seq_len
    )


def gpt(name: str, layers: int, width: int, heads: int, vocab: int, positions: int) -> Model:
    """GPT-2's layout: LayerNorm and biases, learned positions, the head tied to the embedding."""
    kind = {"gated": False, "tied": True, "positions": positions, "biases": "all"}
    return Model(name, layers, width, heads, heads, 4 * width, vocab, **kind)


MODELS = {  # shapes as in the models' public config files; gpt-*: Narayanan et al. 2021, table 1
    m.name: m
    for m in (
        Model("qwen2.5-0.5b", 24, 896, 14, 2, 4864, 151936, tied=True, biases="qkv"),
        Model("qwen2.5-7b", 28, 3584, 28, 4, 18944, 152064, biases="qkv"),
        Model("llama-2-7b", 32, 4096, 32, 32, 11008, 32000),
        Model("llama-2-13b", 40, 5120, 40, 40, 13824, 32000),
        Model("llama-2-70b", 80, 8192, 64, 8, 28672, 32000),
        Model("llama-3.1-8b", 32, 4096, 32, 8, 14336, 128256),
        Model("llama-3.1-70b", 80, 8192, 64, 8, 28672, 128256),
        Model("llama-3.1-405b", 126, 16384, 128, 8, 53248, 128256),
        gpt("gpt-2-124m", 12, 768, 12, 50257, 1024),
        gpt("gpt-3-175b", 96, 12288, 96, 51200, 2048),
        gpt("gpt-18b", 40, 6144, 48, 51200, 2048),
        gpt("gpt-39b", 48, 8192, 64, 51200, 2048),
        gpt("gpt-76b", 60, 10240, 80, 51200, 2048),
        gpt("gpt-146b", 80, 12288, 96, 51200, 2048),
        gpt("gpt-310b", 96, 16384, 128, 51200, 2048),
        gpt("gpt-530b", 105, 20480, 128, 51200, 2048),
        gpt("gpt-1t", 128, 25600, 160, 51200, 2048),
    )
}


def model_of_size(parameters: float, vocab: int = 32000) -> Model:
    """A Llama-like shape for a number of parameters N.

    Width is 128 · layers, as in Llama 2 7B and 13B, and N ≈ 12 · layers · width² (Kaplan et al.
    2020, section 2.1) gives the layers; the feed-forward width then makes the count come out.
    """
    layers = (parameters / (12 * 128**2)) ** (1 / 3)
    layers = max(1, round(layers) if layers < 12 else 8 * round(layers / 8))
    width = 128 * layers
    without = Model("", layers, width, layers, layers, 0, vocab).parameters
    ffn = round((parameters - without) / (3 * layers * width))
    if ffn < width:
        raise PlanError(
            f"--params {parameters:g} is too few for a vocabulary of {vocab:,}; give --vocab, or "
            "a shape by --model tiny --d-model --layers"
        )
    return Model(f"{parameters / 1e9:g} billion", layers, width, layers, layers, ffn, vocab)
