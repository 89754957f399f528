"""MKL gives equal inputs equal bits, as the package sets it up: its sums on an Intel processor for
any number of rows, and its functions at their first call.

MKL asks one of its functions whether the processor is Intel's. Elsewhere a library in front of MKL
answers yes, so that its kernels for Intel processors run here.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode

import spmd_rl
from spmd_rl import mkl
from spmd_rl.mkl import FUNCTIONS, MKL_ON_INTEL, pin_sums, warm_up_functions
from spmd_rl.model.network import CausalLM
from spmd_rl.model.read import read_spec

SAYS_INTEL = "int mkl_serv_intel_cpu_true(void) { return 1; }"
EXAMPLE = Path(spmd_rl.__file__).parents[1] / "examples/arithmetic"
UNEQUAL = """
import torch
from spmd_rl.kernels.runtime.padding import ROW_TILE

generator = torch.Generator().manual_seed(0)
x, y = torch.randn(4, 160, 64, generator=generator), torch.randn(4, 64, 96, generator=generator)
whole = torch.bmm(x, y)
print(sum(not torch.equal(torch.bmm(x[:, :rows], y), whole[:, :rows]) for rows in range(8, 160, 8)))
"""


@pytest.fixture(scope="module")
def intel(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment in which a process sees an Intel processor."""
    compiler = shutil.which("cc")
    if (
        compiler is None
        or not torch.backends.mkl.is_available()
        or "avx2" not in Path("/proc/cpuinfo").read_text()
    ):
        pytest.skip("needs a C compiler, MKL and AVX2")
    library = tmp_path_factory.mktemp("intel") / "intel.so"
    words = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    subprocess.run(words, input=SAYS_INTEL.encode(), check=True)
    return {"LD_PRELOAD": str(library)}


def unequal(environment: dict[str, str]) -> int:
    """Count the numbers of rows that give a row other bits. Waits for a process."""
    inherited = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    done = subprocess.run(
        [sys.executable, "-c", UNEQUAL],
        env=inherited | environment,
        check=True,
        stdout=subprocess.PIPE,
    )
    return int(done.stdout)


def test_products_do_not_depend_on_the_number_of_rows(intel: dict[str, str]) -> None:
    assert unequal(intel | {"MKL_CBWR": MKL_ON_INTEL}) == 0


@pytest.mark.parametrize(
    ("vendor", "before", "after"),
    [
        ("GenuineIntel", {}, {"MKL_CBWR": MKL_ON_INTEL}),
        ("GenuineIntel", {"MKL_CBWR": "AUTO"}, {"MKL_CBWR": "AUTO"}),
        ("AuthenticAMD", {}, {}),
        (None, {}, {}),
    ],
)
def test_mkl_is_told_on_intel_processors_alone(
    tmp_path: Path, vendor: str | None, before: dict, after: dict
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    if vendor is not None:
        cpuinfo.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: 6\n")
    pin_sums(before, cpuinfo)
    assert before == after


def test_importing_the_package_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []
    monkeypatch.setattr(mkl, "pin_sums", lambda: told.append(True))
    importlib.reload(spmd_rl)
    assert told


class FirstCalls(TorchFunctionMode):
    """Notes how many elements the first call of each function and dtype had."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[tuple[str, torch.dtype], int] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.__name__ in FUNCTIONS:
            self.sizes.setdefault((func.__name__, args[0].dtype), args[0].numel())
        return func(*args, **(kwargs or {}))


def test_each_function_is_first_called_on_one_element() -> None:
    """Then torch calls it on one thread."""
    warm_up_functions.cache_clear()
    with FirstCalls() as first:
        CausalLM(read_spec(EXAMPLE / "model")).rope_tables(torch.device("cpu"))
    floats = (torch.float32, torch.float64)
    assert first.sizes == {(name, dtype): 1 for name in FUNCTIONS for dtype in floats}
