"""Tables of the addresses of experts' weights."""

from __future__ import annotations

import pytest
import torch

from spmd_rl.kernels.moe.expert_addresses import KeptAddresses, addresses


def test_each_weight_is_found_where_it_lies() -> None:
    parts = [[torch.zeros(3, 8) for _ in range(4)] for _ in range(2)]
    found = addresses(parts)
    assert found.table.tolist() == [[one.data_ptr() for one in part] for part in parts]
    assert (found.num_parts, found.num_experts, found.shape) == (2, 4, (3, 8))
    assert found.is_aligned


@pytest.mark.parametrize("shape", [(3, 6), (3, 7)])
def test_rows_off_16_bytes_are_seen(shape: tuple[int, int]) -> None:
    assert not addresses([[torch.zeros(shape)]]).is_aligned


def test_a_weight_off_16_bytes_is_seen() -> None:
    assert not addresses([[torch.zeros(2, 8), torch.zeros(20)[1:17].view(2, 8)]]).is_aligned


def test_other_shapes_and_views_are_refused() -> None:
    with pytest.raises(ValueError, match=r"experts' weights of \[3, 4\] and \[4, 3\]"):
        addresses([[torch.zeros(4, 3), torch.zeros(3, 4)]])
    with pytest.raises(ValueError, match="not contiguous"):
        addresses([[torch.zeros(4, 3).t()]])


def test_a_table_is_made_again_when_a_weight_has_moved() -> None:
    kept, weights = KeptAddresses(), [torch.zeros(2, 8) for _ in range(3)]
    first = kept.of("up", [weights])
    assert kept.of("up", [weights]) is first
    assert kept.of("down", [weights]) is not first
    weights[1] = torch.zeros(2, 8)
    assert kept.of("up", [weights]).table.tolist() == [[one.data_ptr() for one in weights]]
