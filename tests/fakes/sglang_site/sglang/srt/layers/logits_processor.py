"""Logits of the stand-in, of each sequence's last row only, as SGLang's."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class LogitsMetadata:
    @staticmethod
    def from_forward_batch(forward_batch: Any) -> LogitsMetadata:
        return LogitsMetadata()


class LogitsProcessor(nn.Module):
    def forward(self, input_ids: Tensor, hidden: Tensor, head: Any, batch: Any) -> Tensor:
        return self._get_logits(hidden[-1:], head, LogitsMetadata())

    def _get_logits(self, hidden: Tensor, head: Any, metadata: LogitsMetadata) -> Tensor:
        assert isinstance(metadata, LogitsMetadata)
        return hidden @ head.weight.T
