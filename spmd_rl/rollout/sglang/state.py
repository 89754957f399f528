"""State of an SGLang engine: which requests of its memory and weights may follow which.

SGLang's scheduler checks little of this: it exits when it is put to sleep while it works, or woken
twice. So the rank refuses first, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Sequence

from spmd_rl.errors import ResidencyError, SpmdError

NO_WEIGHTS = (
    "the engine has no weights of a known version: push some to it, also after it has slept with "
    "engine.sleep_weights"
)
KV_CACHE, WEIGHTS = "kv_cache", "weights"  # SGLang's names for what can sleep
NAMES = {"weights": WEIGHTS, "kv": KV_CACHE}  # by the tags of a Rollout


class EngineState:
    """What sleeps, the version of the weights, and whether a push changes them."""

    def __init__(self, sleep_weights: bool) -> None:
        self._names = (KV_CACHE, WEIGHTS) if sleep_weights else (KV_CACHE,)
        self._asleep: set[str] = set()
        self.version: int | None = None
        self.is_pushing = False

    @property
    def is_asleep(self) -> bool:
        """Whether anything sleeps, so that nothing can be generated."""
        return bool(self._asleep)

    @property
    def can_generate(self) -> bool:
        return not (self.is_asleep or self.is_pushing or self.version is None)

    def require_generate(self) -> int:
        """Return the version that generates now.

        Raises: ResidencyError while asleep; SpmdError without weights of a known version.
        """
        if self.is_asleep:
            raise ResidencyError("the engine is asleep: wake it before it generates")
        if self.is_pushing or self.version is None:
            raise SpmdError(NO_WEIGHTS)
        return self.version

    def check_awake(self) -> None:
        """Raises: ResidencyError while the weights are asleep, so that they cannot be changed."""
        if WEIGHTS in self._asleep:
            raise ResidencyError("the engine is asleep: wake it before weights are pushed to it")

    def begin_push(self) -> None:
        self.check_awake()
        self.is_pushing, self.version = True, None

    def end_push(self, version: int) -> None:
        """Raises: SpmdError when no push has begun."""
        if not self.is_pushing:
            raise SpmdError(f"weights of version {version} were committed and never pushed")
        self.is_pushing, self.version = False, version

    def begin_sleep(self, num_running: int, tags: Sequence[str] = ()) -> list[str]:
        """Return SGLang's names of what is to be released: of `tags`, or of all that is awake.

        Raises: ResidencyError while requests run, or while a push is not committed.
        """
        if num_running:
            raise ResidencyError(
                f"the engine cannot sleep while {num_running} requests run: abort them first"
            )
        if self.is_pushing:
            raise ResidencyError("the engine cannot sleep during a push: commit it first")
        names = [name for name in self._named(tags) if name not in self._asleep]
        self._asleep.update(names)
        if WEIGHTS in names:
            self.version = None
        return names

    def begin_wake(self, tags: Sequence[str] = ()) -> list[str]:
        """Return SGLang's names of what is to be resumed, of `tags` or of all that sleeps."""
        names = [name for name in self._named(tags) if name in self._asleep]
        self._asleep.difference_update(names)
        return names

    def _named(self, tags: Sequence[str]) -> list[str]:
        wanted = {NAMES[tag] for tag in tags} or set(self._names)
        return [name for name in self._names if name in wanted]
