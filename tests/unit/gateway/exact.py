"""What a session makes of a conversation, compared with what the engine drew."""

from __future__ import annotations

from collections import Counter

import numpy as np

from spmd_rl.gateway.session import Session
from tests.unit.gateway.fakes import FakeEngine, prompt_of


def check_exact(session: Session, engine: FakeEngine) -> None:
    """Every turn of the engine is learned once, in a sample that begins as its prompt did."""
    samples = session.samples()
    assert len({one.index for one in samples}) == len(samples)
    found: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = Counter()
    for sample in samples:
        context = sample.context if len(sample.context) else prompt_of().tokens
        ids = [*context.tolist(), *sample.tokens.tolist()]
        drawn = np.concatenate([np.zeros(len(context), np.bool_), sample.mask, [False]])
        starts = np.flatnonzero(drawn & ~np.concatenate([[False], drawn[:-1]])).tolist()
        for start in starts:
            stop = start + int(np.flatnonzero(~drawn[start:])[0])
            found[tuple(ids[:start]), tuple(ids[start:stop])] += 1
        assert (sample.logprobs[sample.mask] < 0).all()
        assert (sample.versions[sample.mask] == engine.version).all()
        assert not sample.logprobs[~sample.mask].any()
    expected = Counter((tuple(before), tuple(turn)) for before, turn in engine.drawn)
    assert found == expected
