"""The launcher's own way to name the methods of torchrun's events."""

from __future__ import annotations

import pytest
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from spmd_rl.cli import launcher


def test_methods_have_the_names_that_torchrun_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def recorded() -> str:
        return dynamic_rendezvous.get_method_name()

    def set_state() -> str:
        return recorded()

    before = set_state()
    monkeypatch.setattr(dynamic_rendezvous, "get_method_name", dynamic_rendezvous.get_method_name)
    launcher._leave_frames_unread()
    assert (before, set_state()) == ("set_state", "set_state")
