"""Settings that do not go together: each row refuses what it says, and nothing else is refused."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any, Literal

import pytest

from spmd_rl.check.engine import check_engine
from spmd_rl.config.combinations import (
    ABSENT,
    ON,
    Combination,
    above,
    compared,
    other_than,
    refuse,
    value_at,
)
from spmd_rl.config.load import from_data
from spmd_rl.config.run import RunConfig
from spmd_rl.config.schema import table_classes, type_hints
from spmd_rl.data.render.chat import ChatFormat
from spmd_rl.environments.config import AgentConfig
from spmd_rl.errors import ConfigError, SpmdError
from spmd_rl.mesh.split import plan_split
from spmd_rl.model.lora import LoraConfig
from spmd_rl.plan.axes import _sizes, check_axes
from spmd_rl.plan.combinations import lines, sections
from spmd_rl.plan.command import main
from spmd_rl.plan.needs import RunNeeds
from spmd_rl.recipes import grpo
from spmd_rl.rollout.kinds import kind_of
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.rollout.sampler_config import SamplerConfig
from spmd_rl.train.config import Fsdp2Config, TrainerConfig

SECTIONS = {section.title: section for section in sections()}
# values to draw from by type, for settings that name none
VALUES: dict[Any, list[Any]] = {
    bool: [False, True],
    int: [0, 1, 2, 3, 4, 128, 300],
    float: [0.0, 0.5, 1.0, 1.5, 3.0],
    str: ["", "a.py:f", "eval/a/reward"],
    tuple: [(), ("model.*",)],
    dict: [{}, {"a": 1}],
}
OF_A_KEY: dict[str, list[Any]] = {
    "cache_exponents": [(0, 0), (1, 2)],
    "oversample": [1.0, 1.5, 3.0],
    "lora.rank": [0, 4],
    "attention_split": [0, 128],
    "max_batch": [1, 128],
    "best": ["", "eval/a/reward"],
    "learn": ["all", "main"],
}


def test_conditions_and_sentences() -> None:
    row = Combination(
        {"a.b": above(1), "kind": other_than("x"), "c": compared("above", "d", lambda c, d: c > d)},
        "{0} beside {1.key} = {1.value}, not {2}",
    )
    settings = {"a": {"b": 2}, "kind": "y", "c": 3, "d": 2}
    assert row.holds(settings)
    assert row.words(settings) == "a.b = 2 beside kind = y, not c = 3"
    assert row.words_of_any() == "a.b beside kind = X, not c"
    for change in ({"a": {"b": 1}}, {"kind": "x"}, {"c": 2}, {"a": {}}, {"d": ABSENT}):
        assert not row.holds(settings | change)


def test_the_trainers_ranks_have_their_own_name() -> None:
    row = Combination({"split.train.tp": above(1), "split.infer.tp": ON}, "{0}, {1}")
    axes = {"split": {"train": {"tp": 2}, "infer": {"tp": 4}}}
    with pytest.raises(ConfigError, match=r"^split.critic.tp = 2, split.infer.tp = 4$"):
        refuse([row], axes, "critic")


# configs whose rows speak of them alone: their key in a recipe, and where in it the rows' keys are
CONFIGS: list[tuple[str, type, str]] = [
    ("Trainers", TrainerConfig, ""),
    ("Trainers of FSDP2", Fsdp2Config, ""),
    ("Adapters", LoraConfig, ""),
    ("The native engine", NativeEngineConfig, ""),
    ("Samplers", SamplerConfig, ""),
    ("Prompts", ChatFormat, ""),
    ("Runs", RunConfig, ""),
    ("Agents", AgentConfig, "agent."),
]


def choices(config: type, key: str) -> list[Any]:
    """Return values that a setting of a config may have, whatever its other settings are."""
    if key in OF_A_KEY:
        return OF_A_KEY[key]
    name, _, rest = key.partition(".")
    hint = type_hints(config)[name]
    if key == "backend.kind":
        return ["fsdp2", "megatron"]
    if rest:
        of_each = [choices(cls, rest) for cls in table_classes(hint)]
        return [value for value in of_each[0] if all(value in values for values in of_each)]
    if typing.get_origin(hint) is Literal:
        return list(typing.get_args(hint))
    return VALUES[typing.get_origin(hint) or hint]


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return tables in tables from dotted keys."""
    tables: dict[str, Any] = {}
    for key, value in settings.items():
        *outer, name = key.split(".")
        table = tables
        for part in outer:
            table = table.setdefault(part, {})
        table[name] = value
    return tables


def plain(value: Any) -> Any:
    """Return tables as a file has them, with lists for tuples."""
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    return list(value) if isinstance(value, tuple) else value


def outcome(config: type, settings: Mapping[str, Any]) -> str:
    """Return what a config says of these settings; "" if it takes them."""
    try:
        from_data(config, plain(nested(settings)))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("title", "config", "prefix"), CONFIGS)
def test_a_config_refuses_what_its_rows_say_and_nothing_else(
    title: str, config: type, prefix: str
) -> None:
    rows = [row for row in SECTIONS[title].rows if all(key.startswith(prefix) for key in row.when)]
    keys = [key.removeprefix(prefix) for key in dict.fromkeys(k for row in rows for k in row.when)]
    default = {key: value_at(config(), key) for key in keys}
    draw, met, taken = Random(7), set[int](), 0
    assert outcome(config, default) == ""
    for row in rows * 60:
        others = draw.sample(keys, min(2, len(keys)))
        changed = [*(key.removeprefix(prefix) for key in row.when), *others]
        settings = default | {key: draw.choice(choices(config, key)) for key in changed}
        tables = nested({prefix + key: value for key, value in settings.items()})
        said = outcome(config, settings)
        if said.startswith("lora: "):  # adapters have rows of their own
            continue
        first = next((i for i, row in enumerate(rows) if row.holds(tables)), None)
        if first is None:
            taken += 1
            assert said == "", settings
        else:
            met.add(first)
            assert said == rows[first].words(tables), settings
    assert met == set(range(len(rows)))
    assert taken > 20


RUNS = {
    "fsdp2": ("FSDP2 and the split", "The native engine and the run", "Roles on the same ranks"),
    "megatron": ("Megatron-core and the split", "Roles on the same ranks"),
    "sglang": ("SGLang",),
}
FIXED = {
    "fsdp2": {},
    "megatron": {"trainer.backend.kind": "megatron"},
    "sglang": {"engine.kind": "sglang"},
}
SIZES = [1, 2, 4]


def values_of(key: str) -> list[Any]:
    """Return values of a setting of a run."""
    if key in OF_A_RUN:
        return OF_A_RUN[key]
    return SIZES if key.startswith("split.") else choices(grpo.Config, key)


OF_A_RUN: dict[str, list[Any]] = {
    "run.row_shards": [0, 2, 4],
    "trainer.lora.rank": [0, 4],
    "trainer.attention_split": [0, 128],
    "engine.attention_split": [0, 128],
    "trainer.cache_exponents": [(0, 0), (1, 2)],
    "engine.cache_exponents": [(0, 0), (1, 2)],
    "engine.dtype": ["auto", "float32", "bfloat16"],
    "trainer.backend.chunks": [1, 2],
    "trainer.backend.wrap": ["auto", "layer", "model"],
    "trainer.backend.ep_dispatcher": ["torch", "deep_ep"],
    "trainer.backend.offload": ["none", "moments", "master"],
    "trainer.backend.layers": ["local", "transformer_engine"],
    "trainer.backend.sequence_parallel": [False, True],
    "engine.weights": ["full", "e4m3"],
    "engine.cache": ["full", "e4m3"],
    "trainer.backend.kind": ["fsdp2"],
    "engine.kind": ["native"],
    "split.train.ep": [1, 2, 16],
}


def meeting(row: Combination, key: str, is_aimed: bool) -> list[Any]:
    """Return values of a setting of a run; if aimed, those that meet a row's condition alone."""
    met = [value for value in values_of(key) if row.when[key].holds(value, lambda _: ABSENT)]
    return met if is_aimed and met else values_of(key)


ENGINE_TOO = ("weights", "cache", "cache_exponents")


@pytest.mark.parametrize("kind", RUNS)
def test_a_run_is_refused_by_the_rows_that_hold_and_by_nothing_else(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those whose settings are all of a config: models and hosts have other tests."""
    no_host = lambda cfg: replace(kind_of(cfg), check_options=lambda _: None)  # noqa: E731
    monkeypatch.setattr("spmd_rl.check.engine.kind_of", no_host)
    unknown = ("model", "host.dtype", "role")
    rows = [
        row
        for title in RUNS[kind]
        for row in SECTIONS[title].rows
        if not any(key.startswith(unknown) for key in row.when)
    ]
    keys = list(dict.fromkeys(key for row in rows for key in row.when))
    draw, met, taken = Random(3), set[int](), 0
    for row in rows * 30:
        is_aimed = draw.random() < 0.5
        settings = {key: draw.choice(values_of(key)) for key in draw.sample(keys, 1)}
        settings |= {key: draw.choice(meeting(row, key, is_aimed)) for key in row.when} | FIXED[
            kind
        ]
        if not is_aimed:  # so that later rows are met
            settings["run.exact"] = False
            of_trainer = {name: settings.get(f"trainer.{name}") for name in ENGINE_TOO}
            settings |= {f"engine.{name}": value for name, value in of_trainer.items() if value}
        if any(key.endswith("exponents") for key in row.when):  # they are of codes alone
            settings |= {"trainer.cache": "e4m3", "engine.cache": "e4m3"} | FIXED[kind]
        if "trainer.lora.merged_push" in row.when:  # adapters alone are merged
            settings["trainer.lora.rank"] = 4
        try:
            cfg = from_data(grpo.Config, plain(nested({"model": "", "data": "x"} | settings)))
            placements = plan_split(cfg.split, 16)
        except SpmdError as error:  # by a config alone, or a number of ranks
            met |= {i for i, row in enumerate(rows) if row.words_of_any() == str(error)}
            continue
        needs = RunNeeds.of(cfg)
        tables = {
            "run": cfg.run,
            "engine": cfg.engine,
            "trainer": cfg.trainer,
            "split": {name: _sizes(placement) for name, placement in placements.items()},
        }
        holding = {i for i, other in enumerate(rows) if other.holds(tables)}
        said = ""
        try:
            check_axes(needs, placements)
            check_engine(cfg.engine, cfg.run, cfg.trainer)
        except SpmdError as error:
            said = str(error)
        words = {i: rows[i].words(tables) for i in holding}
        assert said in words.values() if holding else said == "", (settings, said)
        met |= holding
        taken += not holding
    assert [row.words_of_any() for i, row in enumerate(rows) if i not in met] == []
    assert taken > 5


def test_the_command_prints_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--combinations"]) == 0
    shown = capsys.readouterr().out
    assert shown == "\n".join(lines(sections())) + "\n"
    assert "  trainer.lora.rank set, trainer.freeze set\n      freeze: expected ()" in shown
    assert shown.count("      ") == sum(len(section.rows) for section in sections())
