"""Prefill of the stand-in."""

from __future__ import annotations

from typing import Any

import torch


@torch.no_grad()
def extend(requests: list[Any], runner: Any) -> None:
    (request,) = requests
    runner.model(torch.tensor(list(request.full_untruncated_fill_ids)))
