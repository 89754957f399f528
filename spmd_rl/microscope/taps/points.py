"""Points of a forward pass: the outputs of ops, as far as fused and plain networks share them.

Which points a block has, its layers say. A comparison leaves out a point that one side lacks: a
fused projection has none of its own. A difference there shows at the next point that both have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from spmd_rl.model.layers.block import BlockSpec
from spmd_rl.model.layers.gqa import Gqa
from spmd_rl.model.layers.layer import PointDef
from spmd_rl.model.layers.mlp import Mlp
from spmd_rl.model.spec import ModelSpec

BEFORE = -1  # the layer of ops before the first layer

_OUTER = [
    PointDef("embed", "embedding", ()),
    PointDef("final_norm", "last residual add and norm", ()),
    PointDef("logits", "language-model head", (), ("final_norm",), is_product=True),
    PointDef("logprob", "log-probability", (), ("logits",)),
]
BEFORE_LAYERS, AFTER_LAYERS = ("embed",), ("final_norm", "logits", "logprob")
# words for all ops that a model of this process has, as a forward pass reaches them
OPS: dict[str, str] = {one.op: one.words for one in _OUTER}
_ORDER: dict[str, int] = {}


def know_points(blocks: Sequence[BlockSpec]) -> None:
    """Note the ops of these blocks, so that their points have words and an order."""
    names, words = list(OPS), dict(OPS)
    for block in dict.fromkeys(blocks):
        place = names.index(BEFORE_LAYERS[-1])
        for one in block.points():
            if one.op not in words:
                names.insert(place + 1, one.op)
                words[one.op] = one.words
            place = names.index(one.op)
    set_ops({name: words[name] for name in names})


def set_ops(words: Mapping[str, str]) -> None:
    """Make these the known ops, in their order."""
    known = dict(words)
    OPS.clear()
    OPS.update(known)
    _ORDER.clear()
    _ORDER.update((name, number) for number, name in enumerate(known))


# those of a dense block, whatever its sizes
know_points([BlockSpec(2, Gqa(2, 1, 1, 2, rms_eps=1e-6), Mlp(2, 2))])


class Point(NamedTuple):
    """The output of `op` in `layer`.

    The layer is `BEFORE` before the first one, and the number of layers after the last one.
    """

    layer: int
    op: str

    @property
    def order(self) -> tuple[int, int]:
        """A key that sorts points as the forward pass reaches them."""
        return self.layer, _ORDER[self.op]

    def __str__(self) -> str:
        return f"layer {self.layer} {self.op}" if is_in_layer(self.op) else self.op


def is_in_layer(op: str) -> bool:
    return op not in BEFORE_LAYERS and op not in AFTER_LAYERS


def definition(point: Point, spec: ModelSpec) -> PointDef | None:
    """Return what the model's layer says of a point; None if it has no such point."""
    if not is_in_layer(point.op):
        sizes = {"logits": spec.vocab_size, "logprob": 1}
        found = next(one for one in _OUTER if one.op == point.op)
        return replace(found, shape=(sizes.get(point.op, spec.hidden_size),))
    return next((one for one in spec.blocks[point.layer].points() if one.op == point.op), None)
