"""The base of a trainer's adapters beside a frozen reference, on gloo ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.torchrun import torchrun
from tests.dist.train_case import write_model_folder

pytestmark = pytest.mark.dist


@pytest.mark.parametrize(
    ("ranks", "dp", "wrap"), [(1, 1, "model"), (2, 1, "model"), (2, 1, "layer"), (2, 2, "layer")]
)
def test_the_base_alone_has_the_bits_of_a_frozen_reference(
    tmp_path: Path, ranks: int, dp: int, wrap: str
) -> None:
    model, out = write_model_folder(tmp_path), tmp_path / "out.json"
    found = torchrun("lora_ranks.py", ranks, out, str(model), str(dp), wrap, str(out))
    for scores in found.values():
        assert scores["base"] == scores["reference"]
        assert scores["before"] == scores["after"] != scores["base"], "adapters matter, and are on"
    assert found["float32"]["base"] != found["bfloat16"]["base"]
