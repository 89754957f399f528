"""Meshes of roles that share some ranks, on four gloo ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.torchrun import torchrun

pytestmark = pytest.mark.dist


def test_only_its_own_ranks_make_a_shards_host_group(tmp_path: Path) -> None:
    """With NCCL, a rank outside of a gloo group would wait for a split that nobody joins.

    Rank 2 has made more groups than rank 3 by then, and both name the new one alike.
    """
    out = tmp_path / "out.json"
    report = torchrun("meshes_ranks.py", 4, out, str(out))
    assert report["heard"] == ["", "", "from 2", "from 2"]
    for rank, asked in enumerate(report["asked"]):
        assert ([2, 3] in asked) == (rank in (2, 3))
        assert all(rank in ranks for ranks in asked)
