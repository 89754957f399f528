"""What every engine does, whatever its kind: one suite of tests, which a file runs for its engines.

    class TestNative(EngineSuite):
        @pytest.fixture
        def case(self): ...

The answers are greedy, so that an engine without reproducible draws passes too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from spmd_rl.errors import DataError, ResidencyError, SpmdError
from spmd_rl.rollout.engine import Engine, Request, SamplingConfig
from spmd_rl.types.samples import Sample
from spmd_rl.weights.delivery import Delivery
from spmd_rl.weights.ends import WeightSink
from spmd_rl.weights.local_tensors import LocalTensors
from spmd_rl.weights.plan.layout import Box
from spmd_rl.weights.plan.moves import Move
from spmd_rl.weights.proof.digest import digest
from tests.samples import Samples, finish

NUM_TOKENS = 24  # of a whole sample
GREEDY = SamplingConfig(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


@dataclass
class EngineCase:
    """One engine, two sets of weights for it, and what differs between kinds.

    `advance` has the engine draw about so many tokens of each request that runs. `release` lets it
    draw on freely, and `hold` ends that. An engine that is not `exact` may take another token where
    two are about as likely, after other batches. `decode` is what the engine was given for stop
    strings.
    """

    engine: Engine
    weights: Mapping[str, Tensor]
    other_weights: Mapping[str, Tensor]
    vocab_size: int
    decode: Callable[[tuple[int, ...]], str]
    advance: Callable[[int], None]
    release: Callable[[], None] = lambda: None
    hold: Callable[[], None] = lambda: None
    sleeps_weights: bool = False
    exact: bool = True
    num_tokens: int = NUM_TOKENS  # of a whole sample: enough to be running when something happens

    def push(self, version: int, weights: Mapping[str, Tensor] | None = None) -> None:
        push(self.engine, weights or self.weights, version)

    def same(self, one: Sample, other: Sample) -> bool:
        """Whether two samples are the same, as far as this engine promises it."""
        length = None if self.exact else 1
        return (one.prompt_uid, one.index, one.status, len(one.tokens)) == (
            other.prompt_uid,
            other.index,
            other.status,
            len(other.tokens),
        ) and np.array_equal(one.tokens[:length], other.tokens[:length])

    def finish(self, *requests: Request) -> Samples:
        for request in requests:
            self.engine.submit(request)
        self.release()
        samples = finish(self.engine)
        self.hold()
        return samples

    def request(self, uid: int, index: int = 0, length: int = 7, **sampling: Any) -> Request:
        prompt = np.random.default_rng(uid).integers(2, self.vocab_size, length).astype(np.int32)
        given = {"max_tokens": self.num_tokens} | sampling
        return Request(uid, index, prompt, replace(GREEDY, **given))


def put(sink: WeightSink, weights: Mapping[str, Tensor]) -> None:
    """Put whole tensors into a sink, in boxes for which it has room."""
    delivery = Delivery(sink)
    for name, tensor in weights.items():
        box = Box((0,) * tensor.ndim, tuple(tensor.shape))
        dtype = str(tensor.dtype).removeprefix("torch.")
        delivery.put(Move(name, box, dtype, 0, 0, box), tensor)
    delivery.flush()


def push(engine: Engine, weights: Mapping[str, Tensor], version: int) -> None:
    """Push whole tensors, with a check of the digests."""
    sink = engine.sink()
    sink.open()
    put(sink, weights)
    own = digest(LocalTensors.whole(dict(weights)))
    assert {name: value for (name, _), value in sink.digest().items()} == own
    sink.commit(version)


class EngineSuite:
    """Subclass it with a fixture `case` that yields an EngineCase."""

    def test_a_sample_has_all_its_tokens(self, case: EngineCase) -> None:
        case.push(3)
        requests = [case.request(uid, index) for uid in (4, 5) for index in (0, 1)]
        samples = case.finish(*requests)
        assert set(samples) == {(4, 0), (4, 1), (5, 0), (5, 1)}
        for sample in samples.values():
            assert (len(sample.tokens), sample.status) == (case.num_tokens, "truncated")
            assert sample.versions.tolist() == [3] * case.num_tokens
            assert np.isfinite(sample.logprobs).all()
            assert (sample.logprobs <= 0).all()
            assert (sample.tokens >= 0).all()
            assert (sample.tokens < case.vocab_size).all()
        assert not case.engine.has_work

    def test_steps_add_up_to_the_samples(self, case: EngineCase) -> None:
        case.push(0)
        for uid in range(3):
            case.engine.submit(case.request(uid))
        case.release()
        tokens: dict[int, list[int]] = {uid: [] for uid in range(3)}
        finished = []
        while case.engine.has_work:
            output = case.engine.step()
            for uid, token in zip(output.uids.tolist(), output.tokens.tolist(), strict=True):
                tokens[uid].append(token)
            finished += output.finished
        assert {one.prompt_uid: one.tokens.tolist() for one in finished} == tokens

    def test_what_cannot_be_served_is_refused(self, case: EngineCase) -> None:
        case.push(0)
        case.engine.submit(case.request(1))
        with pytest.raises(SpmdError, match="prompt 1, sample 0 is in the engine already"):
            case.engine.submit(case.request(1))
        with pytest.raises(DataError, match="has no tokens"):
            case.engine.submit(case.request(2, length=0))
        outside = replace_prompt(case.request(3), case.vocab_size)
        with pytest.raises(DataError, match="outside the model's vocabulary"):
            case.engine.submit(outside)
        case.engine.abort()

    def test_a_stop_id_ends_a_sample_and_stays(self, case: EngineCase) -> None:
        case.push(0)
        whole = case.finish(case.request(1))[1, 0].tokens.tolist()
        stop = whole[10]
        end = whole.index(stop) + 1
        sample = case.finish(case.request(1, stop_ids=(stop,)))[1, 0]
        assert (sample.status, sample.tokens.tolist()) == ("completed", whole[:end])
        assert len(sample.logprobs) == len(sample.versions) == end
        known = case.finish(case.request(1, stop_ids=(stop,), ignore_eos=False))[1, 0]
        assert known.tokens.tolist() == whole[: len(known.tokens)]
        assert known.status == "completed"
        assert len(known.tokens) <= end

    def test_a_stop_string_ends_a_sample_and_stays(self, case: EngineCase) -> None:
        case.push(0)
        whole = case.finish(case.request(1))[1, 0].tokens.tolist()
        text = case.decode(tuple(whole))
        stop = case.decode(tuple(whole[8:11]))
        sample = case.finish(case.request(1, stop=(stop,)))[1, 0]
        assert sample.status == "completed"
        assert sample.tokens.tolist() == whole[: len(sample.tokens)]
        made = case.decode(tuple(sample.tokens.tolist()))
        assert stop in made
        assert len(made) <= text.index(stop) + len(stop) + 1

    def test_an_aborted_answer_goes_on_as_if_unbroken(self, case: EngineCase) -> None:
        case.push(0)
        request = case.request(6)
        unbroken = case.finish(request)[6, 0]
        for steps in (1, 9):
            case.engine.submit(request)
            case.advance(steps)
            (partial,) = case.engine.abort(6, 0)
            assert partial.status == "aborted"
            assert not case.engine.has_work
            num_tokens = len(partial.tokens)
            num_compared = num_tokens if case.exact else min(num_tokens, 1)
            compared = slice(num_compared)
            assert partial.tokens[compared].tolist() == unbroken.tokens[compared].tolist()
            if num_tokens < case.num_tokens:
                assert case.same(case.finish(request.resumed(partial))[6, 0], unbroken)

    def test_an_abort_leaves_the_others_alone(self, case: EngineCase) -> None:
        case.push(0)
        # in hexadecimal, the first uid begins the second
        requests = [case.request(uid, index) for uid in (0x1, 0x12) for index in (1, 0x10)]
        alone = {key: sample for one in requests for key, sample in case.finish(one).items()}
        for request in requests:
            case.engine.submit(request)
        case.advance(3)
        aborted = case.engine.abort(0x1, 1)
        assert [(one.prompt_uid, one.index) for one in aborted] == [(0x1, 1)]
        rest = case.finish()
        assert set(rest) == {(0x1, 0x10), (0x12, 1), (0x12, 0x10)}
        assert all(case.same(sample, alone[key]) for key, sample in rest.items())

    def test_all_can_be_aborted(self, case: EngineCase) -> None:
        case.push(0)
        for uid in range(5):
            case.engine.submit(case.request(uid))
        case.advance(2)
        assert len(case.engine.abort()) == 5
        assert not case.engine.has_work
        assert case.engine.abort() == []
        assert case.engine.stats()["num_running"] == 0

    def test_without_weights_nothing_is_generated(self, case: EngineCase) -> None:
        case.engine.submit(case.request(1))
        with pytest.raises(SpmdError, match="no weights of a known version"):
            case.engine.step()
        case.push(1)
        assert case.finish()[1, 0].versions.tolist() == [1] * case.num_tokens

    def test_during_a_push_nothing_is_generated(self, case: EngineCase) -> None:
        case.push(1)
        case.engine.submit(case.request(1))
        case.advance(2)
        sink = case.engine.sink()
        sink.open()
        sink.open()
        with pytest.raises(SpmdError, match="no weights of a known version"):
            case.engine.step()
        case.push(2)
        assert set(case.finish()[1, 0].versions.tolist()) <= {1, 2}

    def test_every_token_has_the_version_that_drew_it(self, case: EngineCase) -> None:
        case.push(1)
        requests = [case.request(uid) for uid in range(3)]
        old = case.finish(*requests)
        for request in requests:
            case.engine.submit(request)
        case.advance(4)
        case.push(2, case.other_weights)
        mixed = case.finish()
        for key, sample in mixed.items():
            versions = sample.versions.tolist()
            assert versions == sorted(versions)
            num_old = versions.count(1)
            compared = slice(num_old if case.exact else min(num_old, 1))
            assert sample.tokens[compared].tolist() == old[key].tokens[compared].tolist()
            assert versions[num_old:] == [2] * (case.num_tokens - num_old)
        assert any(2 in sample.versions for sample in mixed.values())

    def test_asleep_it_waits_and_goes_on_afterwards(self, case: EngineCase) -> None:
        case.push(1)
        request = case.request(9)
        unbroken = case.finish(request)[9, 0]
        case.engine.submit(request)
        case.advance(3)
        case.engine.sleep()
        case.engine.sleep()
        assert case.engine.has_work
        with pytest.raises(ResidencyError, match="asleep"):
            case.engine.step()
        case.engine.wake()
        case.engine.wake()
        if case.sleeps_weights:
            with pytest.raises(SpmdError, match="no weights of a known version"):
                case.engine.step()
            case.push(1)
        assert case.same(case.finish()[9, 0], unbroken)

    def test_weights_wake_for_a_push_before_the_pages(self, case: EngineCase) -> None:
        case.push(1)
        unbroken = case.finish(case.request(9))[9, 0]
        case.engine.sleep(("weights", "kv"))
        case.engine.wake(("weights",))
        case.push(1)
        case.engine.submit(case.request(9))
        with pytest.raises(ResidencyError, match="asleep"):
            case.engine.step()
        case.engine.wake(("kv",))
        assert case.same(case.finish()[9, 0], unbroken)

    def test_a_sink_takes_the_whole_model(self, case: EngineCase) -> None:
        layout = case.engine.sink().layout(5)
        assert layout.rank == 5
        assert {piece.name: piece.shape for piece in layout.pieces} == {
            name: tuple(tensor.shape) for name, tensor in case.weights.items()
        }

    def test_counts(self, case: EngineCase) -> None:
        case.push(0)
        before = case.engine.stats()["num_generated_tokens"]
        case.finish(case.request(1), case.request(2))
        counts = case.engine.stats()
        assert counts["num_generated_tokens"] - before >= 2 * case.num_tokens
        assert counts["num_running"] == counts["num_waiting"] == 0
        assert counts["num_steps"] > 0


def replace_prompt(request: Request, token: int) -> Request:
    prompt = request.prompt.copy()
    prompt[0] = token
    return Request(request.uid, request.index, prompt, request.sampling)
