"""The engine's thread: its samples are the engine's, and what nobody waits for is not drawn."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from spmd_rl.errors import DataError, SpmdError
from spmd_rl.rollout.engine import Request, SamplingConfig
from spmd_rl.rollout.native.engine import NativeEngine
from spmd_rl.serve.engine_thread import NUM_CACHED, EngineThread
from spmd_rl.serve.token_scores import score
from tests.samples import finish

NewEngine = Callable[..., NativeEngine]
PROMPT = np.arange(2, 22, dtype=np.int32)


def request(uid: int = 0, index: int = 0, max_tokens: int = 8, prompt: Any = PROMPT) -> Request:
    return Request(uid, index, prompt, SamplingConfig(max_tokens=max_tokens, ignore_eos=True))


def played(engine: Any, play: Callable[[EngineThread], Coroutine[Any, Any, Any]]) -> Any:
    async def run() -> Any:
        thread = EngineThread(engine)
        try:
            return await play(thread)
        finally:
            await thread.close()

    return asyncio.run(run())


def test_samples_are_those_of_the_engine(new_engine: NewEngine) -> None:
    requests = [request(uid, index) for uid in range(3) for index in range(2)]
    shown: dict[tuple[int, int], list[int]] = {}

    async def play(thread: EngineThread) -> Any:
        return await asyncio.gather(
            *(
                thread.draw(one, shown.setdefault((one.uid, one.index), []).extend)
                for one in requests
            )
        )

    drawn = played(new_engine(), play)
    expected = finish(new_engine(), requests)
    for one in drawn:
        other = expected[one.prompt_uid, one.index]
        assert one.tokens.tolist() == other.tokens.tolist() == shown[one.prompt_uid, one.index]
        assert one.logprobs.tobytes() == other.logprobs.tobytes()


def test_what_nobody_waits_for_is_not_drawn(new_engine: NewEngine) -> None:
    engine = new_engine()

    async def play(thread: EngineThread) -> None:
        began = asyncio.Event()
        long = asyncio.ensure_future(
            thread.draw(request(max_tokens=100), lambda tokens: began.set())
        )
        await began.wait()
        long.cancel()
        await asyncio.wait([long])
        await thread.draw(request(uid=1, max_tokens=1))
        assert thread.num_open == 0

    played(engine, play)
    assert not engine.has_work
    assert engine.stats()["num_aborts"] == 1


def test_equal_names_are_drawn_one_after_the_other(new_engine: NewEngine) -> None:
    async def play(thread: EngineThread) -> Any:
        lost = asyncio.ensure_future(thread.draw(request(max_tokens=100)))
        await asyncio.sleep(0)
        calls = [asyncio.ensure_future(thread.draw(request())) for _ in range(3)]
        await asyncio.sleep(0)
        lost.cancel()
        return await asyncio.gather(*calls)

    one, *others = played(new_engine(), play)
    assert all(one.tokens.tolist() == other.tokens.tolist() for other in others)


def test_a_sample_tells_what_was_cached_of_its_prompt(new_engine: NewEngine) -> None:
    async def play(thread: EngineThread) -> list[int]:
        return [(await thread.draw(request(uid))).metadata[NUM_CACHED] for uid in range(2)]

    first, second = played(new_engine(), play)
    assert first == 0 < second < len(PROMPT)


def test_functions_run_between_the_steps(new_engine: NewEngine) -> None:
    def refuse() -> None:
        raise DataError("prompt", "too long")

    async def play(thread: EngineThread) -> None:
        drawing = asyncio.ensure_future(thread.draw(request()))
        name = await thread.call(lambda: threading.current_thread().name)
        assert name == "engine"
        with pytest.raises(DataError, match="too long"):
            await thread.call(refuse)
        assert len((await drawing).tokens) == 8
        await thread.close()
        with pytest.raises(SpmdError, match="draws nothing more"):
            await thread.call(refuse)

    played(new_engine(), play)


def test_scores_have_the_bits_of_what_is_drawn(new_engine: NewEngine) -> None:
    """Of a text in which a token was changed, they are others."""
    engine = new_engine()
    (drawn,) = finish(engine, [request(max_tokens=40)]).values()
    whole = np.concatenate([PROMPT, drawn.tokens])
    found = score(engine, whole, len(PROMPT), 3, 1.0)
    assert found.logprobs.tobytes() == drawn.logprobs.tobytes()
    assert found.top_ids.shape == found.top_logprobs.shape == (40, 3)
    assert (np.diff(found.top_logprobs) <= 0).all()
    assert (found.top_logprobs[:, 0] >= found.logprobs).all()
    whole[0] += 1
    assert score(engine, whole, len(PROMPT), 0, 1.0).logprobs.tobytes() != drawn.logprobs.tobytes()
    with pytest.raises(DataError, match="engine.max_step_tokens = 60 or more"):
        score(new_engine(max_step_tokens=32, max_batch=8), whole, 1, 0, 1.0)


def test_a_request_that_cannot_fit_is_refused_alone(new_engine: NewEngine) -> None:
    async def play(thread: EngineThread) -> Any:
        too_long = request(prompt=np.zeros(4096, np.int32))
        return await asyncio.gather(
            thread.draw(too_long), thread.draw(request(uid=1)), return_exceptions=True
        )

    refused, drawn = played(new_engine(), play)
    assert isinstance(refused, DataError)
    assert len(drawn.tokens) == 8


def test_the_end_of_the_engine_is_told_to_all(new_engine: NewEngine) -> None:
    engine = new_engine()

    def fail() -> None:
        raise SpmdError("NaN")

    engine.step = fail  # type: ignore[assignment,method-assign]

    async def play(thread: EngineThread) -> None:
        results = await asyncio.gather(
            *(thread.draw(request(uid)) for uid in range(2)), return_exceptions=True
        )
        assert [str(one) for one in results] == ["the engine has failed: NaN"] * 2
        with pytest.raises(SpmdError, match="draws nothing more"):
            await thread.draw(request(9))
        with pytest.raises(SpmdError, match="NaN"):
            await thread.failure

    played(engine, play)


def test_a_function_that_ends_the_engine_is_answered(new_engine: NewEngine) -> None:
    async def play(thread: EngineThread) -> None:
        with pytest.raises(SpmdError, match="the engine has failed: division by zero"):
            await asyncio.wait_for(thread.call(lambda: 1 / 0), 60)
        with pytest.raises(ZeroDivisionError):
            await thread.failure

    played(new_engine(), play)
