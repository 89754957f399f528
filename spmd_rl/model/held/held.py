"""All parameters of a model as one rank of a role holds them. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from spmd_rl.model.held.tensor import ONE, Along, HeldTensor, Seat
from spmd_rl.model.layers.layer import TensorSpec
from spmd_rl.model.spec import EMBEDDING, Head, ModelSpec
from spmd_rl.weights.plan.layout import Box

VOCAB_SHARDS = 8  # as a sum over the vocabulary has (kernels/vocab/logprob.py)


@dataclass(frozen=True)
class Holder:
    """How ranks of a kind of role share a model.

    The rows of a vocabulary are padded to a multiple of `padding`. `whole` names parameters of
    which each rank has all. With `experts_by_tp`, ranks along tp have blocks of experts. A trainer
    has experts along ep, whatever its tp.
    """

    padding: int = VOCAB_SHARDS
    whole: frozenset[str] = frozenset()
    experts_by_tp: bool = False


TRAINER = Holder()
ENGINE = Holder(whole=frozenset((EMBEDDING,)), experts_by_tp=True)


def held_tensors(
    spec: ModelSpec,
    seat: Seat,
    holder: Holder,
    head: Head = "lm",
    adapters: Iterable[TensorSpec] = (),
) -> dict[str, HeldTensor]:
    """Return what a rank has of each parameter, by name; also of those of which it has no part.

    `adapters` are parameters beside the model's.
    """
    rows = _rows(spec, [*spec.parameters(head), *adapters], seat, holder)
    return {row.spec.name: row for row in rows}


def parts(spec: ModelSpec, along: Along, holder: Holder, head: Head = "lm") -> dict[str, Box]:
    """Return the part of each parameter that a rank along tp has."""
    rows = held_tensors(spec, Seat(tp=along), holder, head)
    return {name: row.part for name, row in rows.items()}


def _rows(
    spec: ModelSpec, tensors: Iterable[TensorSpec], seat: Seat, holder: Holder
) -> Iterator[HeldTensor]:
    ep = seat.tp if holder.experts_by_tp and seat.tp.size > 1 else seat.ep
    are_apart = ep.size > 1 or seat.expert_shards.size > 1
    owners = spec.expert_parts(ep.size) if are_apart else {}
    for tensor in tensors:
        if are_apart and tensor.expert is not None:
            owner = owners[_of_base(tensor.name)]
            yield HeldTensor(tensor, "ep", ep, owner, seat.expert_shards)
            continue
        shards = ONE if tensor.is_fixed else seat.shards
        if tensor.name in holder.whole:
            tensor = replace(tensor, cut=None)
        if tensor.tp_cut is None or seat.tp.size == 1:
            copies = seat.replicas * seat.tp.size
            yield HeldTensor(tensor, shards=shards, copies=copies)
        else:
            cut = tensor.tp_cut
            repeats = max(1, seat.tp.size // cut.num_units) if cut.repeats else 1
            copies = seat.replicas * repeats
            yield HeldTensor(tensor, "tp", seat.tp, 0, shards, copies, holder.padding)


def _of_base(name: str) -> str:
    """Return the name of the weight beside which an adapter's weight is; others stay."""
    layer, mark, _ = name.rpartition(".lora_")
    return f"{layer}.weight" if mark else name
