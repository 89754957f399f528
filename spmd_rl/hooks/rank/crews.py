"""Crews of a rank: one for each kind of hooks, over one selector of all their processes."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from spmd_rl.hooks.config import HookConfig
from spmd_rl.hooks.rank.crew import Crew, FromCall, Hands, Limits, Member, Place
from spmd_rl.hooks.rank.process import HookProcess
from spmd_rl.hooks.signatures import RewardForm
from spmd_rl.hooks.wire.messages import Cancel, Kind, Ready, Serve, Start, ToProcess

KINDS: tuple[Kind, ...] = ("plain", "async", "episode")
LATE_STEP = "held its event loop for longer than {:g} s without an await"


class Crews:
    """Starts processes of hooks and sends them calls. `message_of` makes the message that asks for
    calls, by their ids.

    The kind of a reward function is known once a process has imported it. So the first process of
    rewards starts without a kind, and joins the crew for which there are functions.
    """

    def __init__(
        self,
        cfg: HookConfig,
        start: Start,
        message_of: Callable[[Kind, list[int]], ToProcess],
    ) -> None:
        self.forms: list[RewardForm] | None = None if start.rewards else []
        self._cfg, self._start, self._message_of = cfg, start, message_of
        self._selector = selectors.DefaultSelector()
        self._crews = {kind: self._crew(kind) for kind in KINDS}
        if start.rewards:
            self._crews["plain"].start(time.monotonic())
        if start.generate:
            self._crews["episode"].start(time.monotonic())

    def fileno(self) -> int:
        """Return a descriptor that can be read when a process has news."""
        return self._selector.fileno()

    def kind_of(self, function: int) -> Kind:
        """Return the kind of a reward function."""
        return "async" if self.forms and self.forms[function].is_async else "plain"

    def add(self, kind: Kind, call_ids: Iterable[int]) -> None:
        """Queue calls."""
        self._crews[kind].add(call_ids)

    def drop(self, kind: Kind, call_id: int) -> None:
        """Forget a call."""
        self._crews[kind].drop(call_id)

    def send(self, kind: Kind, call_id: int, message: ToProcess) -> None:
        """Send a message to the process that has this call."""
        if place := self._crews[kind].place_of(call_id):
            place.member.send(message)

    def read(self) -> Iterator[tuple[Kind, list[FromCall]]]:
        """Yield what calls of each kind have sent. Raises: as `Crew.read` does."""
        news = {key.data for key, _ in self._selector.select(0)}
        for kind, crew in self._crews.items():
            yield kind, crew.read(time.monotonic(), news)

    def dispatch(self) -> None:
        """Send what waits."""
        for crew in self._crews.values():
            crew.dispatch(time.monotonic())

    def close(self) -> None:
        """End all processes. Blocks: until the system has ended them."""
        for crew in self._crews.values():
            crew.close()
        self._selector.close()

    def _crew(self, kind: Kind) -> Crew:
        hands = Hands(
            partial(self._new_process, kind),
            partial(self._introduce, kind),
            partial(self._send, kind),
            partial(self._cancel, kind),
        )
        cfg = self._cfg
        if kind == "plain":
            return Crew(Limits(cfg.processes, 0, cfg.deadline_s), hands)
        return Crew(Limits(cfg.processes, cfg.concurrency, cfg.deadline_s, LATE_STEP), hands)

    def _new_process(self, kind: Kind) -> Member:
        start = self._start
        rewards, generate = ([], start.generate) if kind == "episode" else (start.rewards, "")
        return HookProcess(Start(rewards, generate, start.config), self._selector)

    def _introduce(self, kind: Kind, place: Place, ready: Ready) -> None:
        """Tell a process what kind of functions it runs from now on."""
        if kind != "episode":
            self.forms = ready.forms
        if kind == "plain" and all(form.is_async for form in ready.forms):
            kind = "async"
            self._crews["plain"].places.remove(place)
            self._crews[kind].places.append(place)
        cfg = self._cfg
        serve = Serve(kind, cfg.concurrency, cfg.deadline_s, cfg.episode_deadline_s)
        place.member.send(serve)

    def _send(self, kind: Kind, place: Place, call_ids: list[int]) -> None:
        place.member.send(self._message_of(kind, call_ids))

    def _cancel(self, kind: Kind, place: Place, call_id: int) -> None:
        if kind != "plain":  # a plain function cannot be stopped
            place.member.send(Cancel(call_id))
