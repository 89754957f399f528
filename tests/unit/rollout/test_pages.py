"""The page pool: no page leaks, none is allocated twice, the least recently used goes first."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from spmd_rl.rollout.native.pages import PagePool, extend_keys, root_key

NUM_PAGES = 6


class Pool(RuleBasedStateMachine):
    """Compares the pool with a model that keeps the content of each holder's pages."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        self.holders: list[list[int]] = []
        self.content: dict[int, bytes] = {}

    def held(self) -> set[int]:
        return {page for pages in self.holders for page in pages}

    @rule(content=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def admit(self, content: list[int]) -> None:
        """Share the published prefix of `content`, one page each, and fill the rest if it fits."""
        keys: list[bytes] = []
        extend_keys(keys, root_key(0), np.array(content, dtype=np.int32), page_size=1)
        pages = self.pool.find_prefix(keys)
        assert [self.content[page] for page in pages] == keys[: len(pages)]
        self.pool.retain(pages)
        if self.pool.num_available < len(keys) - len(pages):
            self.pool.release(pages)
            return
        for key in keys[len(pages) :]:
            page = self.pool.allocate()
            assert page not in {*self.held(), *pages}
            self.content[page] = key
            self.pool.publish(page, key)
            pages.append(page)
        self.holders.append(pages)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.pool.release(self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))))

    @rule()
    def flush(self) -> None:
        self.pool.forget_prefixes()
        assert not any(self.pool.find_prefix([key]) for key in self.content.values())

    @invariant()
    def nothing_is_lost(self) -> None:
        assert self.pool.num_available == NUM_PAGES - len(self.held())


Pool.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestPool = Pool.TestCase


def one_page_keys(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def fill(pool: PagePool, *keys: bytes) -> list[int]:
    pages = [pool.allocate() for _ in keys]
    for page, key in zip(pages, keys, strict=True):
        pool.publish(page, key)
    return pages


def test_least_recently_released_prefix_is_evicted_first_and_its_tail_before_its_head():
    pool = PagePool(4)
    a1, a2, b1, b2 = one_page_keys("a1", "a2", "b1", "b2")
    a, b = fill(pool, a1, a2), fill(pool, b1, b2)
    pool.release(a)
    pool.release(b)
    assert [pool.allocate(), pool.allocate()] == [a[1], a[0]]
    assert pool.find_prefix([a1]) == []
    assert pool.find_prefix([b1, b2]) == b
    assert pool.allocate() == b[1]
    assert pool.find_prefix([b1, b2]) == [b[0]]
    assert pool.num_evictions == 3


def test_holding_an_idle_page_saves_it_from_eviction():
    pool = PagePool(2)
    (a,) = one_page_keys("a")
    pages = fill(pool, a)
    pool.release(pages)
    pool.retain(pages)
    assert pool.num_available == 1
    assert pool.allocate() != pages[0]
    assert pool.find_prefix([a]) == pages


def test_an_equal_page_stays_private():
    pool = PagePool(3)
    (a,) = one_page_keys("a")
    first, second = fill(pool, a), fill(pool, a)
    pool.release(second)
    assert pool.find_prefix([a]) == first
    assert pool.num_available == 2


def test_flush_forgets_prefixes_but_not_holders():
    pool = PagePool(3)
    a, b = one_page_keys("a", "b")
    held, idle = fill(pool, a), fill(pool, b)
    pool.release(idle)
    pool.forget_prefixes()
    assert pool.find_prefix([a]) == pool.find_prefix([b]) == []
    assert pool.num_available == 2
    pool.release(held)
    assert pool.num_available == 3


def test_keys_name_the_version_and_every_token_before():
    def keys(version: int, *tokens: int) -> list[bytes]:
        made: list[bytes] = []
        extend_keys(made, root_key(version), np.array(tokens, dtype=np.int32), page_size=2)
        return made

    assert keys(0, 1, 2, 3, 4, 5) == keys(0, 1, 2, 3, 4)
    assert len(keys(0, 1, 2, 3, 4, 5)) == 2
    assert keys(0, 1, 2, 3, 4)[0] == keys(0, 1, 2, 9, 9)[0]
    assert keys(0, 9, 2, 3, 4)[1] != keys(0, 1, 2, 3, 4)[1]
    assert not set(keys(0, 1, 2, 3, 4)) & set(keys(1, 1, 2, 3, 4))
