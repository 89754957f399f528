"""Points of a forward pass: the outputs of ops, as far as fused and plain networks share them.

A comparison leaves out a point that one side lacks: a fused projection has no `q_proj` of its own.
A difference there shows at the next point that both sides have.
"""

from __future__ import annotations

from typing import NamedTuple

BEFORE = -1  # the layer of ops before the first layer

OPS = {
    "embed": "embedding",
    "input_norm": "residual add and norm before attention",
    "q_proj": "query projection",
    "k_proj": "key projection",
    "v_proj": "value projection",
    "q": "queries, as attention takes them: normed and turned",
    "k": "keys, as attention takes them: normed and turned",
    "v": "values",
    "attention": "causal attention",
    "o_proj": "output projection of attention",
    "post_norm": "residual add and norm before the MLP",
    "gate_proj": "gate projection",
    "up_proj": "up projection",
    "act": "SiLU(gate) * up",
    "down_proj": "down projection",
    "final_norm": "last residual add and norm",
    "logits": "language-model head",
    "logprob": "log-probability",
}
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "logits")
_OP_ORDER = {op: order for order, op in enumerate(OPS)}


class Point(NamedTuple):
    """The output of `op` in `layer`.

    The layer is `BEFORE` before the first one, and the number of layers after the last one.
    """

    layer: int
    op: str

    @property
    def order(self) -> tuple[int, int]:
        """A key that sorts points as the forward pass reaches them."""
        return self.layer, _OP_ORDER[self.op]

    def __str__(self) -> str:
        inside = _OP_ORDER["embed"] < _OP_ORDER[self.op] < _OP_ORDER["final_norm"]
        return f"layer {self.layer} {self.op}" if inside else self.op
