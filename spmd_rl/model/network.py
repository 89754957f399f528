"""Dense decoder that trainer and engine share, over a flat dimension of tokens.

There is no batch dimension. Sequences lie end to end, and the caller's `attend` object says which
tokens see which: packed sequences for training, pages of a cache for generation. Everything else is
a function of its row.

Shape letters: T tokens (padded to the row tile inside, where the ops want it), C hidden, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spmd_rl.kernels import (
    Rotary,
    TokenAttention,
    embed,
    is_exact,
    linear_fp32,
    pad_rows,
    unpad_rows,
)
from spmd_rl.kernels.linear.row_shards import shared_logits
from spmd_rl.kernels.linear.shard_gradients import all_rows, gathered_columns
from spmd_rl.kernels.rowwise.embedding import embed_shared
from spmd_rl.kernels.vocab.lm_head import HeadRows
from spmd_rl.model.formats.coded_cache import Exponents, cache_rule, require_keys
from spmd_rl.model.fused_projections import FusableLayer, join, lay_out
from spmd_rl.model.layers.block_module import Block
from spmd_rl.model.layers.norm_module import RmsNorm
from spmd_rl.model.linear import Linear
from spmd_rl.model.lora import NO_LORA, LoraConfig
from spmd_rl.model.model_contract import model_contract, rope_tables
from spmd_rl.model.parts.part import WHOLE, ModelPart, vocab_part_rows
from spmd_rl.model.parts.shared_products import share_products
from spmd_rl.model.spec import ModelSpec


class Decoder(nn.Module):
    """A part of the layers of `spec`, between tokens and the last norm."""

    def __init__(self, spec: ModelSpec, part: ModelPart) -> None:
        super().__init__()
        self.part = part
        self._first_token, end = part.embedded(spec)
        self.embed_tokens = nn.Embedding(end - self._first_token, spec.hidden_size)
        blocks = enumerate(part.spec(spec).blocks)
        self.layers = nn.ModuleList(
            Block(block, spec.rms_eps, number, part.rows) for number, block in blocks
        )
        self.norm = RmsNorm(spec.hidden_size, spec.rms_eps, spec.zero_centred)

    def forward(self, tokens: Tensor, rotary: Rotary, attend: TokenAttention) -> Tensor:
        x, residual = self._embedded(tokens), None
        for layer in self.layers:
            x, residual = layer(x, residual, rotary, attend)
        return all_rows(self.norm(x, residual)[0], self.part.rows)

    def _embedded(self, tokens: Tensor) -> Tensor:
        weight, rows = self.embed_tokens.weight, self.part.rows
        if rows is None:
            return embed(tokens, weight)
        return embed_shared(tokens, weight, self._first_token, rows)


class CausalLM(nn.Module):
    """Decoder with a language-model head; parameters have their Hugging Face names.

    A tied head has no parameter of its own. Build the model under `torch.device("meta")` to
    allocate nothing. The host makes the rotary table in fp32 at its first use on a device, and all
    later passes share it. With a rank in `lora`, layers have adapters. With `exponents`, attention
    takes keys and values rounded to 8 bits. Ranks may each have a `part` of the model; they call it
    together, and get the same.
    Raises: ConfigError for `exponents` of layers that keep other arrays.
    """

    def __init__(
        self,
        spec: ModelSpec,
        lora: LoraConfig = NO_LORA,
        exponents: Exponents | None = None,
        part: ModelPart = WHOLE,
    ) -> None:
        super().__init__()
        if exponents is not None:
            require_keys(spec)
        self.spec = spec
        self.exponents = exponents
        self.lora = lora
        self.part = part
        self.own_spec = part.spec(spec)  # of the layers that are here
        self.model = Decoder(spec, part)
        self._first_row, end = part.vocabulary(spec)
        num_rows = end - self._first_row
        self.lm_head = (
            None if spec.tie_embeddings else Linear(spec.hidden_size, num_rows, bias=False)
        )
        share_products(self, spec, part)
        adapted = lora.of_model(spec).projections
        for name, module in list(self.named_modules()):
            if isinstance(module, Linear) and name.rpartition(".")[2] in adapted:
                module.adapt(lora.rank, lora.scale)
        self._rope: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The decoder layers that are here, in order."""
        return list(self.model.layers)

    def contract(
        self, device: torch.device, dtype: torch.dtype, attention_split: int = 0
    ) -> dict[str, str | int]:
        """Return the numeric contract of the forward pass on `device`."""
        facts = model_contract(self.spec, self.rope_tables(device), device, dtype, attention_split)
        cache = {} if self.exponents is None else {"cache": cache_rule(self.exponents)}
        lora = self.lora.of_model(self.spec)
        return facts | cache | ({"lora": lora.arithmetic} if lora.rank else {})

    def forward(
        self, tokens: Tensor, positions: Tensor, attend: TokenAttention, rows: Tensor | None = None
    ) -> Tensor:
        """Return hidden states after the last norm or, with `rows`, the logits of those tokens.

        Logits are part of the forward pass so that a sharding wrapper also gathers the head.
        Shape: tokens and positions [T] int64, rows [M] int64; returns [T, C], or [M, V] fp32.
        """
        num_tokens = tokens.shape[0]
        # Only the contract's kernels take any number of rows, and ranks need equally many.
        if torch.is_grad_enabled() or not is_exact(self.head) or self.part.trains:
            tokens, positions = pad_rows(tokens), pad_rows(positions)
        rotary = Rotary(positions, *self.rope_tables(positions.device))
        hidden = unpad_rows(self.model(tokens, rotary, attend), num_tokens)
        return hidden if rows is None else self.logits(hidden.index_select(0, rows))

    def logits(self, hidden: Tensor) -> Tensor:
        """Shape: hidden [M, C]; returns [M, V] fp32."""
        own = self.own_logits(hidden)
        if self.part.exchange is None:
            return own
        missing = vocab_part_rows(self.spec, self.part.count) - own.shape[1]  # in the last part
        whole = gathered_columns(F.pad(own, (0, missing)), self._first_row, self.part.exchange)
        return whole[:, : self.spec.vocab_size].contiguous()

    def own_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the rows of the vocabulary that are here. Shape: as `logits`."""
        if self.spec.row_shards == 1:
            return linear_fp32(hidden, self.head)
        return shared_logits(hidden, self.head, vocab_part_rows(self.spec, self.spec.row_shards))

    @property
    def head(self) -> Tensor:
        """The weight [V, C] of the product that turns hidden states into logits.

        Of a part of the model, its rows.
        """
        if self.lm_head is not None:
            return self.lm_head.weight
        if self.part.count == 1 or self.part.trains:
            return self.model.embed_tokens.weight
        return self.model.embed_tokens.weight[slice(*self.part.vocabulary(self.spec))]

    @property
    def head_rows(self) -> HeadRows:
        """The rows of the vocabulary that `head` has."""
        return HeadRows(self._first_row, self.spec.vocab_size)

    def adapters(self) -> Iterator[Linear]:
        """Yield the layers that adapters consist of."""
        for module in self.modules():
            if isinstance(module, Linear) and module.lora_A is not None:
                yield module.lora_A
            if isinstance(module, Linear) and module.lora_B is not None:
                yield module.lora_B

    @contextmanager
    def base_alone(self) -> Iterator[None]:
        """Compute without adapters while the context lasts. The bits are those of a model without
        any.
        """
        layers = [one for one in self.modules() if isinstance(one, Linear) and one.is_adapted]
        for layer in layers:
            layer.is_switched_off = True
        try:
            yield
        finally:
            for layer in layers:
                layer.is_switched_off = False

    def pack_projections(self) -> None:
        """Move the weights that can be fused next to each other, before anything refers to them."""
        for layer in self._fusable():
            lay_out(layer.fusable())

    def fuse_projections(self) -> None:
        """Use one product for several projections wherever their weights lie next to each other."""
        for layer in self._fusable():
            layer.joined = join(layer.fusable())

    def _fusable(self) -> Iterator[FusableLayer]:
        return (one for one in self.modules() if isinstance(one, FusableLayer))

    def rope_tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of all positions, [P, D/2] fp32 each."""
        if device not in self._rope:
            # The copy must allow gradients later, even if an engine asks first.
            with torch.inference_mode(False):
                cos, sin = rope_tables(self.spec)
                self._rope[device] = (cos.to(device), sin.to(device))
        return self._rope[device]
