"""Model shapes: how large the parts of a transformer are, and what they cost in FLOPs and parameters."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, sqrt
from typing import Any, Literal

from hetctl.comm.contract.errors import ConfigError
from hetctl.trainer.families.registry import family_of
from hetctl.trainer.model.adapters import Adapters
from hetctl.trainer.model.block_formats import Quantised

MAX_LAYERS = 2_000  # twice those of DeepNet (arXiv 2203.00555); plans of far more take minutes
MAX_SIZE = 2**31 - 1  # of anything else: libraries count in 32 bits


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the length a model was first trained on."""

    kind: Literal["linear", "llama3", "yarn", "longrope"]
    factor: float
    original_max_seq_len: int = 8192
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # yarn, longrope: cos and sin are multiplied by it
    short_factors: tuple[float, ...] = ()  # longrope: of each frequency, for samples up to the original length
    long_factors: tuple[float, ...] = ()  # and for longer ones

    def validate(self, where: str, *, theta: float) -> None:
        """Raise ConfigError for numbers with which positions cannot be computed."""
        for key in ("factor", *_USED.get(self.kind, ())):
            if not 0 < getattr(self, key) < inf:
                raise ConfigError(f"{where}: {key} must be finite and positive, found {getattr(self, key)}")
        if self.kind == "llama3" and not self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(f"{where}: high_freq_factor must be larger than low_freq_factor ({self.low_freq_factor})")
        if not all(0 < factor < inf for factor in (*self.short_factors, *self.long_factors)):
            raise ConfigError(f"{where}: the factors of longrope must be finite and positive")
        if self.kind == "yarn" and theta <= 1:
            raise ConfigError(f"{where}: rope_theta must be larger than 1 for yarn, found {theta}")


# What else a kind of scaling computes with.
_USED = {
    "llama3": ("original_max_seq_len", "low_freq_factor", "high_freq_factor"),
    "yarn": ("original_max_seq_len", "beta_fast", "beta_slow", "attention_factor"),
    "longrope": ("original_max_seq_len", "attention_factor"),
}


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer. Counts are exact; FLOPs count a multiply-add as two."""

    name: str
    family: str  # a key of families.FAMILIES
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    head_dim: int = 0  # 0: hidden / heads
    max_seq_len: int = 8192
    rope_theta: float = 10000.0
    rms_eps: float = 1e-5
    tied_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False  # of the attention's output projection
    mlp_bias: bool = False
    rope_scaling: RopeScaling | None = None
    rotated: float = 1.0  # the share of a head's values that turn with their position
    unrotated: tuple[int, ...] = ()  # layers that know no positions
    local_rope_theta: float | None = None  # of layers with a window, which nothing stretches; None: as all
    windows: tuple[
        int, ...
    ] = ()  # of each layer, the tokens that one attends to, itself the last; 0, or none at all: all
    attention_scale: float | None = None  # of queries times keys; None: head_dim ** -0.5
    attention_cap: float = 0.0  # c tanh(x / c) of them, if not 0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and MLP add
    logit_divisor: float = 1.0
    logit_cap: float = 0.0  # c tanh(x / c) of the logits, if not 0
    adapters: Adapters | None = None  # None: all weights are trained

    def __post_init__(self) -> None:
        if self.head_dim == 0:
            object.__setattr__(self, "head_dim", self.hidden // max(1, self.heads))

    def validate(self) -> None:
        """Raise ConfigError unless the sizes can form a model, and its positions and norms can be computed."""
        where = f"model '{self.name}'"
        for key in ("layers", "hidden", "heads", "kv_heads", "intermediate", "vocab", "max_seq_len", "head_dim"):
            size, most = getattr(self, key), MAX_LAYERS if key == "layers" else MAX_SIZE
            if size < 1:
                raise ConfigError(f"{where}: {key} must be at least 1, found {size}")
            if size > most:
                raise ConfigError(f"{where}: {key} must be at most {most}, found {size}")
        if not 0 < self.rope_theta < inf:
            raise ConfigError(f"{where}: rope_theta must be finite and positive, found {self.rope_theta}")
        if not 0 <= self.rms_eps < inf:
            raise ConfigError(f"{where}: rms_norm_eps must be finite and at least 0, found {self.rms_eps}")
        if self.rope_scaling is not None:
            self.rope_scaling.validate(where, theta=self.rope_theta)
        for key in ("attention_cap", "logit_cap"):
            if not 0 <= getattr(self, key) < inf:
                raise ConfigError(f"{where}: {key} must be finite and at least 0, found {getattr(self, key)}")
        if min(self.windows, default=0) < 0:
            raise ConfigError(f"{where}: windows must be at least 0 tokens, found {min(self.windows)}")
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"model '{self.name}': {self.heads} heads do not divide by {self.kv_heads} key-value heads"
            )
        if self.rotary_dim < 2 or self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            found = self.head_dim if self.rotated == 1.0 else f"{self.rotated:g} of {self.head_dim}"
            raise ConfigError(f"model '{self.name}': rotary embeddings need an even head size, found {found}")
        scaling = self.rope_scaling
        if scaling and scaling.kind == "longrope":
            counts = {len(scaling.short_factors), len(scaling.long_factors)}
            if counts != {self.rotary_dim // 2}:
                raise ConfigError(f"{where}: longrope needs {self.rotary_dim // 2} short and as many long factors")

    @property
    def rotary_dim(self) -> int:
        """Values of each head that turn with their position."""
        return int(self.head_dim * self.rotated)

    def window_of(self, layer: int) -> int:
        """The tokens that each token of a layer attends to; 0: all before it."""
        return self.windows[layer] if self.windows else 0

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """The linear layers of a block: (values out, values in)."""
        q, kv, inner = self.heads * self.head_dim, self.kv_heads * self.head_dim, (self.intermediate, self.hidden)
        attention = {"q_proj": (q, self.hidden), "k_proj": (kv, self.hidden), "v_proj": (kv, self.hidden)}
        gate = {"gate_proj": inner} if self.gated else {}
        return attention | {"o_proj": (self.hidden, q)} | gate | {"up_proj": inner, "down_proj": inner[::-1]}

    @property
    def adapted(self) -> tuple[str, ...]:
        """The projections that have adapters."""
        return self.adapters.targets if self.adapters else ()

    @property
    def quantised(self) -> Quantised | None:
        """How the weights of projections are kept, which then are frozen; None: as they are."""
        return self.adapters.quantised if self.adapters else None

    @property
    def attention_parameters(self) -> int:
        """Q, K, V and output projections of one block (with biases and norms where the family has them)."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return self.hidden * (q + 2 * kv) + q * self.hidden + self._attention_biases + sum(self.qk_norm_sizes)

    @property
    def qk_norm_sizes(self) -> tuple[int, ...]:
        """Values of the norms of queries and of keys; empty where a block has none."""
        kind, size = family_of(self.family).qk_norm, self.head_dim
        if not kind:
            return ()
        return (size, size) if kind == "head" else (self.heads * size, self.kv_heads * size)

    @property
    def heads_normed_together(self) -> bool:
        """Whether queries (and keys) are normed over all heads' values at once."""
        return family_of(self.family).qk_norm == "whole"

    @property
    def _attention_biases(self) -> int:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return (q + 2 * kv if self.qkv_bias else 0) + (self.hidden if self.out_bias else 0)

    @property
    def mlp_parameters(self) -> int:
        """Gate (where the family has one), up and down projections of one block."""
        inner = 2 if self.gated else 1
        biases = inner * self.intermediate + self.hidden if self.mlp_bias else 0
        return (inner + 1) * self.hidden * self.intermediate + biases

    @property
    def norm_parameters(self) -> int:
        """Of one norm."""
        return (2 if family_of(self.family).norm == "layer" else 1) * self.hidden

    @property
    def block_norms(self) -> int:
        """Norms of hidden states in one block."""
        return len(family_of(self.family).block_norms)

    @property
    def positions(self) -> int:
        """Rows of a learned table of positions; 0 where they are rotary."""
        before = family_of(self.family).learned_positions
        return 0 if before is None else self.max_seq_len + before

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate beside its up projection."""
        return family_of(self.family).gated

    @property
    def block_parameters(self) -> int:
        return self.attention_parameters + self.mlp_parameters + self.block_norms * self.norm_parameters

    @property
    def embedding_parameters(self) -> int:
        return (self.vocab + self.positions) * self.hidden

    @property
    def head_parameters(self) -> int:
        """Final norm and LM head; the head's matrix counts even when it is tied (it is computed with)."""
        return self.vocab * self.hidden + self.norm_parameters

    @property
    def parameters(self) -> int:
        """All distinct parameters; a tied head is counted once, with the embedding."""
        head = self.norm_parameters if self.tied_embeddings else self.head_parameters
        return self.layers * self.block_parameters + self.embedding_parameters + head

    def block_flops(self, seq_len: int) -> float:
        """Forward FLOPs of one block per token: 2 per weight, plus causal attention; of the average layer."""
        weights = self.attention_parameters + self.mlp_parameters
        return 2.0 * weights + 4.0 * self.heads * self.head_dim * self.attended(seq_len)

    def attended(self, seq_len: int) -> float:
        """Tokens that one attends to, on average over a sample and over layers: half the sample without windows."""
        spans = [min(w, seq_len) if w else seq_len for w in self.windows] or [seq_len]
        return sum(w - w * w / (2.0 * seq_len) for w in spans) / len(spans)

    def head_flops(self) -> float:
        """Forward FLOPs of norm + LM head per token (the matrix product dominates)."""
        return 2.0 * self.vocab * self.hidden

    def token_flops(self, seq_len: int) -> float:
        """Forward + backward FLOPs per token, without recomputation: three times the forward's.

        Frozen weights take two thirds of that, having no gradients; adapters, which do, are not counted.
        """
        every = 3.0 * (self.layers * self.block_flops(seq_len) + self.head_flops())
        if self.adapters is None:
            return every
        weights = self.layers * (self.attention_parameters + self.mlp_parameters)
        return every - 2.0 * weights - self.head_flops()


def _llama(name: str, layers: int, hidden: int, heads: int, kv: int, inter: int, vocab: int, **more: Any) -> ModelShape:
    return ModelShape(name, "llama", layers, hidden, heads, kv, inter, vocab, **more)


def _qwen2(name: str, layers: int, hidden: int, heads: int, kv: int, inter: int, vocab: int) -> ModelShape:
    extra: dict[str, Any] = {"qkv_bias": True, "rope_theta": 1e6, "rms_eps": 1e-6, "max_seq_len": 32768}
    return ModelShape(name, "qwen2", layers, hidden, heads, kv, inter, vocab, **extra)


def _qwen3(name: str, layers: int, hidden: int, heads: int, inter: int, *, tied: bool = False) -> ModelShape:
    extra: dict[str, Any] = {"rope_theta": 1e6, "rms_eps": 1e-6, "max_seq_len": 40960, "tied_embeddings": tied}
    return ModelShape(name, "qwen3", layers, hidden, heads, 8, inter, 151936, 128, **extra)


def _gemma(
    name: str, family: str, layers: int, hidden: int, heads: int, kv: int, vocab: int, **more: Any
) -> ModelShape:
    same: dict[str, Any] = {"rms_eps": 1e-6, "tied_embeddings": True, "embedding_scale": sqrt(hidden)}
    same |= {"attention_scale": 0.0625}
    return ModelShape(name, family, layers, hidden, heads, kv, 4 * hidden, vocab, 256, **same, **more)


def _opt(name: str, layers: int, hidden: int, heads: int, *, tied: bool = True) -> ModelShape:
    more: dict[str, Any] = {"max_seq_len": 2048, "tied_embeddings": tied}
    more |= dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), True)
    return ModelShape(name, "opt", layers, hidden, heads, heads, 4 * hidden, 50272, **more)


def _gpt(name: str, layers: int, hidden: int, heads: int, vocab: int = 51200, *, tied: bool = False) -> ModelShape:
    more: dict[str, Any] = {"max_seq_len": 2048, "tied_embeddings": tied}
    return ModelShape(name, "gpt", layers, hidden, heads, heads, 4 * hidden, vocab, **more)


_ROWS = (
    _llama("demo", 8, 128, 4, 2, 352, 257, max_seq_len=1024),
    _llama("llama-160m", 12, 768, 12, 12, 3072, 32000, max_seq_len=2048),
    _llama("llama-1b", 16, 2048, 32, 8, 8192, 128256, rope_theta=5e5, tied_embeddings=True),
    _llama("llama-1b-untied", 16, 2048, 32, 8, 8192, 32000),
    _llama("llama-3b", 28, 3072, 24, 8, 8192, 128256, rope_theta=5e5, tied_embeddings=True),
    _llama("llama-8b", 32, 4096, 32, 8, 14336, 128256, rope_theta=5e5),
    _llama("llama-70b", 80, 8192, 64, 8, 28672, 128256, rope_theta=5e5),
    _llama("llama2-7b", 32, 4096, 32, 32, 11008, 32000, max_seq_len=4096),
    _llama("llama2-13b", 40, 5120, 40, 40, 13824, 32000, max_seq_len=4096),
    _qwen2("qwen2-7b", 28, 3584, 28, 4, 18944, 152064),
    _qwen2("qwen2-72b", 80, 8192, 64, 8, 29568, 152064),
    _qwen3("qwen3-0.6b", 28, 1024, 16, 3072, tied=True),
    _qwen3("qwen3-4b", 36, 2560, 32, 9728, tied=True),
    _qwen3("qwen3-8b", 36, 4096, 32, 12288),
    _qwen3("qwen3-32b", 64, 5120, 64, 25600),
    ModelShape("mistral-7b", "mistral", 32, 4096, 32, 8, 14336, 32768, max_seq_len=32768, rope_theta=1e6),
    _gemma("gemma2-9b", "gemma2", 42, 3584, 16, 8, 256000, windows=(4096, 0) * 21, attention_cap=50.0, logit_cap=30.0),
    _gemma(
        "gemma3-4b",
        "gemma3_text",
        34,
        2560,
        8,
        4,
        262208,
        max_seq_len=131072,
        rope_theta=1e6,
        rope_scaling=RopeScaling("linear", 8.0, 131072),
        local_rope_theta=1e4,
        windows=((1024,) * 5 + (0,)) * 5 + (1024,) * 4,
    ),
    ModelShape("phi4", "phi3", 40, 5120, 40, 10, 17920, 100352, max_seq_len=16384, rope_theta=250000.0),
    ModelShape("olmo2-7b", "olmo2", 32, 4096, 32, 32, 11008, 100352, max_seq_len=4096, rope_theta=5e5, rms_eps=1e-6),
    ModelShape(
        "smollm3-3b",
        "smollm3",
        36,
        2048,
        16,
        4,
        11008,
        128256,
        max_seq_len=65536,
        rope_theta=5e6,
        rms_eps=1e-6,
        tied_embeddings=True,
        unrotated=tuple(range(3, 36, 4)),
    ),
    ModelShape(
        "granite3-8b",
        "granite",
        40,
        4096,
        32,
        8,
        12800,
        49155,
        max_seq_len=131072,
        rope_theta=1e7,
        tied_embeddings=True,
        embedding_scale=12.0,
        residual_scale=0.22,
        attention_scale=0.0078125,
        logit_divisor=16.0,
    ),
    _opt("opt-125m", 12, 768, 12),
    _opt("opt-350m", 24, 1024, 16, tied=False),  # as Sailor has it: norms first, embeddings as wide as the rest
    _opt("opt-1.3b", 24, 2048, 32),
    _opt("opt-2.7b", 32, 2560, 32),
    _opt("opt-6.7b", 32, 4096, 32),
    _opt("opt-13b", 40, 5120, 40),
    _opt("opt-30b", 48, 7168, 56),
    _opt("opt-66b", 64, 9216, 72),
    _gpt("gpt-neo-1.3b", 24, 2048, 16, 50304, tied=True),
    _gpt("gpt-neo-2.7b", 32, 2560, 20, 50304, tied=True),
    _gpt("gpt-3-6.7b", 32, 4096, 32, tied=True),
    _gpt("gpt-3-13b", 40, 5120, 40, tied=True),
    _gpt("gpt-3-175b", 96, 12288, 96, tied=True),
    _gpt("gpt-1.7b", 24, 2304, 24),
    _gpt("gpt-3.6b", 30, 3072, 32),
    _gpt("gpt-7.5b", 36, 4096, 32),
    _gpt("gpt-39b", 48, 8192, 64),
)
SHAPES: dict[str, ModelShape] = {row.name: row for row in _ROWS}
