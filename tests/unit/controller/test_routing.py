"""Which shard serves a request."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.controller.routing import BLOCK_TOKENS, MAX_BLOCKS, Route, ShardBalancer


def route(key: int, prefix: int = 0, length: int = 8, cost: int = 100) -> Route:
    """A request whose prompt differs from those of another `prefix` from the first token on."""
    return Route(key, np.arange(prefix, prefix + length, dtype=np.int32), cost)


def test_the_shard_with_the_least_to_do_gets_a_request() -> None:
    balancer = ShardBalancer(3)
    costs = [50, 10, 30, 20, 5, 25]
    shards = [
        balancer.acquire(route(key, prefix=100 * key, cost=cost)) for key, cost in enumerate(costs)
    ]
    assert shards == [0, 1, 2, 1, 1, 2]


def test_samples_of_a_prompt_stay_together_while_one_is_open() -> None:
    balancer = ShardBalancer(2)
    first = balancer.acquire(route(7, cost=1000))
    assert balancer.acquire(route(7, cost=1000)) == first
    assert balancer.acquire(route(8, prefix=50)) != first
    for _ in range(2):
        balancer.release(route(7, cost=1000), first)
    assert balancer.acquire(route(7, prefix=99, cost=10)) == first  # its load is gone too


def test_a_cached_prefix_draws_a_request_until_the_load_outweighs_it() -> None:
    balancer = ShardBalancer(2)
    long = 4 * BLOCK_TOKENS
    home = balancer.acquire(route(1, length=long, cost=long))
    other = balancer.acquire(route(2, prefix=5000, length=long, cost=long - 10))
    assert home != other
    assert balancer.acquire(route(3, length=long, cost=long)) == home, "256 tokens saved, 10 more"
    assert balancer.acquire(route(4, length=long, cost=long)) == other, "256 saved, 266 more"


def test_all_load_is_given_back() -> None:
    rng, balancer, held = random.Random(0), ShardBalancer(4), []
    for number in range(500):
        if held and rng.random() < 0.45:
            balancer.release(*held.pop(rng.randrange(len(held))))
        else:
            asked = route(rng.randrange(50), prefix=rng.randrange(9), length=200, cost=number)
            held.append((asked, balancer.acquire(asked)))
    for asked, shard in held:
        balancer.release(asked, shard)
    assert balancer._cost == [0] * 4
    assert balancer._by_key == {}


@given(
    num_shards=st.integers(1, 5),
    asked=st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 2), st.integers(0, 400), st.booleans()),
        max_size=40,
    ),
)
def test_a_request_goes_to_one_shard_that_is_busier_by_no_more_than_its_prefix(
    num_shards: int, asked: list[tuple[int, int, int, bool]]
) -> None:
    """An oracle of its own counts what is open on each shard."""
    balancer = ShardBalancer(num_shards)
    cost, homes, held = [0] * num_shards, {}, []
    for key, prefix, length, ends in asked:
        if ends and held:
            one, shard = held.pop(0)
            balancer.release(one, shard)
            cost[shard] -= one.cost
        open_keys = {one.key for one, _ in held}
        one = route(key, prefix=1000 * prefix, length=length, cost=length + 50)
        shard = balancer.acquire(one)
        assert 0 <= shard < num_shards
        if key in open_keys:
            assert shard == homes[key]
        else:
            assert cost[shard] - min(cost) <= length // BLOCK_TOKENS * BLOCK_TOKENS
        cost[shard] += one.cost
        homes[key] = shard
        held.append((one, shard))


def test_memory_of_prefixes_is_bounded() -> None:
    balancer = ShardBalancer(2)
    blocks = MAX_BLOCKS // 4
    for prefix in range(6):
        balancer.acquire(route(prefix, prefix << 24, length=blocks * BLOCK_TOKENS))
    assert len(balancer._blocks) == MAX_BLOCKS
