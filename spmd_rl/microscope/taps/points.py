"""Where a forward pass is looked at: after each op, at places that fused and plain networks share.

A point that one side does not have (a fused projection has no `q_proj` of its own) is left out of
the comparison, and the next point that both have speaks for it.
"""

from __future__ import annotations

from typing import NamedTuple

BEFORE = -1  # the layer of what comes before the first

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
_ORDER = {op: order for order, op in enumerate(OPS)}


class Point(NamedTuple):
    """The output of `op` in `layer`; `BEFORE` is above the first layer, the number of layers below
    the last.
    """

    layer: int
    op: str

    @property
    def place(self) -> tuple[int, int]:
        """Sorts points as the forward pass reaches them."""
        return self.layer, _ORDER[self.op]

    def __str__(self) -> str:
        inside = _ORDER["embed"] < _ORDER[self.op] < _ORDER["final_norm"]
        return f"layer {self.layer} {self.op}" if inside else self.op
