"""The plain engine: its tokens and log-probs against transformers, and against itself alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from spmd_rl.errors import ConfigError
from spmd_rl.rollout.engine import Request, SamplingConfig
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.rollout.plain.config import PlainEngineConfig, in_place_of
from spmd_rl.rollout.plain.engine import PlainEngine
from spmd_rl.types.kept_sets import decode_sets
from tests.foreign_folders import reference, write_foreign_folder
from tests.samples import finish

CPU = torch.device("cpu")
NUM_TOKENS = 12
FAMILIES = ("gemma3_text", "opt", "mamba")  # a window, own positions, and no cache of keys


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_foreign_folder(tmp_path_factory.mktemp("plain"), request.param)


def engine_of(model: str, max_batch: int = 16) -> PlainEngine:
    return PlainEngine(PlainEngineConfig(max_batch=max_batch), model, CPU, str)


def prompt(uid: int) -> NDArray[np.int32]:
    generator = np.random.default_rng(uid)
    return generator.integers(2, 100, int(generator.integers(3, 12))).astype(np.int32)


def asked(uid: int, index: int = 0, **sampling: Any) -> Request:
    settings = {"max_tokens": NUM_TOKENS, "ignore_eos": True} | sampling
    return Request(uid, index, prompt(uid), SamplingConfig(**settings), seed=7)


def test_greedy_tokens_are_those_that_transformers_generates(model: str) -> None:
    theirs = reference(model)
    samples = finish(engine_of(model), [asked(uid, temperature=0.0) for uid in range(5)])
    for uid in range(5):
        tokens = torch.tensor(prompt(uid))[None].long()
        expected = theirs.generate(
            tokens, max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0, tokens.shape[1] :]
        assert samples[uid, 0].tokens.tolist() == expected.tolist()


def test_log_probs_are_those_of_a_whole_pass_of_transformers(model: str) -> None:
    theirs, temperature = reference(model), 0.7
    requests = [asked(uid, index, temperature=temperature) for uid in range(4) for index in (0, 1)]
    for (uid, _), sample in finish(engine_of(model), requests).items():
        tokens = torch.tensor(np.concatenate([prompt(uid), sample.tokens]))[None].long()
        with torch.no_grad():
            logits = theirs(input_ids=tokens).logits[0, -1 - NUM_TOKENS : -1]
        logprobs = (logits / temperature).log_softmax(-1)
        expected = logprobs.gather(1, tokens[0, -NUM_TOKENS:, None])[:, 0]
        np.testing.assert_allclose(sample.logprobs, expected.numpy(), atol=2e-5)
        assert sample.temperature == pytest.approx(temperature)


def test_draws_depend_neither_on_the_batch_nor_on_its_size(model: str) -> None:
    requests = [asked(uid, index) for uid in range(6) for index in range(3)]
    together, few = (finish(engine_of(model, size), requests) for size in (64, 4))
    alone = finish(engine_of(model), [asked(3, 1)])[3, 1]
    assert {key: one.tokens.tolist() for key, one in together.items()} == {
        key: one.tokens.tolist() for key, one in few.items()
    }
    assert alone.tokens.tolist() == together[3, 1].tokens.tolist()
    assert together[3, 0].tokens.tolist() != together[3, 1].tokens.tolist()


def test_a_filtered_draw_records_what_was_kept(tmp_path: Any) -> None:
    model = write_foreign_folder(tmp_path)
    requests = [asked(1, top_k=3), asked(2, top_k=3, replay_filters=False), asked(3)]
    samples = finish(engine_of(model), requests)
    sizes, ids = decode_sets(np.frombuffer(samples[1, 0].kept, np.uint8))
    assert sizes.tolist() == [3] * NUM_TOKENS
    assert all(map(np.isin, samples[1, 0].tokens, np.split(ids, NUM_TOKENS)))
    assert samples[2, 0].kept == samples[3, 0].kept == b""


def test_a_plain_engine_takes_the_settings_of_a_native_one_that_it_has_too() -> None:
    native = NativeEngineConfig(max_batch=8, dtype="float32", load_weights=False)
    assert in_place_of(native) == PlainEngineConfig(
        max_batch=8, dtype="float32", load_weights=False
    )
    with pytest.raises(ConfigError, match=r"engine.page_size = 64 is for engine.kind = 'native'"):
        in_place_of(NativeEngineConfig(page_size=64))
