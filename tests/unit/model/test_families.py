"""Families: every element of a model lies on the ranks that it should, once, and comes back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from spmd_rl.model.families import FAMILIES, megatron
from spmd_rl.model.families.megatron import (
    FINAL_NORM,
    LAYERS,
    OUTPUT,
    WORD_EMBEDDING,
    parts_of,
)
from spmd_rl.model.families.megatron_layers import block_rules
from spmd_rl.model.families.rules import Joined, Part
from spmd_rl.model.held.held import Holder, held_tensors
from spmd_rl.model.held.tensor import Along, Seat, part_box
from spmd_rl.model.layers.mlp import Mlp
from spmd_rl.model.layers.moe import Moe
from spmd_rl.model.spec import EMBEDDING, ModelSpec
from spmd_rl.weights.plan.layout import Dims
from tests.specs import attention_of, dense_spec, mlp_of, with_experts

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Grid:
    """How many ranks each axis has."""

    tp: int
    ep: int = 1
    etp: int = 1

    def places(self) -> Iterator[Seat]:
        """One rank for each way to cut: a checkpoint has each of them at least once."""
        for tp, ep, etp in np.ndindex(self.tp, self.ep, self.etp):
            yield Seat(Along(tp, self.tp), Along(ep, self.ep), etp=Along(etp, self.etp))


def spec_of(family: str, groups: int, per_group: int, vocab: int, tied: bool) -> ModelSpec:
    spec = dense_spec(
        family,
        vocab=vocab,
        hidden=48,
        inner=72,
        layers=3,
        heads=(groups * per_group, groups, 24),
        positions=64,
        tie_embeddings=tied,
        qkv_bias=family == "qwen2",
        qk_norm=family.startswith("qwen3"),
    )
    return with_experts(spec, 12, 2, 24) if family == "qwen3_moe" else spec


def parameters(spec: ModelSpec, grid: Grid) -> dict[str, Dims]:
    """Every parameter that Megatron's local spec builds on a rank that has all layers, with its
    shape there. The shapes are Megatron's own arithmetic, and not that of the rules.
    """
    tp, hidden, attention = grid.tp, spec.hidden_size, attention_of(spec)
    qkv = (attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim // tp
    rows = -(-spec.vocab_size // tp)
    found: dict[str, Dims] = {WORD_EMBEDDING: (rows, hidden), FINAL_NORM: (hidden,)}
    found[OUTPUT] = (rows, hidden)
    for layer in range(spec.num_layers):
        own: dict[str, Dims] = {
            "input_layernorm.weight": (hidden,),
            "pre_mlp_layernorm.weight": (hidden,),
            "self_attention.linear_qkv.weight": (qkv, hidden),
            "self_attention.linear_proj.weight": (hidden, attention.width // tp),
        }
        if attention.qkv_bias:
            own["self_attention.linear_qkv.bias"] = (qkv,)
        if attention.qk_norm:
            own |= {f"self_attention.{x}_layernorm.weight": (attention.head_dim,) for x in "qk"}
        mlp = spec.blocks[layer].mlp
        if isinstance(mlp, Moe):
            own["mlp.router.weight"] = (mlp.num_experts, hidden)
            inner = mlp.expert_size // grid.etp
            for expert in range(mlp.num_experts // grid.ep):
                name = f"mlp.experts.local_experts.{expert}"
                own |= {f"{name}.linear_fc1.weight": (2 * inner, hidden)}
                own |= {f"{name}.linear_fc2.weight": (hidden, inner)}
        else:
            assert isinstance(mlp, Mlp)
            inner = mlp.intermediate_size // tp
            own["mlp.linear_fc1.weight"] = (2 * inner, hidden)
            own["mlp.linear_fc2.weight"] = (hidden, inner)
        found |= {f"{LAYERS}{layer}.{name}": shape for name, shape in own.items()}
    return found


def layer_of(parameter: str) -> int:
    return int(parameter.split(".")[2]) if parameter.startswith(LAYERS) else -1


def held(spec: ModelSpec, grid: Grid) -> Iterator[tuple[Seat, str, Dims, Part]]:
    for place in grid.places():
        for name, shape in parameters(spec, grid).items():
            for part in parts_of(spec, name, layer_of(name), place):
                yield place, name, shape, part


def random_arrays(spec: ModelSpec) -> Arrays:
    rng = np.random.default_rng(0)
    return {
        name: rng.integers(0, 1 << 16, shape).astype(np.uint16)
        for name, shape in spec.parameter_shapes().items()
    }


def to_megatron(arrays: Arrays, spec: ModelSpec, grid: Grid) -> dict:
    """Each rank's parameters, filled from whole tensors."""
    ranks: dict = defaultdict(dict)
    for place, name, shape, part in held(spec, grid):
        parameter = ranks[place].setdefault(name, np.zeros(shape, np.uint16))
        whole = tuple(slice(o, e) for o, e in zip(part.box.offset, part.box.end, strict=True))
        parameter[slice(*part.rows)] = arrays[part.name][whole]
    return ranks


def to_hugging_face(ranks: dict, spec: ModelSpec, grid: Grid) -> Arrays:
    out = {name: np.zeros(shape, np.uint16) for name, shape in spec.parameter_shapes().items()}
    for place, name, _, part in held(spec, grid):
        whole = tuple(slice(o, e) for o, e in zip(part.box.offset, part.box.end, strict=True))
        out[part.name][whole] = ranks[place][name][slice(*part.rows)]
    return out


CASES = st.tuples(
    st.sampled_from(sorted(FAMILIES.keys() - {"glm4_moe"})),  # which Megatron-core is not given
    st.sampled_from([1, 2, 4]),  # key-value heads
    st.sampled_from([1, 2, 3]),  # query heads for each
    st.sampled_from([96, 97, 101]),  # tokens, with padding where tp does not divide them
    st.booleans(),
    st.sampled_from([1, 2, 3, 4, 6]),  # tp, also above the number of key-value heads
    st.sampled_from([(1, 1), (2, 1), (4, 3), (12, 2), (3, 4)]),  # ep and etp
)


def case(values: tuple) -> tuple[ModelSpec, Grid]:
    family, groups, per_group, vocab, tied, tp, (ep, etp) = values
    assume(groups * per_group % tp == 0)  # no rank has a part of a head
    spec = spec_of(family, groups, per_group, vocab, tied)
    is_moe = family == "qwen3_moe"
    return spec, Grid(tp, *((ep, etp) if is_moe else (1, 1)))


@settings(max_examples=60)
@given(CASES)
def test_every_element_is_held_as_often_as_it_should(values: tuple) -> None:
    spec, grid = case(values)
    counts = {name: np.zeros(shape, int) for name, shape in spec.parameter_shapes().items()}
    ways = grid.tp * grid.ep * grid.etp
    covered: dict = defaultdict(int)
    for place, name, shape, part in held(spec, grid):
        assert part.shape == counts[part.name].shape
        whole = tuple(slice(o, e) for o, e in zip(part.box.offset, part.box.end, strict=True))
        counts[part.name][whole] += 1
        covered[place, name] += part.rows[1] - part.rows[0]
        # a part is as large as the rows that hold it
        assert prod(part.box.extent) == (part.rows[1] - part.rows[0]) * prod(shape[1:])
    for name, count in counts.items():
        if ".experts." in name:
            copies = grid.tp  # places differ in tp, which does not cut experts
        elif "norm" in name or name.endswith("mlp.gate.weight"):
            copies = ways  # every rank has the whole tensor
        else:
            copies = grid.ep * grid.etp * (2 if name == EMBEDDING and spec.tie_embeddings else 1)
        assert (count == copies).all(), name
    for (_, name), rows in covered.items():  # no row is left, but those that pad a vocabulary
        shape = parameters(spec, grid)[name]
        assert rows == shape[0] or name in (WORD_EMBEDDING, OUTPUT)


@settings(max_examples=60)
@given(CASES)
def test_parts_are_those_of_the_table_of_all_roles(values: tuple) -> None:
    """Where ranks do not divide the heads of keys, Megatron-core's blocks end within a group."""
    spec, grid = case(values)
    found: dict = defaultdict(set)
    for seat, _, _, part in held(spec, grid):
        found[seat, part.name].add(part.box)
    for seat in grid.places():
        for name, row in held_tensors(spec, seat, Holder(padding=1)).items():
            if "self_attn" in name and attention_of(spec).num_kv_heads % grid.tp:
                continue
            box = row.part if row.spec.expert is None else part_box(row.spec, seat.etp)
            boxes = found[seat, name]
            assert all(one.intersect(box) == one for one in boxes), name
            num_elements = box.num_elements if row.is_here else 0
            assert sum(one.num_elements for one in boxes) == num_elements, name


@settings(max_examples=60)
@given(CASES)
def test_there_and_back_is_byte_equal(values: tuple) -> None:
    spec, grid = case(values)
    arrays = random_arrays(spec)
    ranks = to_megatron(arrays, spec, grid)
    back = to_hugging_face(ranks, spec, grid)
    for name in arrays:
        np.testing.assert_array_equal(back[name], arrays[name])


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_fused_rows_are_in_the_order_of_megatron(tp: int) -> None:
    """An oracle written from Megatron's own documentation of its layout, with numpy alone."""
    spec = spec_of("qwen2", 2, 4, 96, False)
    arrays = random_arrays(spec)
    ranks = list(to_megatron(arrays, spec, Grid(tp)).values())
    layer, dim = "model.layers.1.", attention_of(spec).head_dim
    q, k, v = (arrays[f"{layer}self_attn.{x}_proj.weight"] for x in "qkv")
    groups = [
        np.concatenate(
            [
                q[g * 4 * dim : (g + 1) * 4 * dim],
                k[g * dim : (g + 1) * dim],
                v[g * dim : (g + 1) * dim],
            ]
        )
        for g in range(2)
    ]
    fused = np.concatenate([rank[f"{LAYERS}1.self_attention.linear_qkv.weight"] for rank in ranks])
    np.testing.assert_array_equal(fused, np.concatenate(groups))
    for index, rank in enumerate(ranks):
        rows = slice(*Along(index, tp).of(mlp_of(spec).intermediate_size))
        halves = [arrays[f"{layer}mlp.{x}_proj.weight"][rows] for x in ("gate", "up")]
        np.testing.assert_array_equal(
            rank[f"{LAYERS}1.mlp.linear_fc1.weight"], np.concatenate(halves)
        )


def test_planted_bugs_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up swapped, and all queries before all keys: other parameters than Megatron's."""
    spec, grid = spec_of("llama", 4, 2, 96, False), Grid(2)
    arrays = random_arrays(spec)
    expected = to_megatron(arrays, spec, grid)
    names = [f"self_attn.{x}_proj.weight" for x in "qkv"]
    planted = {
        "mlp.linear_fc1.weight": Joined("mlp.up_proj.weight", "mlp.gate_proj.weight"),
        "self_attention.linear_qkv.weight": Joined(*names),
    }
    for name, rule in planted.items():
        wrong = {**block_rules(spec.blocks[0]), name: rule}
        monkeypatch.setattr(megatron, "block_rules", lambda block, wrong=wrong: wrong)
        found = to_megatron(arrays, spec, grid)
        for place in grid.places():
            for parameter in expected[place]:
                same = np.array_equal(found[place][parameter], expected[place][parameter])
                assert same == (not parameter.endswith(name)), parameter
        # a fault in both directions comes back all the same: this test is the one that sees it
        assert to_hugging_face(found, spec, grid).keys() == arrays.keys()


def test_names_of_transformer_engine_mean_the_same() -> None:
    spec = spec_of("qwen3_moe", 2, 2, 96, False)
    place = Seat(Along(1, 2), Along(3, 4), etp=Along(1, 2))
    pairs = {
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "mlp.experts.linear_fc1.weight2": "mlp.experts.local_experts.2.linear_fc1.weight",
        "mlp.experts.linear_fc2.weight0": "mlp.experts.local_experts.0.linear_fc2.weight",
    }
    for one, other in pairs.items():
        first, second = (parts_of(spec, f"{LAYERS}0.{x}", 2, place) for x in (one, other))
        assert first == second
    (last,) = parts_of(spec, f"{LAYERS}0.mlp.experts.linear_fc2.weight2", 2, place)
    assert last.name == "model.layers.2.mlp.experts.11.down_proj.weight"


def test_our_own_attention_has_queries_then_keys_then_values() -> None:
    spec = spec_of("qwen2", 2, 3, 96, False)
    for kind in ("weight", "bias"):
        name = f"{LAYERS}0.self_attention.qkv_proj.{kind}"
        parts = parts_of(spec, name, 1, Seat())
        prefix, first = "model.layers.1.self_attn.", 0
        assert [part.name for part in parts] == [f"{prefix}{x}_proj.{kind}" for x in "qkv"]
        for part in parts:
            assert part.box.extent == part.shape == spec.parameter_shapes()[part.name]
            assert part.rows == (first, first + part.shape[0])
            first = part.rows[1]


def test_an_unknown_parameter_is_an_error() -> None:
    spec = spec_of("llama", 2, 2, 96, False)
    with pytest.raises(KeyError, match="adapter"):
        parts_of(spec, f"{LAYERS}0.adapter.weight", 0, Seat())
