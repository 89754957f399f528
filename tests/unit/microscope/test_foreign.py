"""Sides that run in another program: a dump that transformers writes, crafted files, and a stand-in
for SGLang.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from examples.hidden_states import write_with_transformers
from spmd_rl.cli import main
from spmd_rl.errors import ConfigError, DataError, DeadlineError, SpmdError
from spmd_rl.microscope.examine import ReplaySetup, examine
from spmd_rl.microscope.foreign.dump import Dump, DumpPass, locate_sequences
from spmd_rl.microscope.foreign.inputs_file import write_inputs
from spmd_rl.microscope.foreign.layout import point_of, tensor_name
from spmd_rl.microscope.replay.case import ReplayCase, ReplaySequence
from spmd_rl.microscope.replay.engine_pass import EnginePass
from spmd_rl.microscope.replay.forward_pass import ReferencePass, TrainerPass, load_model
from spmd_rl.microscope.taps.points import BEFORE, OPS, Point
from spmd_rl.microscope.taps.taps import ValueTap
from spmd_rl.model.hf import read_weights, save_folder
from spmd_rl.model.read import read_spec
from spmd_rl.model.spec import ModelSpec
from spmd_rl.rollout.foreign_program import run_program
from spmd_rl.rollout.native.config import NativeEngineConfig

CPU = torch.device("cpu")
REPO = Path(__file__).resolve().parents[3]
FAKE_SITE = REPO / "tests" / "fakes" / "sglang_site"
SAMPLE = {"prompt_uid": 7, "prompt": "15+29=", "prompt_tokens": [19, 23, 13, 20, 27, 31]}


@pytest.fixture(scope="module")
def group() -> ReplayCase:
    """Two samples of one prompt, and a longer sequence."""
    rng = np.random.default_rng(0)
    stem = rng.integers(2, 100, 40)
    sizes = {"0:0": (9, 4), "0:1": (9, 7), "1:0": (40, 20)}
    return ReplayCase(
        tuple(
            ReplaySequence(name, stem[:p], rng.integers(2, 100, r), drawn_as=(int(name[0]), n))
            for n, (name, (p, r)) in enumerate(sizes.items())
        )
    )


def written(model: Path, case: ReplayCase, target: Path) -> Path:
    """A dump that the example writes."""
    write_inputs(case, model, target.with_suffix(".json"))
    write_with_transformers.main(str(target.with_suffix(".json")), str(target))
    return target


@pytest.fixture(scope="module")
def dump(folder: Path, group: ReplayCase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(folder, group, tmp_path_factory.mktemp("dump") / "dump.safetensors")


@pytest.fixture
def spec(folder: Path) -> ModelSpec:
    return read_spec(folder)


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata())


def changed(path: Path, target: Path, change: Callable[[dict, dict], None]) -> Path:
    """A copy of a dump after `change` had its tensors and its metadata."""
    tensors, metadata = load_file(path), metadata_of(path)
    change(tensors, metadata)
    save_file(tensors, target, metadata)
    return target


def live(name: str, folder: Path) -> Any:
    if name == "transformers":
        return ReferencePass(folder, torch.float32, CPU)
    model = load_model(folder, torch.float32, CPU)
    if name == "trainer":
        return TrainerPass(model, share_prompts=False)
    return EnginePass(model, NativeEngineConfig(page_size=4, prefix_cache=False))


def examined(folder: Path, case: ReplayCase, path: Path, side: str = "trainer") -> Any:
    recorded = DumpPass(Dump(path, read_spec(folder)), CPU)
    return examine(ReplaySetup(case, live(side, folder), recorded, str(folder), tolerance=1e-4))


def with_another_mlp(folder: Path, target: Path, layer: int) -> Path:
    """The model with rows of a layer's gate in another order."""
    weights = dict(read_weights(folder))
    name = f"model.layers.{layer}.mlp.gate_proj.weight"
    weights[name] = weights[name].flip(0)
    save_folder(target, folder, weights.items())
    return target


def test_points_and_names_are_one_to_one() -> None:
    for layer, op in [(BEFORE, "embed"), (2, "q"), (0, "down_proj"), (3, "final_norm")]:
        assert point_of(tensor_name(Point(layer, op)), 3) == Point(layer, op)
    for name in ("layers.3.q", "layers.-1.q", "layers.01.q", "layers.².q", "layers.0.embed", "x"):
        assert point_of(name, 3) is None


@pytest.mark.parametrize("side", ["trainer", "engine", "transformers"])
def test_a_dump_of_transformers_agrees_within_rounding(
    folder: Path, group: ReplayCase, dump: Path, side: str
) -> None:
    found = examined(folder, group, dump, side)
    assert found.agree, found.verdict
    points = {point.op for point in found.comparison.points}
    assert points == set(OPS) - {"q", "k", "v", "router", "routes", "experts"}
    if side == "transformers":
        assert "agree in every bit" in found.verdict
        assert found.comparison.agree
    else:
        assert "Within rounding they agree" in found.verdict
        assert "Log-probs differ by" in found.verdict
        shares = [result.largest_share for result in found.comparison.results]
        assert 0 < max(shares) < 1e-5


@pytest.mark.parametrize("side", ["trainer", "engine", "transformers"])
def test_another_mlp_in_layer_2_is_named(
    folder: Path, group: ReplayCase, tmp_path: Path, side: str
) -> None:
    other = with_another_mlp(folder, tmp_path / "other", 2)
    found = examined(folder, group, written(other, group, tmp_path / "d.safetensors"), side)
    assert not found.agree
    assert found.verdict.startswith("Beyond rounding they part at layer 2 gate_proj")
    beyond = [r for r in found.comparison.results if r.largest_share > 1e-4]
    assert [r.point.layer for r in beyond] == [2], "what follows only inherits it"


def test_the_outputs_of_our_own_trainer_are_equal_in_every_bit(
    folder: Path, group: ReplayCase, dump: Path, tmp_path: Path
) -> None:
    values = ValueTap(group.num_rows)
    live("trainer", folder).run(group, values)
    values.move_to_host()

    def ours(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        rows = tensors["scored"].long()
        for point, table in values.table.items():
            own = table[rows] if point.op in ("logits", "logprob") else table
            tensors[tensor_name(point)] = own.contiguous()

    path = changed(dump, tmp_path / "d.safetensors", ours)
    found = examined(folder, group, path)
    assert found.comparison.agree
    assert "trainer and dump agree in every bit" in found.verdict

    def one_bit(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        tensors["layers.1.attention"].view(torch.int32)[11, 3] ^= 1

    found = examined(folder, group, changed(path, tmp_path / "e.safetensors", one_bit))
    assert "\nlayer 1 attention: 1 of " in found.verdict
    assert found.agree, "a bit is rounding"
    assert not found.comparison.agree


def drop(name: str) -> Callable[[dict, dict], None]:
    return lambda tensors, metadata: (tensors.pop(name, None), metadata.pop(name, None))[0]


def put(name: str, value: Any) -> Callable[[dict, dict], None]:
    def change(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        (metadata if isinstance(value, str) else tensors)[name] = value

    return change


CRAFTED = {
    "metadata lacks format": drop("format"),
    "lacks 'program'": drop("program"),
    "dtype is none of": put("dtype", "int8"),
    "not a printable": put("program", "x\x1b[2J"),
    "lacks the tensor 'tokens'": drop("tokens"),
    "'positions' another number": put("positions", torch.arange(3)),
    "does not count from 0": put("positions", torch.ones(89, dtype=torch.int64)),
    "not a vector of": put("tokens", torch.zeros(89)),
    "'scored' does not say": drop("scored"),
    "'scored' is not an ascending": put("scored", torch.full((31,), -1)),
    "'scored' names the last row": put("scored", torch.arange(31)),
    "lacks layers.1.o_proj, though": drop("layers.1.o_proj"),
    "the nearest is 'layers.0.o_proj'": put("layers.0.oproj", torch.zeros(89, 64)),
    "is no point": put("layers.3.o_proj", torch.zeros(89, 64)),
    "layers.0.o_proj is [89, 63], and": put("layers.0.o_proj", torch.zeros(89, 63)),
    "layers.0.o_proj is [88, 64], and": put("layers.0.o_proj", torch.zeros(88, 64)),
    "layers.0.o_proj is F64": put("layers.0.o_proj", torch.zeros(89, 64, dtype=torch.float64)),
}


@pytest.mark.parametrize("said", CRAFTED)
def test_a_file_that_is_no_dump_is_refused(
    dump: Path, spec: ModelSpec, tmp_path: Path, said: str
) -> None:
    path = changed(dump, tmp_path / "d.safetensors", CRAFTED[said])
    with pytest.raises(DataError) as error:
        Dump(path, spec)
    assert said in str(error.value)
    assert str(error.value).startswith(str(path))


def test_a_broken_file_and_none_are_refused(dump: Path, spec: ModelSpec, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a file"):
        Dump(tmp_path, spec)
    whole = dump.read_bytes()
    for bytes_ in (b"", whole[:-1], b"\xff" * 64, whole[:9]):
        (tmp_path / "d.safetensors").write_bytes(bytes_)
        with pytest.raises(DataError, match="not a readable safetensors file"):
            Dump(tmp_path / "d.safetensors", spec)


def test_other_tokens_than_the_samples_are_named(
    dump: Path, spec: ModelSpec, group: ReplayCase, tmp_path: Path
) -> None:
    def other_token(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        tensors["tokens"][13 + 10] = 103

    path = changed(dump, tmp_path / "d.safetensors", other_token)
    with pytest.raises(DataError, match="the tokens of 0:1: the most alike has token 103 at posi"):
        locate_sequences(Dump(path, spec), group)

    def fewer(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        for name in ("scored", "logits", "logprob"):
            tensors[name] = tensors[name][1:].contiguous()

    path = changed(dump, tmp_path / "e.safetensors", fewer)
    with pytest.raises(DataError, match=r"'scored' lacks row 8, .* of 0:0 \(position 8\)"):
        locate_sequences(Dump(path, spec), group)


def test_a_dump_may_hold_more_sequences_in_another_order(
    folder: Path, group: ReplayCase, tmp_path: Path
) -> None:
    more = ReplaySequence("9:0", np.arange(5) + 2, np.arange(3) + 2)
    case = ReplayCase((group.sequences[2], more, group.sequences[1], group.sequences[0]))
    path = written(folder, case, tmp_path / "d.safetensors")
    assert examined(folder, group, path).agree


@pytest.fixture
def run(tmp_path: Path, folder: Path) -> Path:
    run = tmp_path / "demo"
    (run / "samples").mkdir(parents=True)
    shutil.copytree(folder, run / "hf")
    (run / "config.toml").write_text(
        '[engine]\npage_size = 4\ndtype = "float32"\n[sampling]\ntemperature = 0.7\n'
    )
    rows = [SAMPLE | {"index": i, "tokens": [22, 22, 20 + i, 1]} for i in range(3)]
    (run / "samples" / "step_00001.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )
    return run


@pytest.fixture
def mismatch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    def call(*words: object) -> int:
        monkeypatch.setattr(sys, "argv", ["spmd-rl", "mismatch", *map(str, words)])
        return main.main()

    return call


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a rank of torchrun."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_PORT", "1")


def test_a_run_is_compared_with_a_dump(run: Path, mismatch, capsys, tmp_path: Path) -> None:
    inputs, path = tmp_path / "inputs.json", tmp_path / "dump.safetensors"
    assert mismatch(run, "--write-inputs", inputs) == 0
    assert "3 sequences for the weights in" in capsys.readouterr().out
    assert not (run / "mismatch").exists()
    asked = json.loads(inputs.read_text())
    assert {one["temperature"] for one in asked["sequences"]} == {0.7}
    write_with_transformers.main(str(inputs), str(path))
    for left in ("engine", "trainer"):
        words = (run, "--left", left, "--right", "dump", "--dump", path)
        assert mismatch(*words) == 0, capsys.readouterr()
        said = capsys.readouterr().out
        assert "Within rounding they agree" in said
        assert mismatch(*words, "--tolerance", "0") == 1
        capsys.readouterr()
    data = json.loads((run / "mismatch" / "trainer-dump.json").read_text())
    assert data["versions"]["dump: program"].startswith("transformers ")
    assert "transformers " in (run / "mismatch" / "trainer-dump.html").read_text()
    assert mismatch(run, "--samples", "7:1", "--step", "1", "--right", "dump", "--dump", path) == 0
    assert mismatch("--model", run / "hf", "--prompts", "1+1=", "--right", "dump", "--dump", path)
    assert "has no sequence with the tokens of prompt 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--right", "dump"), "--dump FILE go together"),
        (("--dump", "x"), "--dump FILE go together"),
        (("--left", "dump", "--right", "sglang", "--dump", "x"), "both run elsewhere"),
        (("--right", "sglang-deterministic", "--left", "sglang"), "both run elsewhere"),
        (("--sglang-options", "{}]"), "is not JSON"),
        (("--sglang-options", "[1]"), "is not a JSON object"),
        (("--sglang-options", '{"a": 1}'), "need --right sglang"),
        (("--right", "sglang", "--sglang-options", '{"dtype": ""}'), "dtype cannot be set"),
        (("--right", "sglang", "--sglang", "/no/such"), "neither an interpreter nor"),
        (("--tolerance", "1"), "--tolerance is a share"),
        (("--right", "dump", "--dump", "/no/such"), "is not a file"),
    ],
)
def test_what_cannot_be_compared_is_said(
    run: Path, mismatch, capsys, words: tuple[str, ...], said: str
) -> None:
    assert mismatch(run, *words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("side", ["sglang", "sglang-deterministic"])
def test_sglang_computes_in_a_process_of_its_own(run: Path, mismatch, capsys, side: str) -> None:
    assert mismatch(run, "--left", "trainer", "--right", side, "--sglang", FAKE_SITE) == 0
    assert "Within rounding they agree" in capsys.readouterr().out
    data = json.loads((run / "mismatch" / f"trainer-{side}.json").read_text())
    deterministic = "yes" if side.endswith("deterministic") else "no"
    assert data["versions"][f"{side}: deterministic"] == deterministic
    for cause in data["causes"]:
        assert cause["left"]["kernels"]
        assert not cause["right"]["kernels"], "they ran elsewhere"
    ops = {one["op"] for one in data["findings"]}
    assert ops == set(OPS) - {"router", "routes", "experts"}, (
        "all of ours are seen in SGLang's modules"
    )


@pytest.mark.usefixtures("environment")
def test_a_difference_of_sglang_is_named(run: Path, mismatch, capsys) -> None:
    options = json.dumps({"broken_layer": 2, "attention_backend": "fa3"})
    words = ("--right", "sglang", "--sglang", FAKE_SITE, "--sglang-options", options)
    assert mismatch(run, "--left", "trainer", *words) == 1
    assert "Beyond rounding they part at layer 2 gate_proj" in capsys.readouterr().out
    data = json.loads((run / "mismatch" / "trainer-sglang.json").read_text())
    assert data["versions"]["sglang: attention_backend"] == "fa3"


def test_a_run_of_sglang_is_replayed_by_it(run: Path, mismatch, capsys) -> None:
    settings = f'[engine]\nkind = "sglang"\npython = "{FAKE_SITE}"\ndtype = "float32"\n'
    options = '[engine.options]\nattention_backend = "flashinfer"\n'
    (run / "config.toml").write_text(settings + options)
    assert mismatch(run) == 2
    words = shlex.split(capsys.readouterr().err.partition(": add ")[2].partition(" if you")[0])
    assert words == [
        *("--left", "sglang", "--sglang", str(FAKE_SITE)),
        *("--sglang-options", '{"attention_backend": "flashinfer"}'),
    ]
    assert mismatch(run, *words) == 0, capsys.readouterr()
    data = json.loads((run / "mismatch" / "sglang-trainer.json").read_text())
    assert data["versions"]["sglang: attention_backend"] == "flashinfer"


@pytest.mark.parametrize(
    "words",
    [(), ("--left", "sglang"), ("--right", "sglang"), ("--right", "sglang-deterministic")],
)
@pytest.mark.parametrize("chosen", [(), ("--sglang", FAKE_SITE)])
def test_no_program_runs_because_a_folder_names_it(
    run: Path, mismatch, tmp_path: Path, words: tuple[str, ...], chosen: tuple[Any, ...]
) -> None:
    trace, program = tmp_path / "trace", tmp_path / "python"
    program.write_text(f"#!/bin/sh\ntouch '{trace}'\n")
    program.chmod(0o700)
    settings = f'[engine]\nkind = "sglang"\npython = "{program}"\n'
    options = '[engine.options]\nload_format = "private"\n'
    (run / "config.toml").write_text(settings + options)
    assert mismatch(run, *words, *chosen) == 2
    assert not trace.exists()
    mismatch(run, "--left", "engine")  # which needs no program
    assert not trace.exists()


def test_sglang_that_fails_is_quoted(run: Path, mismatch, capsys) -> None:
    words = ("--right", "sglang", "--sglang", FAKE_SITE, "--sglang-options", '{"tp": 2}')
    assert mismatch(run, *words) == 3
    error = capsys.readouterr().err
    assert "SGLang's forward pass ended with exit code 3: TypeError: " in error
    assert "unexpected keyword argument 'tp'" in error


def test_a_program_that_does_not_end_is_ended(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import time\nprint('began', flush=True)\ntime.sleep(600)\n")
    with pytest.raises(DeadlineError, match="the program was not done within 0.5 s"):
        run_program(program, [], python="", folder=tmp_path, name="the program", deadline_s=0.5)
    program.write_text("print('a\\x1b[2Jb')\nraise SystemExit(4)\n")
    with pytest.raises(SpmdError, match=r"ended with exit code 4: a \[2Jb"):
        run_program(program, [], python="", folder=tmp_path, name="the program", deadline_s=60)


def test_a_program_listens_on_no_interface_but_the_loopback(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        f"sys.path.insert(0, {str(REPO)!r})\n"
        "import torch.distributed as dist\n"
        "from tests.listeners import listeners\n"
        "method = os.environ['SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE']\n"
        "dist.init_process_group('gloo', init_method=method, world_size=1, rank=0)\n"
        "found = listeners([os.getpid()])\n"
        "print(found)\n"
        "raise SystemExit(0 if all(one.is_loopback for one in found) else 4)\n"
    )
    run_program(program, [], python="", folder=tmp_path, name="the program", deadline_s=300)
