"""Classes of GPU kernels, and the time in which none runs."""

from __future__ import annotations

import pytest

from benchmarks.gpu_time import COPIES, IDLE, OTHER, Event, class_of, shares, union


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "matrix products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "matrix products"),
        ("kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90", "attention"),
        ("void at::native::vectorized_elementwise_kernel<4, ...>", OTHER),
        ("Memcpy HtoD (Pinned -> Device)", COPIES),
        ("Memset (Device)", COPIES),
    ],
)
def test_a_name_tells_the_class(name: str, kind: str) -> None:
    assert class_of(name) == kind


def test_overlapping_kernels_leave_no_more_idle_time() -> None:
    events = [
        Event("gemm", (0.0, 4e5)),
        Event("Memcpy", (2e5, 6e5)),
        Event("elementwise", (8e5, 9e5)),
    ]
    found = shares(events, 1.0)
    assert found == pytest.approx(
        {"attention": 0.0, "matrix products": 0.4, OTHER: 0.1, COPIES: 0.4, IDLE: 0.3}
    )


def test_spans_that_touch_become_one() -> None:
    assert union([(5, 7), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 7)]
