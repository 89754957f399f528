"""A taskset of verifiers: a number is asked for, and a wrong one gets a hint and another try."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["SayNumber"]


class NumberData(vf.TaskData):
    number: str = ""


class NumberTask(vf.Task[NumberData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.number)

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SayNumber(vf.Taskset[NumberTask, vf.TasksetConfig]):
    def load(self) -> Iterator[NumberTask]:
        for number in range(5):
            data = NumberData(prompt=f"say {number}", system_prompt="obey", number=str(number))
            yield NumberTask(data, self.config.task)
