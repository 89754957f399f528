"""Digests of shards add up to those of whole tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.errors import ContractError
from spmd_rl.weights.local_tensors import LocalTensor, LocalTensors
from spmd_rl.weights.plan.layout import Box, chunk_box
from spmd_rl.weights.proof import digest as digest_module
from spmd_rl.weights.proof.digest import combine, digest

WHOLE = torch.randn(9, 6, 4, generator=torch.Generator().manual_seed(0))


def _part(box: Box, whole: torch.Tensor = WHOLE) -> LocalTensors:
    local = whole[tuple(slice(o, e) for o, e in zip(box.offset, box.end, strict=True))]
    return LocalTensors({"w": LocalTensor(tuple(whole.shape), box, local.clone())})


def _whole_digest(whole: torch.Tensor = WHOLE) -> dict[str, int]:
    return digest(LocalTensors.whole({"w": whole}))


@given(st.integers(1, 12), st.integers(1, 3))
def test_shards_add_up_to_the_whole(num_parts: int, num_replicas: int) -> None:
    parts = [_part(chunk_box((9, 6, 4), i, num_parts)) for i in range(num_parts)] * num_replicas
    assert (
        combine([(part.layout(i), digest(part)) for i, part in enumerate(parts)]) == _whole_digest()
    )


def test_columns_add_up_too() -> None:
    parts = [
        _part(Box((0, 0, 0), (9, 2, 4))),
        _part(Box((0, 2, 0), (9, 4, 3))),
        _part(Box((0, 2, 3), (9, 4, 1))),
    ]
    assert (
        combine([(part.layout(i), digest(part)) for i, part in enumerate(parts)]) == _whole_digest()
    )


def test_chunking_the_work_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _whole_digest()
    monkeypatch.setattr(digest_module, "CHUNK_ELEMENTS", 30)
    assert _whole_digest() == expected


def test_any_flipped_bit_or_swapped_place_shows() -> None:
    seen = {_whole_digest()["w"]}
    for bit in (0, 22, 31):
        bits = WHOLE.clone().view(torch.int32)
        bits[4, 2, 1] ^= -(2**31) if bit == 31 else 1 << bit
        seen.add(_whole_digest(bits.view(torch.float32))["w"])
    seen.add(_whole_digest(WHOLE.flip(0))["w"])
    seen.add(_whole_digest(WHOLE.reshape(9, 4, 6).transpose(1, 2).contiguous())["w"])
    assert len(seen) == 6


def test_a_source_is_digested_as_its_destination_holds_it() -> None:
    engine = LocalTensors.whole({"w": WHOLE.bfloat16()})
    assert digest(LocalTensors.whole({"w": WHOLE}), {"w": "bfloat16"}) == digest(engine)
    assert digest(LocalTensors.whole({"w": WHOLE})) != digest(engine)


def test_replicas_that_differ_are_refused() -> None:
    parts = [LocalTensors.whole({"w": WHOLE}), LocalTensors.whole({"w": WHOLE + 1})]
    with pytest.raises(ContractError, match="replicas of tensor 'w'"):
        combine([(part.layout(i), digest(part)) for i, part in enumerate(parts)])


def test_a_scalar_has_a_digest() -> None:
    digests = {
        digest(LocalTensors.whole({"w": torch.tensor(value)}))["w"] for value in (0.0, 1.0, -0.0)
    }
    assert len(digests) == 3


def test_small_boxes_together_have_the_digests_of_each_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = [_part(Box((row, 0, 0), (2, 6, 4))) for row in range(0, len(WHOLE) - 1, 2)]
    boxes = [part["w"] for part in parts]
    together = digest_module.box_sums(boxes, ["bfloat16"] * len(boxes))
    monkeypatch.setattr(digest_module, "SMALL_ELEMENTS", 0)
    assert torch.equal(together, digest_module.box_sums(boxes, ["bfloat16"] * len(boxes)))
    assert len(set(together.tolist())) == len(boxes)
