"""The decoder-only transformers that hetctl trains (see `trainer/families`), cut into stages.

Parameters carry their Hugging Face names, whatever stage they live on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetctl.comm.contract.plan import Span
from hetctl.trainer.families.family import NORMS
from hetctl.trainer.families.registry import FAMILIES
from hetctl.trainer.model.activations import HostActivations, Recompute, recomputing
from hetctl.trainer.model.adapters import Adapters, is_trained
from hetctl.trainer.model.attention import Attention, SeenTokens, positions_in
from hetctl.trainer.model.dropout import of_layer
from hetctl.trainer.model.head_loss import Bend, LossKernel, Weigh, head_loss, loss_and_gradient
from hetctl.trainer.model.norms import norm_of
from hetctl.trainer.model.rotary import rotary_tables
from hetctl.trainer.model.shapes import ModelShape
from hetctl.trainer.model.split_backward import Projection, WeightGradients
from hetctl.trainer.model.tensor_cuts import BY_COLUMNS, cut_of
from hetctl.trainer.model.tensor_parallel import ALONE, SharedVocabulary, TensorShare, embed, enter

EMBEDDING, POSITIONS = "model.embed_tokens.weight", "model.embed_positions.weight"
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


class MLP(nn.Module):
    """SwiGLU, or as the family has it; of the intermediate values, this rank's share."""

    def __init__(self, shape: ModelShape, tensor: TensorShare = ALONE) -> None:
        super().__init__()
        self.tensor = tensor
        inner = shape.intermediate // tensor.degree
        family = FAMILIES[shape.family]
        self.activation = ACTIVATIONS[family.activations[0]]
        self.gate_proj = Projection(shape.hidden, inner, bias=shape.mlp_bias) if family.gated else None
        self.up_proj = Projection(shape.hidden, inner, bias=shape.mlp_bias)
        self.down_proj = Projection(inner, shape.hidden, bias=shape.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        x = enter(x, self.tensor)
        if self.gate_proj is None:
            inner = self.activation(self.up_proj(x))
        else:
            inner = self.activation(self.gate_proj(x)) * self.up_proj(x)
        out: Tensor = self.down_proj(inner, self.tensor)
        return out


class Block(nn.Module):
    """One transformer layer: attention and MLP, each between its norms and beside a residual."""

    def __init__(
        self, shape: ModelShape, layer: int, *, recompute: Recompute = "none", tensor: TensorShare = ALONE
    ) -> None:
        super().__init__()
        self.recompute, self.residual_scale = recompute, shape.residual_scale
        self.self_attn = Attention(shape, layer, tensor)
        self.mlp = MLP(shape, tensor)
        family = FAMILIES[shape.family]
        self.norms = NORMS[family.norms]
        self.dropping: tuple[Projection, ...] = ()
        for name in family.block_norms:
            self.add_module(name, norm_of(shape))

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, documents: Tensor | None = None, draws: Tensor | None = None
    ) -> Tensor:
        return recomputing(self._dropping, x, cos, sin, documents, draws, recompute=self.recompute)

    def _dropping(self, x: Tensor, cos: Tensor, sin: Tensor, documents: Tensor | None, draws: Tensor | None) -> Tensor:
        """What is computed again drops the same; a family's own block need not know."""
        for projection in self.dropping:
            projection.draws = draws
        return self._forward(x, cos, sin, documents)

    def _forward(self, x: Tensor, cos: Tensor, sin: Tensor, documents: Tensor | None) -> Tensor:
        before, after, before_mlp, after_mlp = self.norms
        x = self._added(x, self._normed(after, self.self_attn(self._normed(before, x), cos, sin, documents)))
        return self._added(x, self._normed(after_mlp, self.mlp(self._normed(before_mlp, x))))

    def _normed(self, name: str, x: Tensor) -> Tensor:
        return getattr(self, name)(x) if name else x

    def _added(self, x: Tensor, more: Tensor) -> Tensor:
        return x + more if self.residual_scale == 1.0 else x + self.residual_scale * more


class StageModel(nn.Module):
    """The layers [first, past_last) of a model, with the embedding before and norm + LM head after where due.

    Of each layer it is this rank's share, where a tensor group computes it.
    """

    def __init__(
        self, shape: ModelShape, layers: Span, *, recompute: Recompute = "none", tensor: TensorShare = ALONE
    ) -> None:
        super().__init__()
        self.shape, self.tensor = shape, tensor
        self.first, self.past_last = layers
        block = (FAMILIES[shape.family].block or (lambda: Block))()
        self.layers = nn.ModuleDict(
            {str(i): block(shape, i, recompute=recompute, tensor=tensor) for i in range(*layers)}
        )
        if shape.adapters:
            for one in self.layers.values():
                _adapt(one, shape.adapters, tensor)
        words = cut_of(EMBEDDING, shape, degree=tensor.degree, index=tensor.index)
        self.embed_tokens = nn.Embedding(words.shape[0], shape.hidden) if self.is_first else None
        learned = shape.positions and self.is_first
        self.embed_positions = nn.Embedding(shape.positions, shape.hidden) if learned else None
        self.norm = norm_of(shape) if self.is_last else None
        self.lm_head = nn.Linear(shape.hidden, words.shape[0], bias=False) if self.is_last else None
        if shape.tied_embeddings and self.embed_tokens is not None and self.lm_head is not None:
            self.lm_head.weight = self.embed_tokens.weight
        self.loss_kernel: LossKernel = loss_and_gradient
        self._words: dict[str, Any] = {}  # what the loss must know of words that are shared out
        if tensor.degree > 1:
            self.loss_kernel = SharedVocabulary(shape.vocab, tensor)
            self._words = {"total": tensor.sum, "words": words.most}
        self.bend = Bend(shape.logit_divisor, shape.logit_cap)
        self._rotary: dict[bool, tuple[Tensor, Tensor]] = {}  # of layers with a window, and of the others
        self.before_unit: Callable[[int], None] = _nothing  # 0 embedding, i + 1 block i, layers + 1 norm and head
        self.before_backward: Callable[[int], None] = _nothing
        self.host_activations: HostActivations | None = None  # None: they stay on the device
        self._continued: range | None = None  # while a text is continued: places seen, up to the most there will be

    @property
    def is_first(self) -> bool:
        return self.first == 0

    @property
    def is_last(self) -> bool:
        return self.past_last == self.shape.layers

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in; bytes of quantised weights are not."""
        return next(p.dtype for p in self.parameters() if p.is_floating_point())

    def forward(self, x: Tensor, documents: Tensor | None = None, draws: Tensor | None = None) -> Tensor:
        """Token ids [batch, seq] (first stage) or hidden states -> hidden states, or its words' logits (last stage).

        Where rows hold several `documents` ([batch, seq]: which one a token is in), each is as if it stood alone.
        `draws` ([batch]) say what adapters' dropout leaves out of each sample (see `dropout.py`); None: nothing.
        """
        hidden = self.body(x, documents, draws)
        if self.lm_head is None:
            return hidden
        return self.bend(self.lm_head(hidden))

    def body(self, x: Tensor, documents: Tensor | None = None, draws: Tensor | None = None) -> Tensor:
        """The same without the LM head: hidden states, normed on the last stage."""
        hidden, positions = x, self._positions(x, documents)
        if self.embed_tokens is not None:
            self.before_unit(0)
            hidden = embed(x, self.embed_tokens.weight, vocabulary=self.shape.vocab, tensor=self.tensor)
            if self.shape.embedding_scale != 1.0:
                hidden = hidden * hidden.new_tensor(self.shape.embedding_scale)
            if self.embed_positions is not None:
                before = self.shape.positions - self.shape.max_seq_len
                rows = self.embed_positions.weight[before : before + self._length(x)]
                hidden = hidden + (rows if positions is None else rows[positions])
        numbers = range(self.first, self.past_last)
        tables = {local: self.rotary(hidden, local, positions) for local in {self.is_local(n) for n in numbers}}
        saving = self._saving(*(table for pair in self._rotary.values() for table in pair))
        for number, block in zip(numbers, self.layers.values(), strict=True):
            self.before_unit(number + 1)
            with saving():
                own = None if draws is None else of_layer(draws, number)
                hidden = block(hidden, *tables[self.is_local(number)], documents, own)
            hidden = self._announced(hidden, number + 1)
        if self._continued is not None:
            self._continued = self._continued[x.shape[1] :]
        if self.norm is not None:
            self.before_unit(self.shape.layers + 1)
            hidden = self._announced(self.norm(hidden), self.shape.layers + 1)
        return hidden

    def _saving(self, *tables: Tensor) -> Callable[[], AbstractContextManager[None]]:
        """Around each block of a forward pass: where it saves its activations."""
        if self.host_activations is None or not torch.is_grad_enabled():
            return nullcontext
        self.host_activations.keep(*tables)
        self.host_activations.begin()
        return self.host_activations.unit

    def _announced(self, out: Tensor, unit: int) -> Tensor:
        """The unit's output, which says so when backward comes to it."""
        if out.requires_grad and self.before_backward is not _nothing:
            out.register_hook(lambda _: self.before_backward(unit))
        return out

    def loss(
        self,
        x: Tensor,
        targets: Tensor,
        documents: Tensor | None = None,
        draws: Tensor | None = None,
        *,
        scale: float,
        weigh: Weigh | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(loss times `scale`, to call backward on; token losses): what the last stage makes, as `head_loss` does."""
        assert self.lm_head is not None
        weight = self.lm_head.weight
        hidden = self.body(x, documents, draws)
        about = {"kernel": self.loss_kernel, "bend": self.bend, "weigh": weigh, **self._words}
        return head_loss(hidden, weight, targets, scale=scale, **about)

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Inside, the model's own weights compute alone."""
        projections = [module for module in self.modules() if isinstance(module, Projection)]
        for projection in projections:
            projection.adapted = False
        try:
            yield
        finally:
            for projection in projections:
                projection.adapted = True

    def defer_weight_gradients(self, deferred: WeightGradients) -> None:
        """Let `deferred` make the weight gradients of all projections from now on."""
        for module in self.modules():
            if isinstance(module, Projection):
                module.deferred = deferred

    def named(self) -> dict[str, nn.Parameter]:
        """Hugging Face name -> parameter, in layer order; a tied head goes by the embedding's name."""
        found: dict[str, nn.Parameter] = {}
        seen: set[int] = set()
        for name, parameter in self.named_parameters(remove_duplicate=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                found[self.full_name(name)] = parameter
        return found

    def full_name(self, name: str) -> str:
        """The Hugging Face name. A tied head is the embedding's own weight, wherever it lives."""
        if name == "lm_head.weight":
            return EMBEDDING if self.shape.tied_embeddings else name
        return "model." + name

    @contextmanager
    def continuing(self, most: int) -> Iterator[None]:
        """Inside, each call goes on where the one before ended, with what its layers saw: `most` tokens in all."""
        attentions = [module for module in self.modules() if isinstance(module, Attention)]
        self._continued = range(most)
        for attention in attentions:
            attention.seen = SeenTokens()
        try:
            yield
        finally:
            self._continued = None
            for attention in attentions:
                attention.seen = None

    def _length(self, x: Tensor) -> int:
        """Positions that there are in all: of a row, or of a text that is continued."""
        return self._continued.stop if self._continued is not None else x.shape[1]

    def _positions(self, x: Tensor, documents: Tensor | None) -> Tensor | None:
        """Of each token [batch or 1, seq]; None where they are those of the row."""
        if self._continued is not None:
            return torch.arange(self._continued.start, self._continued.start + x.shape[1], device=x.device)[None]
        return None if documents is None else positions_in(documents)

    def is_local(self, layer: int) -> bool:
        """Whether a layer looks back over a window."""
        return self.shape.window_of(layer) > 0

    def rotary(self, like: Tensor, local: bool, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """cos and sin for the hidden states of layers with a window or of the others, made once; at these `positions`
        ([batch, seq]), if they are not those of the row."""
        held, seq = self._rotary.get(local), self._length(like)
        if held is None or held[0].shape[0] != seq or held[0].device != like.device or held[0].dtype != like.dtype:
            held = rotary_tables(seq, self.shape, local=local, dtype=like.dtype, device=like.device)
            self._rotary[local] = held
        cos, sin = held
        return held if positions is None else (cos[positions].unsqueeze(1), sin[positions].unsqueeze(1))


def shapes_of(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of all parameters that a model trains, a tied head by the embedding's name."""
    with torch.device("meta"):
        model = StageModel(shape, (0, shape.layers))
    named = model.named().items()
    return {name: tuple(parameter.shape) for name, parameter in named if is_trained(name, shape.adapters)}


def _adapt(block: nn.Module, adapters: Adapters, tensor: TensorShare) -> None:
    """Give a block's projections their adapters, and keep their weights as the adapters ask."""
    found = []
    for path, module in list(block.named_modules()):
        name = path.split(".")[-1]
        if isinstance(module, Projection) and name in adapters.targets:
            low = tensor.index * module.in_features if name in BY_COLUMNS else 0
            module.adapt(adapters, name, low=low)
            found.append(module)
        if isinstance(module, Projection) and adapters.quantised:
            module.quantise(adapters.quantised)
    block.dropping = tuple(found) if adapters.dropout else ()  # type: ignore[assignment]


def _nothing(unit: int) -> None:
    """Whole weights on this rank need no preparation."""
