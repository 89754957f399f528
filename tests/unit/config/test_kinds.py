"""Config classes that are chosen by their `kind`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from spmd_rl.config.describe import describe
from spmd_rl.config.dump import dump_toml
from spmd_rl.config.load import load
from spmd_rl.errors import ConfigError


@dataclass(frozen=True)
class Local:
    pages: int = 4  # pages of memory
    kind: Literal["local"] = "local"  # where it runs
    batch: int = 8  # at once


@dataclass(frozen=True)
class Remote:
    kind: Literal["remote"] = "remote"
    url: str = "http://"  # its address
    batch: int = 16  # at once


@dataclass(frozen=True)
class Untagged:
    size: int = 0


@dataclass(frozen=True)
class Config:
    engine: Local | Remote = field(default_factory=Local)
    judge: Local | Remote | None = None


@dataclass(frozen=True)
class RemoteByDefault:
    engine: Local | Remote = field(default_factory=lambda: Remote(url="u"))


@dataclass(frozen=True)
class NoDefault:
    engine: Local | Remote


@dataclass(frozen=True)
class Unclear:
    engine: Local | Untagged = field(default_factory=Local)


def written(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_kind_of_the_default_is_taken_and_else_the_first() -> None:
    assert load(Config, None, ["engine.pages=5"]).engine == Local(pages=5)
    assert load(NoDefault).engine == Local()
    assert load(RemoteByDefault).engine == Remote(url="u")
    assert load(RemoteByDefault, None, ["engine.batch=3"]).engine == Remote(url="u", batch=3)


def test_the_kind_chooses_the_class(tmp_path: Path) -> None:
    toml = written(tmp_path, '[engine]\nkind = "remote"\nurl = "a"\n')
    assert load(Config, toml).engine == Remote(url="a")
    assert load(Config, toml, ["engine.url=b"]).engine == Remote(url="b")
    assert load(Config, None, ["engine.batch=2", "engine.kind=remote"]).engine == Remote(batch=2)
    assert load(RemoteByDefault, None, ["engine.kind=local"]).engine == Local()


def test_a_class_may_be_left_out() -> None:
    assert load(Config).judge is None
    assert load(Config, None, ["judge.kind=remote"]).judge == Remote()
    assert load(Config, None, ["judge=none"]).judge is None


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["engine.kind=other"], "^engine.kind: expected one of 'local', 'remote', got 'other'$"),
        (
            ["engine.url=x"],
            "^engine.url belongs to engine.kind = 'remote', but the kind is 'local'$",
        ),
        (
            ["engine.kind=remote", "engine.pages=1"],
            "^engine.pages belongs to engine.kind = 'local', but the kind is 'remote'$",
        ),
        (["engine.page=1"], "^unknown key 'engine.page'; the nearest known key is 'engine.pages'"),
        (["engine.batch=x"], "^engine.batch: expected a whole number, got 'x'$"),
        (["engine=remote"], "^engine: expected Local or Remote, got 'remote'$"),
    ],
)
def test_a_mistake_names_the_kind(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load(Config, None, overrides)


def test_each_class_needs_a_kind() -> None:
    with pytest.raises(TypeError, match="Untagged needs a field `kind`"):
        load(Unclear, None, ["engine.size=1"])


def test_every_kinds_keys_are_described() -> None:
    keys = describe(RemoteByDefault)
    assert [(key.name, key.default, key.doc) for key in keys] == [
        ("engine.kind", "'remote'", ""),
        ("engine.pages", "4", "[local] pages of memory"),
        ("engine.batch", "8", "[local] at once"),
        ("engine.url", "'u'", "[remote] its address"),
        ("engine.batch", "16", "[remote] at once"),
    ]
    assert describe(Config)[0].doc == "where it runs"


@pytest.mark.parametrize(
    "cfg", [Config(), Config(Remote("remote", "x"), Local(1)), Config(Local(2))]
)
def test_what_is_dumped_begins_with_the_kind_and_loads_equal(tmp_path: Path, cfg: Config) -> None:
    text = dump_toml(cfg)
    assert f'[engine]\nkind = "{cfg.engine.kind}"\n' in text
    assert load(Config, written(tmp_path, text)) == cfg
