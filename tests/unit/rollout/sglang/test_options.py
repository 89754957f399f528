"""Options by SGLang's names: unknown ones, those that the world owns, and versions."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from spmd_rl.check.engine import announce_correction, check_engine
from spmd_rl.config.load import load
from spmd_rl.config.run import RunConfig
from spmd_rl.errors import ConfigError
from spmd_rl.recipes import grpo, grpo_async
from spmd_rl.rollout.interpreter import Interpreter
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.rollout.sglang.config import SglangEngineConfig
from spmd_rl.rollout.sglang.options import OWNED, check_options, server_args
from tests.fakes.sglang_child import write_site


def config(site: Path, **options: object) -> SglangEngineConfig:
    return SglangEngineConfig(python=str(site), options=options)


def test_known_options_pass(site: Path) -> None:
    found = check_options(config(site, attention_backend="triton", disable_radix_cache=True))
    assert found.version == "0.5.16"
    assert "attention_backend" in found.options


def test_a_misspelt_option_names_the_nearest(site: Path) -> None:
    sentence = (
        "engine.options.atention_backend is no option of SGLang 0.5.16; "
        "the nearest is 'attention_backend'"
    )
    with pytest.raises(ConfigError, match=f"^{sentence}$"):
        check_options(config(site, atention_backend="triton"))


def test_an_option_like_no_other_names_none(site: Path) -> None:
    with pytest.raises(ConfigError, match=r"zzz is no option of SGLang 0\.5\.16$"):
        check_options(config(site, zzz=1))


@pytest.mark.parametrize("name", sorted(OWNED))
def test_what_the_world_owns_is_refused_with_the_reason(site: Path, name: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_options(config(site, **{name: 1}))
    assert str(raised.value) == f"engine.options.{name} cannot be set: {OWNED[name]}"


@pytest.mark.parametrize(
    "name",
    "tp_size nnodes node_rank base_gpu_id dist_init_addr port nccl_port host skip_tokenizer_init "
    "load_format random_seed enable_memory_saver".split(),
)
def test_the_world_owns(name: str) -> None:
    assert name in OWNED


def test_the_second_known_version_passes(tmp_path: Path) -> None:
    assert check_options(config(write_site(tmp_path, "0.5.17"))).version == "0.5.17"


@pytest.mark.parametrize("version", ["0.5.15", "0.5.18", "1.0"])
def test_another_version_is_refused(tmp_path: Path, version: str) -> None:
    with pytest.raises(ConfigError, match=rf"has SGLang {version}, .* install sglang==0\.5\.16"):
        check_options(config(write_site(tmp_path, version)))


def test_a_folder_without_sglang_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no SGLang: install sglang==0\.5\.16 there"):
        check_options(config(tmp_path))


def test_what_is_no_interpreter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is neither an interpreter nor a folder of packages"):
        check_options(config(tmp_path / "missing"))


def test_an_interpreter_gets_no_search_path_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    assert Interpreter.of(sys.executable) == Interpreter(sys.executable, "")


def test_a_folder_is_searched_first_with_those_of_its_pth_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    (tmp_path / "nested").mkdir()
    (tmp_path / "more.pth").write_text("# a comment\nnested\nmissing\nimport os\n")
    found = Interpreter.of(str(tmp_path))
    assert found.search_path == f"{tmp_path}:{tmp_path}/nested:/ours"


def test_options_of_the_user_go_before_defaults_and_ours_before_both() -> None:
    cfg = SglangEngineConfig(options={"a": 1, "b": 1})
    assert server_args(cfg, {"a": 2}, {"b": 0, "c": 0}) == {"a": 2, "b": 1, "c": 0}


def test_an_exact_run_refuses_the_engine(site: Path) -> None:
    with pytest.raises(ConfigError, match=r"set run\.exact = false, .* or engine\.kind"):
        check_engine(config(site), RunConfig())
    check_engine(config(site), RunConfig(exact=False))
    check_engine(NativeEngineConfig(), RunConfig())


def test_the_correction_is_said_for_this_engine_alone(capsys: pytest.CaptureFixture[str]) -> None:
    announce_correction(NativeEngineConfig(), "none")
    assert capsys.readouterr().out == ""
    announce_correction(SglangEngineConfig(), "none")
    assert capsys.readouterr().out.endswith("correction: none\n")


def test_options_are_set_in_files_and_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'model = "m"\ndata = "d"\n[engine]\nkind = "sglang"\n[engine.options]\nchunk = [1, 2]\n'
    )
    cfg = load(
        grpo.Config, path, ["engine.options.attention_backend=triton", "correction.mode=truncate"]
    )
    assert isinstance(cfg.engine, SglangEngineConfig)
    assert cfg.engine.options == {"chunk": [1, 2], "attention_backend": "triton"}


def test_the_async_recipe_corrects_in_one_way(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="correction.mode = 'truncate' would correct twice"):
        load(grpo_async.Config, None, ["model=m", "data=d", "correction.mode=truncate"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("memory_fraction", 1.0),
        ("max_batch", 0),
        ("slab_bytes", 1),
        ("start_deadline_s", 0.0),
        ("answer_deadline_s", float("inf")),
        ("dtype", "float16"),
    ],
)
def test_values_out_of_range_are_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        SglangEngineConfig(**{key: value})
