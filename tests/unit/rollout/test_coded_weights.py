"""An engine whose weights are in few bits: the bits of an engine with what its codes stand for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from spmd_rl.check.engine import check_engine
from spmd_rl.config.run import RunConfig
from spmd_rl.errors import ConfigError
from spmd_rl.model.formats import FORMATS, WeightFormat
from spmd_rl.model.formats.coded_tensors import as_codes, as_rounded, hold_codes
from spmd_rl.model.formats.coded_weights import coded_shapes, scale_name
from spmd_rl.model.hf import fill, random_weights
from spmd_rl.model.network import CausalLM
from spmd_rl.model.spec import ModelSpec
from spmd_rl.rollout.engine import Request, SamplingConfig
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.rollout.native.engine import NativeEngine
from spmd_rl.rollout.sglang.config import SglangEngineConfig
from spmd_rl.train.config import TrainerConfig
from spmd_rl.weights.ends import WeightSink
from tests.specs import dense_spec, with_experts

Weights = Iterable[tuple[str, Tensor]]
SPEC = dense_spec(
    "qwen2",
    vocab=37,
    hidden=160,
    inner=200,
    layers=2,
    heads=(4, 2, 8),
    positions=192,
    tie_embeddings=False,
    qkv_bias=True,
    eos_ids=(1,),
    init_std=0.3,
)


def engine_of(weights: WeightFormat, tensors: Weights) -> NativeEngine:
    model = CausalLM(SPEC).requires_grad_(False)
    cfg = replace(NativeEngineConfig(), weights=weights)
    hold_codes(model, SPEC, cfg.weights)
    fill(model, tensors)
    engine = NativeEngine(model, cfg, torch.device("cpu"))
    engine.sink().commit(1)
    return engine


def drawn(engine: NativeEngine) -> list[bytes]:
    """Return tokens and log-probs of a few samples."""
    for index in range(3):
        prompt = np.arange(2, 9 + 5 * index, dtype=np.int32)
        sampling = SamplingConfig(max_tokens=12, ignore_eos=True)
        engine.submit(Request(1, index, prompt, sampling, seed=3))
    found = {}
    while engine.has_work:
        found |= {one.index: one for one in engine.step().finished}
    return [found[n].tokens.tobytes() + found[n].logprobs.tobytes() for n in sorted(found)]


def unchanged(tensors: Weights, spec: ModelSpec, weights: WeightFormat) -> Weights:
    return tensors


Convert = Callable[[Weights, ModelSpec, WeightFormat], Weights]
NAMES: tuple[WeightFormat, ...] = ("e4m3", "int4")


def converted(convert: Convert, weights: WeightFormat = "e4m3") -> Weights:
    return convert(random_weights(SPEC, 0), SPEC, weights)


@pytest.mark.parametrize("weights", NAMES)
def test_codes_draw_the_bits_of_what_they_stand_for(weights: WeightFormat) -> None:
    codes = drawn(engine_of(weights, converted(as_codes, weights)))
    assert codes == drawn(engine_of("full", converted(as_rounded, weights)))
    assert codes != drawn(engine_of("full", converted(unchanged)))


@pytest.mark.parametrize("weights", NAMES)
def test_the_engine_holds_codes_and_scales_alone(weights: WeightFormat) -> None:
    model = CausalLM(SPEC).requires_grad_(False)
    hold_codes(model, SPEC, weights)
    held = dict(model.named_parameters())
    shapes, layout = coded_shapes(SPEC, weights), FORMATS[weights]
    assert held.keys() == SPEC.parameter_shapes().keys() | set(map(scale_name, shapes))
    others = held.keys() - shapes - set(map(scale_name, shapes))
    assert {held[name].dtype for name in others} == {torch.float32}
    for name, shape in shapes.items():
        codes, scales = held[name], held[scale_name(name)]
        assert (codes.dtype, scales.dtype) == (
            getattr(torch, layout.code_dtype),
            getattr(torch, layout.scale_dtype),
        )
        assert codes.nbytes + scales.nbytes == layout.num_bytes(shape)
    assert "lm_head.weight" not in shapes and "model.embed_tokens.weight" not in shapes


def flip_a_code(sink: WeightSink) -> None:
    """Flip the lowest bit of one code where a push has put it."""
    name = next(iter(coded_shapes(SPEC, "e4m3")))
    piece = next(one for one in sink.layout(0).pieces if one.name == name)
    slot = sink.slot(name, piece.box)
    assert slot is not None
    slot.view(torch.uint8)[3, 5] ^= 1


@pytest.mark.parametrize("weights", NAMES)
def test_the_digest_sees_one_code_that_differs(weights: WeightFormat) -> None:
    engine = engine_of(weights, converted(as_codes, weights))
    sink = engine.sink()
    before = sink.digest()
    assert sink.digest() == before
    flip_a_code(sink)
    changed = {key for key, value in sink.digest().items() if value != before[key]}
    assert len(changed) == 1


def test_experts_are_in_8_bits_and_their_router_is_not() -> None:
    names = coded_shapes(with_experts(SPEC, 3, 2, 24), "e4m3")
    of_layer = {name.removeprefix("model.layers.1.") for name in names if ".1.mlp." in name}
    projections = ("gate_proj", "up_proj", "down_proj")
    assert of_layer == {f"mlp.experts.{n}.{one}.weight" for n in range(3) for one in projections}


@pytest.mark.parametrize("kind", [NativeEngineConfig, SglangEngineConfig])
def test_formats_that_differ_are_refused(kind: type) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.weights"):
        check_engine(kind(), RunConfig(exact=False), TrainerConfig(weights="e4m3"))
    with pytest.raises(ConfigError, match=r"trainer\.weights"):
        check_engine(NativeEngineConfig(weights="e4m3"), RunConfig(), TrainerConfig())
    with pytest.raises(ConfigError, match=r"trainer\.weights"):
        check_engine(NativeEngineConfig(weights="int4"), RunConfig(), TrainerConfig(weights="e4m3"))
