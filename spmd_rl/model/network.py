"""Dense decoder that trainer and engine share, over a flat dimension of tokens.

There is no batch dimension. Sequences lie end to end, and the caller's `attend` object says which
tokens see which: packed sequences for training, pages of a cache for generation. Everything else is
a function of its row.

Shape letters: T tokens (padded to the row tile inside, where the ops want it), C hidden, H heads, K
key-value heads, D head size, F intermediate, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from spmd_rl.kernels import (
    QkNorm,
    Rotary,
    TokenAttention,
    add_rms_norm,
    contract,
    embed,
    is_exact,
    linear_fp32,
    pad_rows,
    rms_norm,
    rope_table,
    unpad_rows,
)
from spmd_rl.kernels.contract import digest_of
from spmd_rl.mkl import warm_up_functions
from spmd_rl.model.fused_projections import FusedProjections, join, lay_out, project, project_gated
from spmd_rl.model.linear import Linear
from spmd_rl.model.lora import NO_LORA, LoraConfig
from spmd_rl.model.rope_frequencies import inverse_frequencies
from spmd_rl.model.spec import ModelSpec

SOURCES = tuple(
    Path(__file__).with_name(f"{name}.py")
    for name in ("network", "linear", "fused_projections", "rope_frequencies")
)


class RmsNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (normed, summed), where x is first added to the residual, if there is one."""
        if residual is None:
            return rms_norm(x, self.weight, self.eps), x
        return add_rms_norm(x, residual, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = spec.head_dim
        width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q_proj = Linear(spec.hidden_size, width, bias=spec.qkv_bias)
        self.k_proj = Linear(spec.hidden_size, kv_width, bias=spec.qkv_bias)
        self.v_proj = Linear(spec.hidden_size, kv_width, bias=spec.qkv_bias)
        self.o_proj = Linear(width, spec.hidden_size, bias=spec.out_bias)
        self.eps = spec.rms_eps
        self.q_norm = RmsNorm(spec.head_dim, spec.rms_eps) if spec.qk_norm else None
        self.k_norm = RmsNorm(spec.head_dim, spec.rms_eps) if spec.qk_norm else None
        self.joined: FusedProjections | None = None

    def forward(self, x: Tensor, rotary: Rotary, attend: TokenAttention) -> Tensor:
        projected = project(x, self.joined, self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (one.unflatten(-1, (-1, self.head_dim)) for one in projected)
        norm = QkNorm(_weight(self.q_norm), _weight(self.k_norm), self.eps)
        out = attend.rotate_and_attend(self.layer, q, k, v, norm, rotary)
        return self.o_proj(out.flatten(1))


def _weight(norm: RmsNorm | None) -> Tensor | None:
    return None if norm is None else norm.weight


class Mlp(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate_proj = Linear(spec.hidden_size, spec.intermediate_size, bias=spec.mlp_bias)
        self.up_proj = Linear(spec.hidden_size, spec.intermediate_size, bias=spec.mlp_bias)
        self.down_proj = Linear(spec.intermediate_size, spec.hidden_size, bias=spec.mlp_bias)
        self.joined: FusedProjections | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(project_gated(x, self.joined, self.gate_proj, self.up_proj))


class Block(nn.Module):
    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(spec, layer)
        self.mlp = Mlp(spec)
        self.input_layernorm = RmsNorm(spec.hidden_size, spec.rms_eps)
        self.post_attention_layernorm = RmsNorm(spec.hidden_size, spec.rms_eps)

    def forward(
        self, x: Tensor, residual: Tensor | None, rotary: Rotary, attend: TokenAttention
    ) -> tuple[Tensor, Tensor]:
        """Map (x, residual) to the next pair; a layer's input and output are residual + x."""
        normed, residual = self.input_layernorm(x, residual)
        x = self.self_attn(normed, rotary, attend)
        normed, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(normed), residual


class Decoder(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(Block(spec, layer) for layer in range(spec.num_layers))
        self.norm = RmsNorm(spec.hidden_size, spec.rms_eps)

    def forward(self, tokens: Tensor, rotary: Rotary, attend: TokenAttention) -> Tensor:
        x, residual = embed(tokens, self.embed_tokens.weight), None
        for layer in self.layers:
            x, residual = layer(x, residual, rotary, attend)
        return self.norm(x, residual)[0]


class CausalLM(nn.Module):
    """Decoder with a language-model head; parameters have their Hugging Face names.

    A tied head has no parameter of its own. Build the model under `torch.device("meta")` to
    allocate nothing. The host makes the rotary table in fp32 at its first use on a device, and all
    later passes share it. With a rank in `lora`, layers have adapters.
    """

    def __init__(self, spec: ModelSpec, lora: LoraConfig = NO_LORA) -> None:
        super().__init__()
        self.spec = spec
        self.lora = lora
        self.model = Decoder(spec)
        self.lm_head = (
            None if spec.tie_embeddings else Linear(spec.hidden_size, spec.vocab_size, bias=False)
        )
        for name, module in list(self.named_modules()):
            if isinstance(module, Linear) and name.rpartition(".")[2] in lora.projections:
                module.adapt(lora)
        self._rope: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def contract(
        self, device: torch.device, dtype: torch.dtype, attention_split: int = 0
    ) -> dict[str, str | int]:
        """Return the numeric contract of the forward pass on `device`: the kernels', and its own.

        The rotary table is made by the host's cosine, whose bits differ between kinds of processor.
        """
        table = hashlib.sha256(
            b"".join(half.cpu().numpy().tobytes() for half in self.rope_tables(device))
        )
        facts = contract(device, dtype, self.spec.head_dim, attention_split)
        own = {
            "network": digest_of(SOURCES),
            "model": self.spec.arithmetic,
            "rotary_table": table.hexdigest()[:16],
        }
        adapters = {"lora": self.lora.arithmetic} if self.lora.rank else {}
        return facts | own | adapters

    def forward(
        self, tokens: Tensor, positions: Tensor, attend: TokenAttention, rows: Tensor | None = None
    ) -> Tensor:
        """Return hidden states after the last norm or, with `rows`, the logits of those tokens.

        Logits are part of the forward pass so that a sharding wrapper also gathers the head.
        Shape: tokens and positions [T] int64, rows [M] int64; returns [T, C], or [M, V] fp32.
        """
        num_tokens = tokens.shape[0]
        # Only the contract's kernels take any number of rows.
        if torch.is_grad_enabled() or not is_exact(self.head):
            tokens, positions = pad_rows(tokens), pad_rows(positions)
        rotary = Rotary(positions, *self.rope_tables(positions.device))
        hidden = unpad_rows(self.model(tokens, rotary, attend), num_tokens)
        return hidden if rows is None else self.logits(hidden.index_select(0, rows))

    def logits(self, hidden: Tensor) -> Tensor:
        """Shape: hidden [M, C]; returns [M, V] fp32."""
        return linear_fp32(hidden, self.head)

    @property
    def head(self) -> Tensor:
        """The weight [V, C] of the product that turns hidden states into logits."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

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
        for _, projections in self._joinable():
            lay_out(projections)

    def fuse_projections(self) -> None:
        """Use one product for several projections wherever their weights lie next to each other."""
        for module, projections in self._joinable():
            module.joined = join(projections)

    def _joinable(self) -> Iterator[tuple[Attention | Mlp, list[Linear]]]:
        for module in self.modules():
            if isinstance(module, Attention):
                yield module, [module.q_proj, module.k_proj, module.v_proj]
            elif isinstance(module, Mlp):
                yield module, [module.gate_proj, module.up_proj]

    def rope_tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of all positions, [P, D/2] fp32 each."""
        if device not in self._rope:
            # The table must allow gradients later, even if an engine asks first.
            warm_up_functions()
            with torch.device("cpu"), torch.inference_mode(False):
                cos, sin = rope_table(
                    inverse_frequencies(self.spec),
                    self.spec.max_positions,
                    self.spec.rope.attention_factor,
                )
                self._rope[device] = (cos.to(device), sin.to(device))
        return self._rope[device]
