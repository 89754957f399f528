"""Metrics of a process's calls, in the text format of Prometheus."""

from __future__ import annotations

from typing import Literal

CallEnd = Literal["answered", "lost", "failed"]


class CallCounts:
    """Counts of calls and of their tokens since the start, and the calls that are open now."""

    def __init__(self) -> None:
        self.num_open = self._num_prompt = self._num_cached = self._num_drawn = 0
        self._ended: dict[CallEnd, int] = {"answered": 0, "lost": 0, "failed": 0}

    def add(self, end: CallEnd, num_prompt: int, num_cached: int, num_drawn: int) -> None:
        """Count a call that has ended."""
        self._ended[end] += 1
        self._num_prompt += num_prompt
        self._num_cached += num_cached
        self._num_drawn += num_drawn

    def text(self) -> str:
        """Return all of them as a page of Prometheus."""
        ended = {f'{{end="{end}"}}': number for end, number in self._ended.items()}
        lines = [
            *_lines("requests_open", "gauge", "Calls that are open now.", {"": self.num_open}),
            *_lines("requests_total", "counter", "Calls that have ended.", ended),
        ]
        for name, number, about in (
            ("prompt_tokens_total", self._num_prompt, "Tokens of prompts."),
            ("cached_prompt_tokens_total", self._num_cached, "Those that were not computed again."),
            ("generation_tokens_total", self._num_drawn, "Tokens that were drawn."),
        ):
            lines += _lines(name, "counter", about, {"": number})
        return "\n".join(lines) + "\n"


def _lines(name: str, kind: str, about: str, values: dict[str, int]) -> list[str]:
    whole = f"spmd_rl_{name}"
    head = [f"# HELP {whole} {about}", f"# TYPE {whole} {kind}"]
    return [*head, *(f"{whole}{label} {number}" for label, number in values.items())]
