"""The native engine's behaviour request by request: streaming, endings, versions, sleep, and clear
refusals.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spmd_rl.errors import ConfigError, DataError, ResidencyError, SpmdError
from spmd_rl.offload.host import HostMemory
from spmd_rl.rollout.engine import Request, SamplingConfig
from spmd_rl.rollout.native.auto_sizes import auto_pages
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.rollout.native.engine import NativeEngine

EOS = 1


def request(uid=0, index=0, prompt=(5, 6, 7), **sampling) -> Request:
    sampling.setdefault("ignore_eos", True)
    return Request(
        uid,
        index,
        np.array(prompt, dtype=np.int32),
        SamplingConfig(**{"max_tokens": 8, **sampling}),
    )


def letters(tokens: tuple[int, ...]) -> str:
    return "".join(chr(ord("A") + token) for token in tokens)


def test_tokens_stream_and_add_up_to_the_sample(model, new_engine):
    engine = new_engine(model)
    for index in range(3):
        engine.submit(request(index=index, max_tokens=4 + index))
    streamed: dict[int, list] = {0: [], 1: [], 2: []}
    finished = []
    while engine.has_work:
        progress = engine.step()
        for index, token, logprob in zip(
            progress.indices, progress.tokens, progress.logprobs, strict=True
        ):
            streamed[int(index)].append((token, logprob))
        finished += progress.finished
    assert [sample.index for sample in finished] == [0, 1, 2]
    for sample in finished:
        assert len(sample.tokens) == 4 + sample.index
        assert list(zip(sample.tokens, sample.logprobs, strict=True)) == streamed[sample.index]
        assert sample.status == "truncated"
        assert sample.tokens.dtype == np.int32
        assert sample.logprobs.dtype == np.float32
        assert (sample.logprobs <= 0).all()


def test_requests_join_a_running_batch(model, new_engine):
    engine = new_engine(model)
    engine.submit(request(uid=0))
    engine.step()
    engine.submit(request(uid=1))
    assert engine.step().uids.tolist() == [0, 1]


def test_a_step_says_which_requests_it_has_started(model, new_engine):
    """Each once, also where several fork from one prompt, or one waits for a free row."""
    engine = new_engine(model, max_batch=3)
    for index in range(4):
        engine.submit(request(index=index, max_tokens=2 + index))
    seen = []
    while engine.has_work:
        seen.append([index for _, index in engine.step().started])
    assert seen[0] == [0, 1, 2]
    assert [*filter(None, seen[1:])] == [[3]]


def test_a_step_without_work_does_nothing(model, new_engine):
    progress = new_engine(model).step()
    assert len(progress.tokens) == 0
    assert progress.finished == []


def test_eos_and_stop_ids_end_a_sample_and_stay_in_it(model, new_engine, finish):
    free = finish(new_engine(model), [request(index=i, max_tokens=60) for i in range(8)])
    with_eos = finish(
        new_engine(model), [request(index=i, max_tokens=60, ignore_eos=False) for i in range(8)]
    )
    for name, sample in free.items():
        tokens = sample.tokens.tolist()
        expected = tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens
        assert with_eos[name].tokens.tolist() == expected
        assert with_eos[name].status == ("completed" if expected[-1] == EOS else "truncated")
    assert any(sample.status == "completed" for sample in with_eos.values())

    stop_id = int(free[0, 0].tokens[3])
    pair = [request(stop_ids=(36, stop_id), max_tokens=60), request(index=1, max_tokens=60)]
    stopped = finish(new_engine(model), pair)
    tokens = free[0, 0].tokens.tolist()
    assert stopped[0, 0].tokens.tolist() == tokens[: tokens.index(stop_id) + 1]
    assert stopped[0, 1].tokens.tolist() == free[0, 1].tokens.tolist()


def test_stop_strings_end_a_sample_and_stay_in_it_through_abort_and_resume(
    model, new_engine, finish
):
    free = finish(new_engine(model), [request(max_tokens=40)])[0, 0]
    stop = letters(tuple(free.tokens[9:12].tolist()))
    assert letters(tuple(free.tokens.tolist())).index(stop) == 9
    wanted = request(max_tokens=40, stop=("never there", stop))
    sample = finish(new_engine(model, decode=letters), [wanted])[0, 0]
    assert sample.tokens.tolist() == free.tokens[:12].tolist()
    assert sample.status == "completed"

    engine = new_engine(model, decode=letters)
    engine.submit(wanted)
    for _ in range(11):
        engine.step()
    (partial,) = engine.abort()
    assert finish(engine, [wanted.resumed(partial)])[0, 0].tokens.tolist() == sample.tokens.tolist()


def test_abort_picks_by_uid_and_index_and_returns_what_there_is(model, new_engine, finish):
    engine = new_engine(model, max_batch=2)
    for uid in range(2):
        for index in range(2):
            engine.submit(request(uid, index))
    engine.step()
    assert [(s.prompt_uid, s.index, len(s.tokens)) for s in engine.abort(uid=0, index=1)] == [
        (0, 1, 1)
    ]
    assert [(s.prompt_uid, s.index, len(s.tokens)) for s in engine.abort(uid=1)] == [
        (1, 0, 0),
        (1, 1, 0),
    ]
    assert engine.abort(uid=9) == []
    assert finish(engine).keys() == {(0, 0)}
    assert not engine.has_work


def test_every_token_names_the_weights_that_made_it(
    new_model, new_engine, finish, mismatched_tokens
):
    model, other = new_model(seed=0), new_model(seed=1)
    engine = new_engine(model, page_size=2)
    asked = request(max_tokens=9)
    engine.submit(asked)
    for _ in range(4):
        engine.step()
    model.load_state_dict(other.state_dict())
    engine.sink().commit(7)
    sample = finish(engine)[0, 0]
    assert sample.versions.tolist() == [0] * 4 + [7] * 5
    # what came after the push was computed under the new weights only, the keys and values of
    # earlier tokens included
    as_prompt = Request(0, 0, np.concatenate([asked.prompt, sample.tokens[:4]]), asked.sampling)
    sample = type(sample)(
        0, 0, sample.tokens[4:], sample.logprobs[4:], sample.versions[4:], "truncated"
    )
    assert mismatched_tokens(model, [as_prompt], {(0, 0): sample}) == 0


def test_context_ends_a_sample(model, new_engine, finish):
    sample = finish(new_engine(model), [request(prompt=[3] * 190, max_tokens=50)])[0, 0]
    assert len(sample.tokens) == 2
    assert sample.status == "truncated"


def test_an_engine_that_finds_no_room_says_what_asks_for_less(model, new_engine, monkeypatch):
    def full(memory: HostMemory) -> None:
        raise ResidencyError("9 GiB are asked for, and the GPU has 8 GiB left")

    engine = new_engine(model)
    engine.sleep()
    monkeypatch.setattr(HostMemory, "map", full)
    with pytest.raises(
        ResidencyError,
        match=r"no room for pages .*: 9 GiB are asked for, .* engine.memory_fraction asks",
    ):
        engine.wake()


def test_sleep_gives_memory_back_and_wake_goes_on_with_the_same_bits(model, new_engine, finish):
    expected = finish(new_engine(model), [request()])[0, 0]
    engine = new_engine(model, page_size=1)
    engine.submit(request())
    engine.step()
    engine.sleep()
    assert engine.stats()["kv_bytes"] == 0
    engine._runner.cache.data.zero_()  # as the system does where it runs short of memory
    with pytest.raises(ResidencyError, match="asleep"):
        engine.step()
    engine.wake()
    sample = finish(engine)[0, 0]
    assert sample.logprobs.tobytes() == expected.logprobs.tobytes()


def test_no_generation_before_the_first_version(model):
    engine = NativeEngine(model, NativeEngineConfig(), torch.device("cpu"))
    engine.submit(request())
    with pytest.raises(SpmdError, match="no weights of a known version: push one"):
        engine.step()


def test_nan_weights_are_named_and_leave_nothing_behind(new_model, new_engine, finish):
    model = new_model()
    engine = new_engine(model, num_pages=16)
    expected = finish(engine, [request(uid=3)])[3, 0]
    kept = model.model.norm.weight.clone()
    value = model.model.layers[0].self_attn.v_proj.weight
    kept_value = value.clone()
    value.fill_(float("nan"))
    engine.sink().commit(4)
    engine.submit(request(uid=3, prompt=range(2, 17)))
    with pytest.raises(
        SpmdError, match="weights version 4 give NaN logits: prompt 3, sample 0, response token 0"
    ):
        engine.step()
    engine.abort()
    value.copy_(kept_value)
    assert torch.equal(kept, model.model.norm.weight)
    engine.sink().commit(5)
    assert finish(engine, [request(uid=3)])[3, 0].logprobs.tobytes() == expected.logprobs.tobytes()


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        (
            request(uid=4, prompt=[2] * 192),
            "prompt 4: has 192 tokens, but the model's context is 192",
        ),
        (request(uid=4, prompt=[]), "prompt 4: has no tokens"),
        (
            request(uid=4, prompt=[2, 37]),
            "prompt 4: has token ids outside the model's vocabulary of 37",
        ),
        (
            request(uid=4, prompt=[2] * 60, max_tokens=30),
            "prompt 4: and its answer may need 89 tokens of KV memory",
        ),
        (request(stop=("x",)), "stop strings need a tokenizer"),
        (request(stop_ids=(3, 37)), "sampling.stop_ids holds 37: the ids of this model end at 36"),
    ],
)
def test_requests_that_cannot_work_are_refused_when_they_come(model, new_engine, bad, sentence):
    engine = new_engine(model, num_pages=5)
    with pytest.raises(SpmdError, match=sentence) as caught:
        engine.submit(bad)
    assert isinstance(caught.value, DataError | ConfigError)
    assert not engine.has_work


def test_a_request_that_just_fits_the_pages_is_taken_and_one_more_token_is_not(
    model, new_engine, finish
):
    """The last token of an answer needs no keys and values."""
    engine = new_engine(model, num_pages=5, page_size=4)
    assert len(finish(engine, [request(prompt=[2] * 10, max_tokens=11)])[0, 0].tokens) == 11
    with pytest.raises(DataError, match="may need 21 tokens of KV memory; the pages hold 20"):
        engine.submit(request(prompt=[2] * 10, max_tokens=12))


def test_each_sampling_of_a_prompt_is_checked(model, new_engine):
    engine, good = new_engine(model), request()
    engine.submit(good)
    with pytest.raises(ConfigError, match="stop_ids holds 99"):
        engine.submit(Request(0, 1, good.prompt, SamplingConfig(stop_ids=(99,))))


def test_one_name_is_in_the_engine_once(model, new_engine, finish):
    engine = new_engine(model)
    engine.submit(request(uid=2, index=1))
    with pytest.raises(SpmdError, match="prompt 2, sample 1 is in the engine already"):
        engine.submit(request(uid=2, index=1))
    finish(engine)
    engine.submit(request(uid=2, index=1))


@pytest.mark.parametrize(
    ("build", "key"),
    [
        (lambda: SamplingConfig(temperature=-1.0), "temperature"),
        (lambda: SamplingConfig(temperature=float("nan")), "temperature"),
        (lambda: SamplingConfig(temperature=1e-30), "temperature"),
        (lambda: SamplingConfig(top_p=0.0), "top_p"),
        (lambda: SamplingConfig(temperature=1e39), "temperature"),
        (lambda: SamplingConfig(top_k=-1), "top_k"),
        (lambda: SamplingConfig(top_k=1 << 63), "top_k"),
        (lambda: SamplingConfig(stop_ids=(1 << 31,)), "stop_ids"),
        (lambda: SamplingConfig(stop_ids=(5, -1)), "stop_ids"),
        (lambda: SamplingConfig(min_p=1.5), "min_p"),
        (lambda: SamplingConfig(max_tokens=0), "max_tokens"),
        (lambda: SamplingConfig(num_samples=0), "num_samples"),
        (lambda: SamplingConfig(stop=("",)), "stop"),
        (lambda: SamplingConfig(stop=("end", "\ufffd")), "stop"),
        (lambda: NativeEngineConfig(page_size=12), "page_size"),
        (lambda: NativeEngineConfig(max_batch=64, max_step_tokens=32), "max_step_tokens"),
        (lambda: NativeEngineConfig(max_prefill_ms=-1.0), "max_prefill_ms"),
        (lambda: NativeEngineConfig(max_prefill_ms=float("inf")), "max_prefill_ms"),
        (lambda: NativeEngineConfig(dtype="float8"), "dtype"),
    ],
)
def test_config_values_out_of_range_are_named(build, key):
    with pytest.raises(ConfigError, match=f"^{key} = .*: expected "):
        build()


def test_automatic_pool_holds_a_full_batch_of_whole_contexts_or_what_memory_allows(model):
    cpu = torch.device("cpu")
    small = NativeEngineConfig(max_batch=3)
    assert auto_pages(model.spec, small, cpu, torch.float32, 16) == 3 * 12
    large = NativeEngineConfig(max_batch=1 << 20)
    bytes_per_token = 2 * 2 * 2 * 8 * 4
    assert auto_pages(model.spec, large, cpu, torch.float32, 64) * 64 * bytes_per_token == 1 << 30


def test_bfloat16_engine_is_exact_too(new_model, new_engine, finish, mismatched_tokens):
    model = new_model().bfloat16()
    requests = [
        request(uid, index, range(2, 9 + 9 * uid)) for uid in range(3) for index in range(4)
    ]
    alone = {}
    for one in requests:
        alone |= finish(new_engine(model, max_batch=1, dtype="bfloat16"), [one])
    together = finish(
        new_engine(model, max_batch=5, page_size=4, max_step_tokens=9, dtype="bfloat16"), requests
    )
    assert all(
        together[name].logprobs.tobytes() == alone[name].logprobs.tobytes() for name in alone
    )
    assert mismatched_tokens(model, requests, together) == 0


def test_a_forward_pass_that_pads_no_rows(model, new_engine, finish, monkeypatch):
    """As on a GPU where products keep the contract for any number of rows; the bits of a CPU's
    other ops change.
    """
    requests = [
        request(uid, index, range(2, 9 + 9 * uid)) for uid in range(3) for index in range(3)
    ]
    padded = finish(new_engine(model), requests)
    monkeypatch.setattr("spmd_rl.model.network.is_exact", lambda weight: True)
    whole = finish(new_engine(model), requests)
    for name, sample in padded.items():
        assert np.array_equal(whole[name].tokens, sample.tokens)
        assert np.allclose(whole[name].logprobs, sample.logprobs, atol=1e-5)


def test_kept_sets_stay_with_their_tokens_when_another_answer_is_aborted(model, new_engine, finish):
    """The step that runs while it is aborted has drawn for both."""
    requests = [request(uid=uid, top_k=uid + 3, max_tokens=12) for uid in (0, 1, 2)]
    alone = finish(new_engine(model), requests[1:])
    for num_steps in range(1, 7):
        engine = new_engine(model)
        for one in requests:
            engine.submit(one)
        for _ in range(num_steps):
            engine.step()
        engine.abort(0, 0)
        found = {}
        while engine.has_work:
            found |= {one.prompt_uid: one for one in engine.step().finished}
        for uid in (1, 2):
            assert found[uid].tokens.tolist() == alone[uid, 0].tokens.tolist()
            assert found[uid].kept == alone[uid, 0].kept
            assert found[uid].kept
