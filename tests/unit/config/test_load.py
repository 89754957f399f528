"""Config: what is accepted, what comes back, and how each mistake is told."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.config.describe import describe
from spmd_rl.config.dump import dump_toml
from spmd_rl.config.load import load
from spmd_rl.errors import ConfigError


@dataclass(frozen=True)
class Optimizer:
    lr: float = 1e-3  # peak rate
    decay: float = 0.0  # weight decay of matrices
    betas: tuple[float, float] = (0.9, 0.95)
    kind: Literal["adamw", "sgd"] = "adamw"

    def __post_init__(self) -> None:
        if self.lr < 0:
            raise ValueError("lr is negative")


@dataclass(frozen=True)
class Run:
    name: str = "demo"
    # total number of steps
    steps: int = 3
    shuffle: bool = True
    limit: int | None = None
    stop: list[str] = field(default_factory=list)
    sizes: tuple[int, ...] = ()
    extra: dict[str, float] = field(default_factory=dict)
    anything: Any = None
    optimizer: Optimizer = field(default_factory=lambda: Optimizer(lr=0.5))


@dataclass(frozen=True)
class Needy:
    path: str
    count: int
    optimizer: Optimizer = field(default_factory=Optimizer)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults() -> None:
    assert load(Run) == Run()


def test_a_file_then_overrides(tmp_path: Path) -> None:
    toml = written(tmp_path, 'name = "a"\nsteps = 7\n[optimizer]\nkind = "sgd"\n')
    cfg = load(
        Run, toml, ["steps=9", "--optimizer.betas=[0.5, 1]", "extra.beta=2", "stop=['x', 'y']"]
    )
    assert (cfg.name, cfg.steps, cfg.stop, cfg.extra) == ("a", 9, ["x", "y"], {"beta": 2.0})
    assert cfg.optimizer == Optimizer(lr=0.5, betas=(0.5, 1.0), kind="sgd")


def test_a_partial_table_keeps_the_parents_default() -> None:
    assert load(Run, overrides={"optimizer.kind": "sgd"}).optimizer.lr == 0.5


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("name=123", "name", "123"),
        ("name=true", "name", "true"),
        ("steps=12", "steps", 12),
        ("shuffle=False", "shuffle", False),
        ("limit=none", "limit", None),
        ("limit=4", "limit", 4),
        ("sizes=[1, 2, 3]", "sizes", (1, 2, 3)),
        ("name=a=b", "name", "a=b"),
        ("anything=[1]", "anything", [1]),
        ("extra={a = 1.5}", "extra", {"a": 1.5}),
        ('extra={"a": 1.5, "b": 2}', "extra", {"a": 1.5, "b": 2.0}),
        (
            'anything={"tools": [{"a": 1}, {"a": true}]}',
            "anything",
            {"tools": [{"a": 1}, {"a": True}]},
        ),
        ('anything=[{"a": "x\\u00e9"}]', "anything", [{"a": "xé"}]),
        ('anything={"a": null}', "anything", '{"a": null}'),
        ("steps=9223372036854775807", "steps", (1 << 63) - 1),
        (f"optimizer.lr={1 << 70}", "optimizer", Optimizer(lr=float(1 << 70))),
    ],
)
def test_an_overrides_text_is_read_by_type(override: str, key: str, value: object) -> None:
    assert getattr(load(Run, None, [override]), key) == value


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("stpes=3", "unknown key 'stpes'; the nearest known key is 'steps'"),
        ("lr=3", "unknown key 'lr'; the nearest known key is 'optimizer.lr'"),
        ("optimiser.kind=sgd", "unknown key 'optimiser'; the nearest known key is 'optimizer'"),
        ("optimizer.step=3", "unknown key 'optimizer.step'; the nearest known key is 'steps'"),
        ("optimizer.learning_rate=3", "unknown key 'optimizer.learning_rate'$"),
        (
            "optimizer.peak_rate=3",
            "unknown key 'optimizer.peak_rate'; the nearest known key is 'optimizer.lr'",
        ),
        (
            "weight_decay=3",
            "unknown key 'weight_decay'; the nearest known key is 'optimizer.decay'",
        ),
        ("peak=3", "unknown key 'peak'$"),
        ("stop=abc", r"""stop: expected a list .each a string. such as '\["abc"\]', got 'abc'"""),
        ("stop=[abc]", r"""such as '\["abc"\]', got '\[abc\]'"""),
        ("optimizer.betas=0.9", r"a list of exactly 2 values such as \[0.9, 0.95\], got 0.9"),
        ("sizes=3", r"sizes: expected a list .each a whole number., got 3"),
        ("batch_sizes=3", "unknown key 'batch_sizes'$"),
        ("steps=many", "steps: expected a whole number, got 'many'"),
        ("steps=1.5", "steps: expected a whole number, got 1.5"),
        ("steps=true", "steps: expected a whole number, got True"),
        ("shuffle=1", "shuffle: expected true or false, got '1'"),
        ("optimizer.lr=fast", "optimizer.lr: expected a number, got 'fast'"),
        ("optimizer.kind=lion", "optimizer.kind: expected one of 'adamw', 'sgd', got 'lion'"),
        ("optimizer.betas=[1]", r"optimizer.betas: expected a list of exactly 2 values, got \[1\]"),
        ("optimizer.lr=-1", "optimizer: lr is negative"),
        ("optimizer=3", "optimizer: expected a table with keys such as optimizer.lr"),
        ("stop=[1]", r"stop\[0\]: expected a string, got 1"),
        ("limit=x", "limit: expected a whole number or none, got 'x'"),
        ("extra.a=x", "extra.a: expected a number, got 'x'"),
        (
            "extra=x",
            r"""extra: expected a table .each value a number. such as '\{"name": 0.5\}', got 'x'""",
        ),
        ('extra={"a": null}', r"""such as '\{"name": 0.5\}', got '\{"a": null\}'"""),
        ('extra={"a": "b"}', "extra.a: expected a number, got 'b'"),
        (
            f"steps={1 << 63}",
            "steps: expected a whole number that 64 bits hold, got one of 64 bits",
        ),
        (
            f"sizes=[1, {1 << 70}]",
            r"sizes\[1\]: expected a whole number that 64 bits hold, got one of 71 bits",
        ),
        ("steps=" + "9" * 5000, "steps: expected a whole number, got '999"),
        ("steps", "override 'steps' is not of the form key=value"),
        ("=3", "override '=3' is not of the form key=value"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load(Run, None, [override])


def test_a_value_cannot_have_keys() -> None:
    with pytest.raises(ConfigError, match=r"steps\.x: 'steps' holds a value"):
        load(Run, None, ["steps=3", "steps.x=4"])


def test_a_required_key() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^path is required: say --path VALUE \(a string\); count is required: say",
    ):
        load(Needy)
    with pytest.raises(
        ConfigError, match=r"^count is required: say --count VALUE \(a whole number\)$"
    ):
        load(Needy, overrides={"path": "x"})
    assert load(Needy, overrides={"path": "x", "count": "3"}) == Needy("x", 3)


def test_a_missing_or_broken_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read config file"):
        load(Run, tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="not valid TOML.*line 2"):
        load(Run, written(tmp_path, "steps = 1\nname = ?\n"))


def test_a_number_in_a_file_that_64_bits_do_not_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"optimizer.lr: expected a number that 64 bits hold, got one of 1329 bits",
    ):
        load(Run, written(tmp_path, f"[optimizer]\nlr = {10**400}"))
    with pytest.raises(ConfigError, match="run.toml is not valid TOML: "):
        load(Run, written(tmp_path, "steps = " + "9" * 5000))


def test_a_file_is_strict_about_types(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name: expected a string, got 3"):
        load(Run, written(tmp_path, "name = 3"))
    with pytest.raises(ConfigError, match="steps: expected a whole number, got '3'"):
        load(Run, written(tmp_path, "steps = '3'"))


def test_describe_lists_nested_keys_with_comments() -> None:
    keys = {key.name: key for key in describe(Run)}
    assert keys["steps"].doc == "total number of steps"
    assert keys["optimizer.lr"].doc == "peak rate"
    assert keys["optimizer.lr"].default == "0.5"
    assert {key.name: key.default for key in describe(Needy)}["path"] == "required"


@dataclass(frozen=True)
class Longer(Run):
    steps: int = 4


def test_an_heirs_keys_keep_their_comments() -> None:
    keys = {key.name: key for key in describe(Longer)}
    assert (keys["steps"].doc, keys["steps"].default) == ("total number of steps", "4")


finite = st.floats(allow_nan=False)
text = st.text(st.characters(codec="utf-8"))


@given(
    st.builds(
        Run,
        name=text,
        steps=st.integers(-(2**63), 2**63 - 1),
        shuffle=st.booleans(),
        limit=st.none() | st.integers(0, 9),
        stop=st.lists(text),
        sizes=st.lists(st.integers(0, 9)).map(tuple),
        extra=st.dictionaries(text, finite),
        optimizer=st.builds(Optimizer, lr=st.floats(0, math.inf), betas=st.tuples(finite, finite)),
    )
)
def test_what_is_dumped_loads_equal(tmp_path_factory: pytest.TempPathFactory, cfg: Run) -> None:
    assert load(Run, written(tmp_path_factory.mktemp("toml"), dump_toml(cfg))) == cfg
