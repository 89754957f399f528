"""Request of the stand-in."""

from __future__ import annotations

from typing import Any


class Req:
    def __init__(
        self, rid: str, origin_input_text: str, origin_input_ids: Any, sampling_params: Any
    ) -> None:
        self.origin_input_ids = origin_input_ids

    def set_extend_range(self, start: int, end: int) -> None:
        assert (start, end) == (0, len(self.origin_input_ids))
