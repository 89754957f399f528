"""Activations of a pass, against sizes worked out by hand for the shape of Qwen3-0.6B."""

from __future__ import annotations

from spmd_rl.model.layers.block import BlockSpec
from spmd_rl.model.layers.gqa import Gqa
from spmd_rl.model.layers.mlp import Mlp
from spmd_rl.train.cost.activation_memory import (
    NO_HEAD,
    Activations,
    HeadShape,
    activations,
    forward_bytes,
)

TOKENS, LAYERS, VOCAB = 16384, 28, 151936
HIDDEN = 1024
BLOCK = BlockSpec(HIDDEN, Gqa(HIDDEN, 16, 8, 128, rms_eps=1e-6), Mlp(HIDDEN, 3072))
LAYER = BLOCK.cost()
HEAD = HeadShape(VOCAB, 1024, rows=2048, scored=TOKENS, keeps_slopes=True)


def pass_of(recompute: str, head: HeadShape = HEAD, **more: int) -> Activations:
    sizes = {"num_tokens": TOKENS, "element_bytes": 2} | more
    return activations([LAYER] * LAYERS, HIDDEN, head, recompute=recompute, **sizes)


def test_what_a_layer_keeps_of_a_token() -> None:
    sums, norms = 2 * 1024, 2 * 1024
    projected, rotated = 2048 + 1024, 2048 + 1024
    values, attended = 1024, 2048
    gate_and_up, product = 2 * 3072, 3072
    everything = sums + norms + projected + rotated + values + attended + gate_and_up + product
    assert LAYER.kept("none") == everything == 22528
    assert LAYER.kept("cheap") == everything - norms - rotated - product
    assert LAYER.kept("all") == 2 * 1024


def test_the_head_keeps_slopes_and_two_chunks_of_logits() -> None:
    slopes, chunk = TOKENS * VOCAB * 2, 2048 * VOCAB * 4
    assert HEAD.bytes_in_forward(2) == slopes + 2 * chunk
    assert HEAD.bytes_in_backward(2) == slopes + VOCAB * 1024 * 2
    few = HeadShape(VOCAB, 1024, rows=2048, scored=100, keeps_slopes=True)
    assert few.bytes_in_forward(2) == 100 * VOCAB * (2 + 4), "one chunk, and no larger than it is"


def test_a_pass_without_recomputation() -> None:
    found = pass_of("none")
    after = TOKENS * 2 * 3 * 1024
    assert found.kept == LAYERS * TOKENS * 2 * 22528
    assert found.head == after + HEAD.bytes_in_forward(2)
    gradients = TOKENS * 2 * (3 * 3072 + 2 * 1024)
    assert found.backward == gradients + VOCAB * 1024 * 2, "the gradient of the head's weight waits"
    assert found.peak == found.kept + found.head


def test_one_layer_at_a_time_is_computed_again() -> None:
    found = pass_of("all", NO_HEAD)
    assert found.kept == LAYERS * TOKENS * 2 * 2048
    gradients = 3 * 3072 + 2 * 1024
    assert found.backward == TOKENS * 2 * (22528 - 2048 + gradients)
    assert found.head == TOKENS * 2 * 3 * 1024


def test_a_forward_pass_alone_has_a_layer_or_the_head() -> None:
    found = forward_bytes([LAYER], HIDDEN, NO_HEAD, num_tokens=TOKENS, element_bytes=2)
    assert found == TOKENS * 2 * 22528
    head = HeadShape(VOCAB, 1024, rows=2048, scored=TOKENS, keeps_slopes=False)
    found = forward_bytes([LAYER], HIDDEN, head, num_tokens=TOKENS, element_bytes=2)
    assert found == TOKENS * 2 * 2048 + 2 * 2048 * VOCAB * 4
