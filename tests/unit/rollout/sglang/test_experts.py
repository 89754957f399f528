"""Mixtures in SGLang: each expert's part of stacked parameters, and routes with the tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from spmd_rl.errors import ConfigError, SpmdError, WeightsError
from spmd_rl.kernels.moe.route_hash import ROUTES, RouteHash
from spmd_rl.model.hf import random_weights
from spmd_rl.model.layers.moe import is_of_expert
from spmd_rl.model.layers.route_shape import RouteShape
from spmd_rl.model.read import read_spec
from spmd_rl.rollout.engine import Request, SamplingConfig
from spmd_rl.rollout.sglang.build import build
from spmd_rl.rollout.sglang.child_weights import check_rules, parameter_views
from spmd_rl.rollout.sglang.config import SglangEngineConfig
from spmd_rl.rollout.sglang.engine import SglangEngine
from spmd_rl.rollout.sglang.options import VERSIONS, SglangSite, check_routes
from spmd_rl.rollout.sglang.returned_routes import ReturnedRoutes, decoded
from spmd_rl.rollout.sglang.tensor_parallel import check_sizes, shard_boxes
from spmd_rl.types.routes import EXPERT_IDS
from spmd_rl.types.samples import Sample
from spmd_rl.types.token_data import NO_DATA, TokenData
from spmd_rl.weights.plan.layout import Box, Piece
from tests.dist.train_case import write_model_folder
from tests.engine_suite import push
from tests.fakes.sglang_child import route, write_site
from tests.samples import finish
from tests.specs import with_experts
from tests.unit.rollout.sglang.conftest import CPU, DEADLINE_S, decode, grant
from tests.unit.rollout.sglang.test_tensor_parallel import SPEC

NUM_EXPERTS, NUM_CHOSEN, NUM_LAYERS = 7, 3, 3
EXPERTS = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": NUM_CHOSEN,
    "moe_intermediate_size": 20,
}
PROMPT = np.arange(2, 8, dtype=np.int32)
SAMPLING = SamplingConfig(temperature=0.0, max_tokens=12, ignore_eos=True, replay_routes=True)
E, INNER, H = 3, 4, 5  # experts, hidden units of one, hidden size


class UnquantizedFusedMoEMethod:
    """By its name, SGLang's method of plain weights."""


def stacked(**attributes: Any) -> nn.Module:
    """A layer's experts as SGLang has them."""
    experts = nn.Module()
    for name, shape in {"w13_weight": (E, 2 * INNER, H), "w2_weight": (E, H, INNER)}.items():
        experts.register_parameter(
            name,
            nn.Parameter(torch.arange(E * 2 * INNER * H).float()[: np.prod(shape)].reshape(shape)),
        )
    experts.quant_method = UnquantizedFusedMoEMethod()
    for name, value in attributes.items():
        setattr(experts.quant_method, name, value)
    made = nn.Module()
    made.mlp = nn.Module()
    made.mlp.experts = experts
    return made


def pieces(num_experts: int = E, inner: int = INNER) -> dict[str, Piece]:
    shapes = {"gate_proj": (inner, H), "up_proj": (inner, H), "down_proj": (H, inner)}
    return {
        (name := f"mlp.experts.{number}.{part}.weight"): Piece(
            name, shape, "float32", Box((0, 0), shape)
        )
        for number in range(num_experts)
        for part, shape in shapes.items()
    }


def test_each_expert_has_its_part_of_a_stacked_parameter() -> None:
    made = stacked()
    views = parameter_views(made, pieces())
    assert views.keys() == pieces().keys()
    experts = made.mlp.experts
    for number in range(E):
        parts = [views[f"mlp.experts.{number}.{part}.weight"] for part in ("gate_proj", "up_proj")]
        assert torch.equal(torch.cat(parts), experts.w13_weight[number])
        down = views[f"mlp.experts.{number}.down_proj.weight"]
        assert torch.equal(down, experts.w2_weight[number])
        assert down.data_ptr() == experts.w2_weight[number].data_ptr()  # no copy
    check_rules(pieces(), views)


@pytest.mark.parametrize("flag", ["use_triton_kernels", "load_up_proj_weight_first"])
def test_experts_in_another_layout_are_refused(flag: str) -> None:
    views = parameter_views(stacked(**{flag: True}), pieces())
    assert views == {}
    with pytest.raises(WeightsError, match="engine.options.moe_runner_backend = 'triton'"):
        check_rules(pieces(), views)


@pytest.mark.parametrize("wanted", [pieces(E - 1), pieces(E + 1), pieces(inner=INNER - 1)])
def test_experts_of_other_numbers_or_sizes_have_no_rule(wanted: dict[str, Piece]) -> None:
    assert parameter_views(stacked(), wanted) == {}


def test_a_rank_has_a_block_of_experts_and_its_part_of_the_rest() -> None:
    spec = with_experts(SPEC, num_experts=6, experts_per_token=2, expert_size=12)
    for rank in (0, 1):
        boxes = shard_boxes(spec, rank, 2)
        own = {
            int(one.split(".experts.")[1].split(".")[0])
            for one, box in boxes.items()
            if is_of_expert(one) and box.num_elements
        }
        assert own == {3 * rank, 3 * rank + 1, 3 * rank + 2}
        assert boxes[f"model.layers.1.mlp.experts.{3 * rank}.up_proj.weight"].extent == (12, 64)
        assert boxes["model.layers.1.mlp.gate.weight"].extent == (6, 64)
        assert boxes["model.layers.1.self_attn.q_proj.weight"].extent == (32, 64)
    check_sizes(spec, 2)


def test_the_second_block_of_experts_has_its_parts() -> None:
    second = {
        name.replace(f"experts.{n}.", f"experts.{n + E}."): one
        for n in range(E)
        for name, one in pieces().items()
        if f"experts.{n}." in name
    }
    made = stacked()
    views = parameter_views(made, second)
    assert views.keys() == second.keys()
    down = views[f"mlp.experts.{E + 1}.down_proj.weight"]
    assert down.data_ptr() == made.mlp.experts.w2_weight[1].data_ptr()


def test_experts_that_ranks_cannot_share_evenly_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="split.infer.tp = 2 does not divide the 7 experts"):
        check_sizes(read_spec(folder), 2)
    check_sizes(read_spec(folder), 1)


def test_an_older_version_is_not_asked_for_routes() -> None:
    for version in VERSIONS:
        site = SglangSite(version, (), "")
        if version == "0.5.17":
            check_routes(site)
        else:
            with pytest.raises(ConfigError, match="needs SGLang 0.5.17, and engine.python has"):
                check_routes(site)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model_folder(tmp_path_factory.mktemp("mixture"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | EXPERTS))
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_site(tmp_path_factory.mktemp("site"), "0.5.17")


def start(folder: Path, site: Path, **options: Any) -> SglangEngine:
    cfg = SglangEngineConfig(
        python=str(site), options=options, slab_bytes=4096, answer_deadline_s=DEADLINE_S
    )
    engine = build(cfg, str(folder), CPU, decode, records_routes=True)
    assert isinstance(engine, SglangEngine)
    return engine


@pytest.fixture(scope="module")
def engine(folder: Path, site: Path) -> Iterator[SglangEngine]:
    engine = start(folder, site, fake_steps=0)
    yield engine
    engine.close()


@pytest.fixture
def weights(folder: Path) -> dict[str, Tensor]:
    return dict(random_weights(read_spec(folder), 0))


def test_a_push_brings_every_expert(engine: SglangEngine, weights: dict[str, Tensor]) -> None:
    """The digests are those of the child's stacked parameters. Portions are smaller than these."""
    push(engine, weights, 1)
    push(engine, {name: tensor + 1 for name, tensor in weights.items()}, 2)


def test_quantised_experts_are_refused(folder: Path, site: Path, weights: Any) -> None:
    engine = start(folder, site, quantization="fp8")
    with pytest.raises(SpmdError, match="leave engine.options.quantization out"):
        push(engine, weights, 1)
    engine.close()


def run(engine: SglangEngine, *requests: Request) -> list[Sample]:
    for request in requests:
        engine.submit(request)
    grant(engine, -1)
    samples = finish(engine)
    grant(engine, 0)
    return [samples[request.uid, request.index] for request in requests]


def expected(weights: list[int], uid: int, rows: range) -> np.ndarray[Any, Any]:
    """Return the fake's routes of these rows, of which each was computed with its weights."""
    sizes = NUM_EXPERTS, NUM_CHOSEN
    found = [
        [sorted(route(of_row, uid, row, layer, sizes)) for layer in range(NUM_LAYERS)]
        for row, of_row in zip(rows, weights, strict=True)
    ]
    return np.array(found, np.uint8).reshape(len(rows), -1)


def checksum(weights: dict[str, Tensor], folder: Path) -> int:
    """What the fake draws from, once a push has brought these weights."""
    from tests.fakes.sglang_child import _model

    made = _model(str(folder), "float32", False, "triton", 0, 1)
    made.load_weights(list(weights.items()))
    return int(made.checksum())


@pytest.mark.parametrize("stop_at", [None, 5])
def test_tokens_have_the_routes_of_the_rows_that_drew_them(
    engine: SglangEngine, weights: dict[str, Tensor], folder: Path, stop_at: int | None
) -> None:
    """A stop that the rank looks for ends a request before the scheduler returns its routes."""
    push(engine, weights, 1)
    drawn_with = checksum(weights, folder)
    (whole,) = run(engine, Request(3, 0, PROMPT, SAMPLING))
    stop_ids = () if stop_at is None else (int(whole.tokens[stop_at]),)
    request = Request(3, 0, PROMPT, replace(SAMPLING, stop_ids=stop_ids))
    (sample,) = run(engine, request)
    length = len(sample.tokens)
    assert length == 12 if stop_at is None else length <= stop_at + 1
    rows = range(len(PROMPT) - 1, len(PROMPT) + length - 1)
    column = sample.columns[EXPERT_IDS]
    assert column.dtype == np.uint8
    np.testing.assert_array_equal(column, expected([drawn_with] * length, 3, rows))
    before = np.frombuffer(sample.prompt_routes, np.uint8).reshape(len(PROMPT), -1)
    assert not before[0].any()
    count = len(PROMPT) - 1
    np.testing.assert_array_equal(before[1:], expected([drawn_with] * count, 3, range(count)))


def test_a_push_leaves_the_routes_of_the_version_that_drew_a_token(
    engine: SglangEngine, weights: dict[str, Tensor], folder: Path
) -> None:
    others = {name: tensor + 1 for name, tensor in weights.items()}
    old, new = checksum(weights, folder), checksum(others, folder)
    push(engine, weights, 1)
    engine.submit(Request(5, 0, PROMPT, SAMPLING))
    grant(engine, 4)
    engine.step()
    push(engine, others, 2)
    grant(engine, -1)
    sample = finish(engine)[5, 0]
    grant(engine, 0)
    of_version = [{1: old, 2: new}[version] for version in sample.versions.tolist()]
    assert len(set(of_version)) == 2
    rows = range(len(PROMPT) - 1, len(PROMPT) + len(sample.tokens) - 1)
    np.testing.assert_array_equal(sample.columns[EXPERT_IDS], expected(of_version, 5, rows))
    first = expected([old] * (len(PROMPT) - 1), 5, range(len(PROMPT) - 1))
    assert sample.prompt_routes[first.shape[1] :] == first.tobytes()


def test_an_abort_keeps_the_routes_of_what_was_drawn(
    engine: SglangEngine, weights: dict[str, Tensor], folder: Path
) -> None:
    push(engine, weights, 1)
    drawn_with = checksum(weights, folder)
    request = Request(6, 0, PROMPT, SAMPLING)
    engine.submit(request)
    grant(engine, 3)
    engine.step()
    (partial,) = engine.abort()
    assert 0 < len(partial.tokens) == len(partial.columns[EXPERT_IDS])
    (sample,) = run(engine, request.resumed(partial))
    rows = range(len(PROMPT) - 1, len(PROMPT) + len(sample.tokens) - 1)
    of_rows = expected([drawn_with] * len(sample.tokens), 6, rows)
    np.testing.assert_array_equal(sample.columns[EXPERT_IDS], of_rows)


def test_a_request_that_was_retracted_has_no_routes_of_its_tokens(
    folder: Path, site: Path, weights: dict[str, Tensor]
) -> None:
    """SGLang has those of a later prefill alone."""
    engine = start(folder, site, fake_retracts=True)
    push(engine, weights, 1)
    (sample,) = run(engine, Request(3, 0, PROMPT, SAMPLING))
    assert EXPERT_IDS not in sample.columns and sample.prompt_routes
    engine.close()


def test_an_engine_that_records_none_refuses_to(folder: Path, site: Path) -> None:
    cfg = SglangEngineConfig(python=str(site), slab_bytes=4096, answer_deadline_s=DEADLINE_S)
    engine = build(cfg, str(folder), CPU, decode)
    with pytest.raises(ConfigError, match="sampling.replay_routes is on for a request"):
        engine.submit(Request(1, 0, PROMPT, SAMPLING))
    engine.close()


def test_routes_of_other_sizes_are_refused(folder: Path) -> None:
    spec = read_spec(folder)
    ids = np.tile(np.array([5, 0, 3], np.int32), (4, NUM_LAYERS, 1))
    shape = RouteShape.required(spec)
    rows = decoded(spec, shape, ([4, NUM_LAYERS, 3], "int32", ids.tobytes()))
    assert rows.tolist() == [[0, 3, 5] * NUM_LAYERS] * 4
    for sizes, dtype in (([4, 2, 3], "int32"), ([4, NUM_LAYERS, 3], "int64")):
        with pytest.raises(SpmdError, match="expected int32 of \\[3, 3\\] for each token"):
            decoded(spec, shape, (sizes, dtype, ids.tobytes()))


def test_rows_that_were_not_returned_have_zeros() -> None:
    rows = np.arange(8, dtype=np.uint8).reshape(4, 2)  # of the rows 3 to 6
    routes = ReturnedRoutes(rows, first=3, is_drawn=True, num_layers=1)
    assert routes.of_tokens(3, 9).tolist() == [[0, 0], *rows.tolist(), [0, 0]]
    new = TokenData.observed(np.arange(2, dtype=np.int32))
    joined = routes.added_to(NO_DATA, new, num_prompt=4)
    assert joined.columns[EXPERT_IDS].tolist() == rows[:2].tolist()
    hashed = RouteHash()
    hashed.add(torch.from_numpy(rows[:2]).long())
    wanted = hashed.of_rows(torch.arange(2))
    assert wanted is not None and joined.columns[ROUTES].tolist() == wanted.tolist()
    later = routes.added_to(NO_DATA, TokenData.observed(np.arange(9, dtype=np.int32)), num_prompt=4)
    assert later.columns[ROUTES][-1] == 0  # unknown
    assert not joined.prompt_routes
