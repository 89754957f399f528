"""Settings of the graders that run programs or ask servers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from spmd_rl.config.load import from_data
from spmd_rl.config.rules import at_least, require
from spmd_rl.errors import ConfigError

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class CodeConfig:
    """How `code` runs the programs of responses (docs/rewards.md)."""

    language: str = "python"  # which fenced code blocks are programs: the word after their fence
    # what runs a program, whose path is added as the last word; none: the Python of this run
    command: tuple[str, ...] = ()
    read_only: tuple[str, ...] = ()  # more folders of this host that programs may read
    cpu_s: int = 6  # processor seconds of each process of a program
    test_s: float = 12.0  # seconds of one test
    deadline_s: float = 25.0  # of all tests of a sample; tests that are not reached have failed
    memory_mb: int = 1024  # address space of each process, and all files of the program in /tmp
    processes: int = 16  # processes and threads of a program at once
    file_mb: int = 16  # of one file that a program writes
    open_files: int = 64  # of each process
    output_kb: int = 1024  # of one test; a program that prints more is ended

    def __post_init__(self) -> None:
        least = dict.fromkeys(("cpu_s", "processes", "file_mb", "output_kb"), 1)
        at_least(self, least | {"memory_mb": 16, "open_files": 8})
        _positive(self, "test_s", "deadline_s")
        require(bool(self.language.strip()), "language", self.language, "a word such as python")


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long a server is asked for one sample."""

    retries: int = 4  # after the first request, where it may help
    deadline_s: float = 25.0  # of all requests for a sample, to a server that is there
    away_s: float = 300.0  # for which the server may be away, as in a restart

    def __post_init__(self) -> None:
        at_least(self, {"retries": 0, "away_s": 0})
        _positive(self, "deadline_s")


@dataclass(frozen=True, kw_only=True)
class RemoteConfig(Patience):
    """The server that `remote` asks for a reward (docs/rewards.md)."""

    url: str = ""  # each sample is posted there as JSON
    # headers by name, each with the environment variable that holds its value
    headers_from: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_url("url", self.url)
        _check_variables("headers_from", self.headers_from)


@dataclass(frozen=True)
class Criterion:
    """One entry of a judge's checklist, which a response passes or not."""

    name: str  # under which it is a part of the reward
    text: str  # what must hold
    weight: float = 1.0  # its share of the reward, beside those of the others

    def __post_init__(self) -> None:
        require(bool(self.name.strip()), "name", self.name, "a word or two")
        require(bool(self.text.strip()), "text", self.text, "a sentence that can be true or false")
        _positive(self, "weight")


@dataclass(frozen=True, kw_only=True)
class JudgeConfig(Patience):
    """The language model that `judge` asks, and what for (docs/rewards.md)."""

    base_url: str = ""  # of an OpenAI-compatible server, such as http://127.0.0.1:8000/v1
    model: str = ""  # the name of the model there
    key_from: str = ""  # environment variable that holds the server's key; "": it needs none
    rubric: str = ""  # what a good response is like, for all criteria
    # what is passed or not, each with its weight; without one: whether the rubric is met
    checklist: tuple[Criterion, ...] = ()
    temperature: float = 0.0  # of the judge's answer
    max_tokens: int = 2048  # of the judge's answer
    cache_folder: str = ""  # where verdicts are kept for later runs; "": in memory alone
    cache_entries: int = 100_000  # verdicts in the memory of one process, at most

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_url("base_url", self.base_url)
        if self.key_from:
            _check_variables("key_from", {"key_from": self.key_from})
        at_least(self, {"temperature": 0, "max_tokens": 1, "cache_entries": 1})
        names = [criterion.name for criterion in self.checklist]
        require(len(names) == len(set(names)), "checklist", names, "names that differ")


@dataclass(frozen=True)
class GraderConfig:
    """Settings of graders that run programs or ask servers."""

    code: CodeConfig = field(default_factory=CodeConfig)
    remote: RemoteConfig = field(default_factory=RemoteConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)


def graders_of(config: Mapping[str, Any]) -> GraderConfig:
    """Return the graders' settings in a recipe's config as plain data; without any, the defaults.

    Raises: ConfigError for a setting that cannot be used.
    """
    return from_data(GraderConfig, config.get("graders", {}))


def _positive(cfg: Any, *names: str) -> None:
    for name in names:
        value = getattr(cfg, name)
        require(0 < value < math.inf, name, value, "more than 0, and finite")


def _check_url(name: str, url: str) -> None:
    if not url:
        return
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname)
        has_secret = parts.username is not None or parts.password is not None
    except ValueError:
        is_good = has_secret = False
    require(is_good, name, url, "http://HOST:PORT/PATH or https://HOST/PATH")
    if has_secret:
        raise ConfigError(f"{name}: a password does not belong in a config: use a header instead")


def _check_variables(name: str, variables: Mapping[str, str]) -> None:
    for variable in variables.values():
        expected = "names of environment variables, such as MY_TOKEN"
        require(bool(_VARIABLE.fullmatch(variable)), name, "a value", expected)
