"""New weights in mid-flight: a token has the log-prob that the weights it is labelled with give the
whole history.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from spmd_rl.kernels import PackedAttention, token_logprobs
from spmd_rl.model.network import CausalLM
from spmd_rl.rollout.engine import Request, SamplingConfig
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.rollout.native.engine import NativeEngine
from spmd_rl.types.samples import Sample
from tests.gpu.rollout.graph_case import DEVICE, SPEC, inverse_temperatures, new_model
from tests.samples import Samples

OLD, NEW = 0, 1  # versions, and the seeds of their weights
NUM_STEPS = 30  # before the push: behind the prompts, short of the shortest answer
LATER = 100  # added to the uids of those that come after it
CUDA_GRAPHS = {"graphs": True, "step by step": False}


@pytest.fixture(scope="module")
def models() -> dict[int, CausalLM]:
    """The weights of each version, to score with."""
    return {version: new_model(version) for version in (OLD, NEW)}


def requests(first_uid: int = 0) -> list[Request]:
    """Three samples of each prompt; prompts begin alike, over several pages."""
    stem = np.random.default_rng(2).integers(2, SPEC.vocab_size, 300).astype(np.int32)
    kinds = [
        SamplingConfig(),
        SamplingConfig(temperature=0.7),
        SamplingConfig(temperature=1.3, top_k=50, top_p=0.9, replay_filters=False),
        SamplingConfig(temperature=0.0),
    ]
    return [
        Request(
            first_uid + uid,
            index,
            stem[: 20 + 70 * uid],
            replace(kind, max_tokens=60 + 7 * uid, ignore_eos=True),
            seed=4,
        )
        for uid, kind in enumerate(kinds)
        for index in range(3)
    ]


def in_flight(cuda_graphs: bool) -> NativeEngine:
    """An engine with the old weights, in the middle of every answer."""
    cfg = NativeEngineConfig(
        dtype="bfloat16",
        max_batch=32,
        max_step_tokens=256,
        page_size=16,
        num_pages=600,
        cuda_graphs=cuda_graphs,
    )
    engine = NativeEngine(new_model(OLD), cfg, DEVICE)
    engine.sink().commit(OLD)
    for request in requests():
        engine.submit(request)
    for _ in range(NUM_STEPS):
        assert not engine.step().finished
    assert engine.stats()["num_running"] == len(requests())
    return engine


def push(engine: NativeEngine, model: CausalLM) -> Samples:
    """Put in the new weights, submit the same prompts again, and finish all."""
    weights, sink = dict(model.named_parameters()), engine.sink()
    sink.open()
    for piece in sink.layout(0).pieces:
        slot = sink.slot(piece.name, piece.box)
        assert slot is not None
        slot.copy_(weights[piece.name])
    sink.flush()
    sink.commit(NEW)
    for request in requests(LATER):
        engine.submit(request)
    samples: Samples = {}
    while engine.has_work:
        samples |= {(sample.prompt_uid, sample.index): sample for sample in engine.step().finished}
    return samples


def scored(model: CausalLM, request: Request, sample: Sample) -> NDArray[np.float32]:
    """The log-probs of the training forward, each token's from the whole history before it."""
    tokens = torch.from_numpy(np.concatenate([request.prompt, sample.tokens])).long().to(DEVICE)
    attend = PackedAttention(
        np.array([len(tokens)]),
        device=DEVICE,
    )
    rows = torch.arange(len(request.prompt) - 1, len(tokens) - 1, device=DEVICE)
    logits = model(tokens, torch.arange(len(tokens), device=DEVICE), attend, rows)
    inverse = inverse_temperatures(sample)
    return token_logprobs(logits, tokens[rows + 1], inverse)[0].cpu().numpy()


def mismatched(model: CausalLM, wanted: list[Request], samples: Samples, version: int) -> int:
    """How many tokens labelled `version` carry other bits than `model` gives them."""
    count = 0
    for request in wanted:
        sample = samples[request.uid, request.index]
        differs = scored(model, request, sample).view(np.int32) != sample.logprobs.view(np.int32)
        count += int(differs[sample.versions == version].sum())
    return count


@pytest.mark.parametrize("cuda_graphs", CUDA_GRAPHS.values(), ids=CUDA_GRAPHS)
def test_each_token_carries_the_logprob_of_its_version(
    models: dict[int, CausalLM], cuda_graphs: bool
) -> None:
    """Scored with the other version's weights it does not: the comparison can tell them apart."""
    engine = in_flight(cuda_graphs)
    recorded = engine.stats()["num_graphs"]
    assert (recorded > 0) is cuda_graphs
    samples = push(engine, models[NEW])
    assert engine.stats()["num_retractions"] == len(requests())
    for request in requests():
        assert np.unique(samples[request.uid, request.index].versions).tolist() == [OLD, NEW]
        assert (np.diff(samples[request.uid, request.index].versions) >= 0).all()
    for request in requests(LATER):
        assert np.unique(samples[request.uid, request.index].versions).tolist() == [NEW]
    for version, other in ((OLD, NEW), (NEW, OLD)):
        assert mismatched(models[version], requests(), samples, version) == 0
        assert mismatched(models[other], requests(), samples, version) > 0
    assert mismatched(models[NEW], requests(LATER), samples, NEW) == 0


@pytest.mark.parametrize("cuda_graphs", CUDA_GRAPHS.values(), ids=CUDA_GRAPHS)
def test_control_keys_of_the_old_weights_are_seen(
    models: dict[int, CausalLM], cuda_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of sequences in flight, and those that later prompts find in the prefix cache."""
    engine = in_flight(cuda_graphs)
    hits = engine.stats()["num_hit_tokens"]
    monkeypatch.setattr(engine.scheduler, "discard_kv", lambda version: None)
    samples = push(engine, models[NEW])
    assert engine.stats()["num_hit_tokens"] > hits
    assert mismatched(models[OLD], requests(), samples, OLD) == 0
    assert mismatched(models[NEW], requests(), samples, NEW) > 0
    assert mismatched(models[NEW], requests(LATER), samples, NEW) > 0
