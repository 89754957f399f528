"""What a kind of layer says of itself, for all that build, count, cut, push and watch it. No torch.

A decoder layer is a block of two such layers (block.py): one mixes tokens, one maps each alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import TYPE_CHECKING, Any, Literal, Protocol

from spmd_rl.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

Dims = tuple[int, ...]
Recompute = Literal["none", "cheap", "all"]


@dataclass(frozen=True)
class Cut:
    """How ranks that share a parameter divide it: into ranges of equal units along `dim`.

    A unit is never split, for example a head. With `repeats`, more ranks than units hold the same
    one several times. `is_padded` says that ranks hold equally many rows beyond the last unit, as
    of a vocabulary. `unit` says in words what a unit is.
    """

    dim: int
    num_units: int
    unit: str
    repeats: bool = False
    is_padded: bool = False

    def check(self, num_parts: int, at: str) -> None:
        """Raises: ConfigError, beginning with `at`, unless so many ranks can divide the units."""
        if self.num_units % num_parts == 0:
            return
        if not self.repeats:
            raise ConfigError(f"{at} does not divide the {self.num_units} {self.unit}")
        if num_parts % self.num_units:
            raise ConfigError(
                f"{at} neither divides the {self.num_units} {self.unit} nor is a multiple of them"
            )

    def part(self, size: int, part: int, num_parts: int) -> tuple[int, int]:
        """Return the range of `size` elements along `dim` that part `part` of `num_parts` has."""
        assert self.repeats or self.num_units % num_parts == 0, "see check"
        if num_parts > self.num_units:
            part, num_parts = part * self.num_units // num_parts, self.num_units
        extent = size // num_parts
        return part * extent, (part + 1) * extent


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of a layer, by its Hugging Face name within the block.

    `cut` is how tensor parallelism divides it, None where every rank has all of it. `expert` is the
    number of the expert that it belongs to. A fixed tensor is float32 and not trained
    (`fixed_parameters.py`). A weight that `stays_full`, as a router's, is never in few bits.
    Vectors other than biases begin as `start`.
    """

    name: str
    shape: Dims
    cut: Cut | None = None
    expert: int | None = None
    writes_residual: bool = False  # whether its product is added to the residual stream
    is_fixed: bool = False
    stays_full: bool = False
    start: float = 1.0

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def tp_cut(self) -> Cut | None:
        """How ranks along tp divide it: experts are whole, for `etp` of Megatron-core cuts them."""
        return self.cut if self.expert is None else None


@dataclass(frozen=True)
class LayerCost:
    """What one rank computes and keeps in a layer. Elements and operations are a token's.

    Kept elements wait for the backward pass.
    """

    parameters: int = 0  # elements of the whole layer's weights
    multiplied: int = 0  # elements of the matrices that a token is multiplied with
    kept_inputs: int = 0  # kept always: what all else can be computed of again
    kept_products: int = 0  # outputs of matrix products
    kept_cheap: int = 0  # outputs of operations that recompute = "cheap" does again
    gradients: int = 0  # elements of gradients that exist at once in the backward pass
    workspace: int = 0  # elements that exist at once in a forward pass without gradients
    flops_per_key: int = 0  # operations of a forward pass for each token that it attends to
    query_heads: int = 0  # heads that attend, each in tiles of its own
    idle: int = 0  # elements of the weights that a token does not take
    routed: int = 0  # elements of the copies that go to experts, and of those that return

    def __add__(self, other: LayerCost) -> LayerCost:
        """Return the cost of both layers; the larger gradients, as they do not exist together."""
        names = [one.name for one in fields(self)]
        total = {name: getattr(self, name) + getattr(other, name) for name in names}
        return LayerCost(**total | {"gradients": max(self.gradients, other.gradients)})

    @property
    def in_backward(self) -> int:
        """Elements of gradients that exist at once, those of copies for experts included."""
        return self.gradients + 5 * self.routed // 2

    @property
    def in_forward(self) -> int:
        """Elements that exist at once without gradients, copies for experts included."""
        return self.workspace + 5 * self.routed // 2

    def kept(self, recompute: Recompute) -> int:
        """Return the elements that one token keeps until the backward pass."""
        if recompute == "all":
            return self.kept_inputs
        copies = 3 * self.routed // 2  # rows that go to experts, and fp32 sums that return
        kept = self.kept_inputs + self.kept_products + copies
        return kept + (self.kept_cheap if recompute == "none" else 0)


@dataclass(frozen=True)
class StateSpec:
    """An array that a layer hands on from token to token, in fp32 or in the dtype of a pass."""

    shape: Dims
    is_wide: bool


@dataclass(frozen=True)
class CacheSpec:
    """What an engine keeps of each token in its pages: arrays, each with this shape for a token.

    `queries_per_key` is above 0 if they are the keys and values of attention, each [heads, size],
    to each of which so many query heads attend. The kernels of attention lay these out. With
    `latent_dim` there are keys alone, and the last so many elements of a key are its value.
    `states` it keeps of each sequence, as they are after its newest token.
    """

    arrays: tuple[Dims, ...] = ()
    queries_per_key: int = 0
    states: tuple[StateSpec, ...] = ()
    latent_dim: int = 0

    @property
    def num_elements(self) -> int:
        """Elements of a token."""
        return sum(map(prod, self.arrays))

    def state_bytes(self, element_bytes: int) -> int:
        """Return the bytes of a sequence, in a pass with elements of so many."""
        return sum(prod(one.shape) * (4 if one.is_wide else element_bytes) for one in self.states)


@dataclass(frozen=True)
class PointDef:
    """A point of the forward pass that can be watched: the output of an operation.

    A token's value has `shape`. It is the output of the module `output_of`, or the input of
    `input_of`; where both are empty, attention computes it. `inputs` are the points that it is
    computed of, and `source` the one that it is computed of where its projections are part of the
    operation. Modules are named within the block.
    """

    op: str
    words: str
    shape: Dims
    inputs: tuple[str, ...] = ()
    source: str = ""
    output_of: str = ""
    input_of: str = ""
    fused: str = ""  # the product that it is columns of, where projections are one
    norm: str = ""  # module of the norm that it ends with
    is_product: bool = False  # whether it is its input times the weight of `output_of`
    is_added: bool = False  # whether it is added to the residual stream


class LayerSpec(Protocol):
    """Sizes of one layer, and all that follows from them. Equal specs are equal layers."""

    @property
    def name(self) -> str:
        """Name of the layer's module within the block, as in Hugging Face folders."""

    def parameters(self) -> Sequence[TensorSpec]:
        """Return the parameters in the module's order."""

    def cost(self, tp: int = 1) -> LayerCost:
        """Return the cost on one of `tp` ranks that share the layer; `parameters` are all."""

    def cache(self, tp: int = 1) -> CacheSpec | None:
        """Return what one of `tp` ranks keeps of tokens and sequences; None for nothing."""

    def part(self, tp: int) -> LayerSpec:
        """Return the layer of one of `tp` ranks of an engine that share this one.

        Raises: ConfigError if they cannot.
        """

    def points(self) -> Sequence[PointDef]:
        """Return the points in the order in which the forward pass reaches them."""

    def module(self, number: int) -> nn.Module:
        """Return the layer's torch module for block `number`. Raises: ConfigError if there is none.

        A layer that mixes tokens is called with (x, rotary, attend), another one with (x).
        """


def weights_of(name: str, rows: int, columns: int, bias: bool, **facts: Any) -> list[TensorSpec]:
    """Return the parameters of a linear layer. A bias is cut like the rows of its weight."""
    found = [TensorSpec(f"{name}.weight", (rows, columns), **facts)]
    if bias:
        cut: Cut | None = facts.get("cut")
        facts["cut"] = cut if cut and cut.dim == 0 else None
        found.append(TensorSpec(f"{name}.bias", (rows,), **facts))
    return found


def product(layer: str, module: str, words: str, shape: Dims, read: str, **facts: Any) -> PointDef:
    """Return the point of a linear module of a layer: the product of the point `read`."""
    return PointDef(
        module, words, shape, (read,), output_of=f"{layer}.{module}", is_product=True, **facts
    )


def num_elements(parameters: Sequence[TensorSpec]) -> int:
    return sum(one.num_elements for one in parameters)
