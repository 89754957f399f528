"""Value head: a number for each hidden state, in place of a language model's logits.

Its weight has the name that transformers gives it in a model for sequence classification with one
label, which is what reward models are published as.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from spmd_rl.kernels.contract import digest_of
from spmd_rl.model.formats.coded_cache import Exponents
from spmd_rl.model.network import CausalLM
from spmd_rl.model.parts.part import WHOLE, ModelPart
from spmd_rl.model.scorer import ScoredTokens, hidden_states
from spmd_rl.model.spec import ModelSpec

SOURCES = (Path(__file__),)


class ValueHead(nn.Module):
    """The product of a hidden state with one vector, in fp32."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, hidden_size))

    def forward(self, hidden: Tensor) -> Tensor:
        """Shape: hidden [M, C]; returns [M] fp32."""
        return (hidden.float() * self.weight.float()).sum(1)


class ValueModel(CausalLM):
    """Decoder with a value head. It has no head of a language model, and no logits."""

    def __init__(
        self, spec: ModelSpec, exponents: Exponents | None = None, part: ModelPart = WHOLE
    ) -> None:
        super().__init__(spec, exponents=exponents, part=part)
        self.lm_head = None
        self.score = ValueHead(spec.hidden_size)

    def contract(
        self, device: torch.device, dtype: torch.dtype, attention_split: int = 0
    ) -> dict[str, str | int]:
        facts = super().contract(device, dtype, attention_split)
        return facts | {"value_head": digest_of(SOURCES)}


class ValueScorer(nn.Module):
    """The module that FSDP wraps as its root: a value for the state before each scored token."""

    def __init__(self, model: ValueModel, attention_split: int = 0) -> None:
        super().__init__()
        self.model = model
        self.attention_split = attention_split

    def forward(self, batch: ScoredTokens) -> Tensor:
        """Shape: returns [M] fp32."""
        hidden = hidden_states(self.model, batch, self.attention_split)
        # Without a token to score, the gradient of no values still reaches every parameter.
        values = self.model.score(hidden.index_select(0, batch.rows))
        if (count := self.model.part.count) > 1 and values.requires_grad:
            # each rank has the gradient of all values, and these are added up
            values.register_hook(lambda grad: grad / count)
        return values
