"""benchmarks/ipc.py on the CPU: its child holds the owner's bits after every push."""

from __future__ import annotations

from argparse import Namespace

from benchmarks import ipc


def test_the_child_holds_the_owners_bits() -> None:
    options = Namespace(device="cpu", model="0.6B", gib=0.01, portions=[1, 4])
    rows = {row.what: row for row in ipc.measure(options)}
    assert rows["memfd: the child holds the owner's bits"].value == 2
    assert 0 < rows["bytes of a push in bf16"].value <= 0.0108
