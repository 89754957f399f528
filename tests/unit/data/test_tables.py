"""Records of tables: what a file says is learned alike, whichever format it has."""

from __future__ import annotations

import csv
import json
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spmd_rl.data.files.arrow_values import rows_of
from spmd_rl.data.files.files import open_records
from spmd_rl.data.prompts import PromptConfig, Prompts
from spmd_rl.data.sft import SftPairs
from spmd_rl.errors import DataError
from tests.unit.data.chat_templates import CHATML, tokenizer_of
from tests.unit.data.test_file_kinds import write_dataset
from tests.unit.data.whole_files import read_records

pyarrow = pytest.importorskip("pyarrow")

Rows = list[dict[str, Any]]


def calls(name: str, **arguments: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


# two records whose calls and tools have other fields
ROWS: Rows = [
    {
        "messages": [
            {"role": "user", "content": "How warm is it in Oslo?"},
            calls("temperature", place="Oslo"),
            {"role": "tool", "content": "4"},
            {"role": "assistant", "content": "4 degrees."},
        ],
        "tools": [
            tool(
                "temperature",
                description="Degrees at a place",
                parameters={"properties": {"place": {"type": "string"}}, "required": ["place"]},
            )
        ],
    },
    {
        "messages": [
            {"role": "user", "content": "5*6?"},
            calls("multiply", x=5, y=6),
            {"role": "tool", "content": "30"},
            {"role": "assistant", "content": "30."},
        ],
        "tools": [tool("multiply", parameters={"properties": {"x": {"type": "integer"}}})],
    },
]
CONVERSATIONS = PromptConfig(
    chat_template=True, prompt_key="messages", answer_key="", shuffle=False
)


def write_all(folder: Path, rows: Rows, schema: Any = None) -> dict[str, str]:
    """Write the records in each format, and return the paths by its name."""
    from pyarrow import parquet

    keys = list(dict.fromkeys(key for row in rows for key in row))
    folder.mkdir(exist_ok=True)
    paths = {kind: str(folder / f"rows.{kind}") for kind in ("jsonl", "json", "csv", "parquet")}
    Path(paths["jsonl"]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path(paths["json"]).write_text(json.dumps(rows))
    with open(paths["csv"], "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(keys)
        writer.writerows(
            [value if isinstance(value, str) else json.dumps(value) for value in row.values()]
            for row in ({key: row.get(key, "") for key in keys} for row in rows)
        )
    padded = [{key: row.get(key) for key in keys} for row in rows]
    parquet.write_table(pyarrow.Table.from_pylist(padded, schema), paths["parquet"])
    return paths | {"folder": str(write_dataset(folder / "folder", padded, schema=schema))}


def learned(path: str, cfg: PromptConfig = CONVERSATIONS) -> list[tuple[Any, ...]]:
    """Tokens and masks of all that is learned of a file, in its order."""
    stream = SftPairs(path, cfg, tokenizer_of(CHATML))
    return [
        (pair.tokens.tolist(), pair.mask.tolist()) for record in stream.all() for pair in record
    ]


def texts(path: str) -> list[str]:
    """What is learned of a file, as text."""
    tokenizer = tokenizer_of(CHATML)
    return [
        tokenizer.decode([t for t, is_learned in zip(*one, strict=True) if is_learned])
        for one in learned(path)
    ]


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "folder"])
def test_calls_of_other_tools_leave_no_nulls(tmp_path: Path, kind: str) -> None:
    path = write_all(tmp_path, ROWS)[kind]
    first, second = texts(path)
    called = '{"name": "temperature", "arguments": {"place": "Oslo"}}'
    assert first == f"<call>{called}<|end|>4 degrees.<|end|>"
    assert second == ('<call>{"name": "multiply", "arguments": {"x": 5, "y": 6}}<|end|>30.<|end|>')
    prompts = Prompts(path, CONVERSATIONS, tokenizer_of(CHATML)).take(2)
    for prompt, row in zip(prompts, ROWS, strict=True):
        assert json.dumps(row["tools"]) in prompt.text
        assert prompt.chat == row


def test_jsonl_keeps_its_own_nulls(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "q"}, calls("f", a=None)]}
    assert texts(write_all(tmp_path, [row])["jsonl"]) == [
        '<call>{"name": "f", "arguments": {"a": null}}<|end|>'
    ]


@pytest.mark.parametrize("whole", [True, False])
def test_columns_of_the_type_json(tmp_path: Path, whole: bool) -> None:
    """A column is JSON, or parts of it are, as `datasets` stores fields of several types."""
    from pyarrow import ipc, parquet

    def json_array(values: list[Any]) -> Any:
        found = [None if value is None else json.dumps(value) for value in values]
        return pyarrow.ExtensionArray.from_storage(pyarrow.json_(), pyarrow.array(found))

    columns = {key: [row[key] for row in ROWS] for key in ("messages", "tools")}
    arrays = {
        key: json_array(values)
        if whole
        else pyarrow.ListArray.from_arrays(
            [0, len(values[0]), len(values[0]) + len(values[1])], json_array([*chain(*values)])
        )
        for key, values in columns.items()
    }
    table = pyarrow.table(arrays | {"note": json_array([{"a": None}, None])})
    parquet.write_table(table, tmp_path / "rows.parquet")
    folder = tmp_path / "folder"
    folder.mkdir()
    with ipc.new_stream(str(folder / "data.arrow"), table.schema) as stream:
        stream.write_table(table)
    (folder / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    expected = learned(write_all(tmp_path / "plain", ROWS)["jsonl"])
    for path in (tmp_path / "rows.parquet", folder):
        assert learned(str(path)) == expected
        rows = [record.row for record in read_records(str(path))]
        assert rows == [ROWS[0] | {"note": {"a": None}}, ROWS[1]]


def test_what_datasets_writes(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", "4.7")
    table = datasets.Dataset.from_list(ROWS, on_mixed_types="use_json")
    assert "Json" in repr(table.features)
    table.to_parquet(str(tmp_path / "rows.parquet"))
    table.save_to_disk(str(tmp_path / "folder"))
    asked = [row["messages"][:1] for row in ROWS]
    prompts = datasets.Dataset.from_dict(
        {"prompt": asked, "answer": ["a", "b"]},
        features=datasets.Features({"prompt": datasets.Json(), "answer": datasets.Value("string")}),
    )
    prompts.save_to_disk(str(tmp_path / "prompts"))
    expected = learned(write_all(tmp_path / "plain", ROWS)["jsonl"])
    for name in ("rows.parquet", "folder"):
        assert learned(str(tmp_path / name)) == expected
    cfg = PromptConfig(chat_template=True, shuffle=False)
    taken = Prompts(str(tmp_path / "prompts"), cfg, tokenizer_of(CHATML)).take(2)
    assert [prompt.chat["messages"] for prompt in taken] == asked


def test_text_of_the_type_json_that_is_none_is_named(tmp_path: Path) -> None:
    from pyarrow import parquet

    array = pyarrow.ExtensionArray.from_storage(pyarrow.json_(), pyarrow.array(["{}", "{"]))
    parquet.write_table(pyarrow.table({"meta": array}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"x\.parquet:2: meta: this value cannot be read"):
        read_records(str(tmp_path / "x.parquet"))


def test_a_value_that_python_cannot_hold_is_named() -> None:
    times = pyarrow.array([10**15], pyarrow.timestamp("s"))
    with pytest.raises(DataError, match="x:1: at: this value cannot be read"):
        of_arrays(at=times)


def of_arrays(**arrays: Any) -> Rows:
    (batch,) = pyarrow.table(arrays).to_batches()
    return rows_of(batch, [f"x:{row + 1}" for row in range(batch.num_rows)])


INNER = pyarrow.struct([("a", pyarrow.int64()), ("b", pyarrow.string())])

OUTER = pyarrow.struct([("s", INNER), ("l", pyarrow.list_(INNER))])


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        (INNER, {"a": 1}, {"a": 1}),
        (INNER, {}, {}),
        (pyarrow.list_(INNER), [{"a": 1}, None, {}], [{"a": 1}, None, {}]),
        (pyarrow.large_list(INNER), [{"b": "x"}], [{"b": "x"}]),
        (pyarrow.list_(INNER, 1), [{"b": "x"}], [{"b": "x"}]),
        (pyarrow.list_view(INNER), [{"b": "x"}], [{"b": "x"}]),
        (OUTER, {"s": {"a": 1}}, {"s": {"a": 1}}),
        (pyarrow.map_(pyarrow.string(), INNER), [("k", {"a": 1})], {"k": {"a": 1}}),
        (pyarrow.map_(pyarrow.string(), pyarrow.int64()), [("k", None)], {"k": None}),
        (pyarrow.map_(pyarrow.int64(), INNER), [(1, {"a": 1})], [[1, {"a": 1}]]),
        (pyarrow.dictionary(pyarrow.int8(), pyarrow.string()), "x", "x"),
        (pyarrow.large_string(), "x", "x"),
        (pyarrow.string_view(), "x", "x"),
        (pyarrow.list_(pyarrow.int64()), [1, None], [1, None]),
        (pyarrow.list_(pyarrow.int64()), [], []),
        (pyarrow.bool_(), False, False),
    ],
)
def test_a_null_of_a_struct_is_not_there(kind: Any, given: Any, expected: Any) -> None:
    array = pyarrow.array([given, None], kind)
    inner = pyarrow.StructArray.from_arrays([array], ["in"])
    assert of_arrays(x=array) == [{"x": expected}, {}]
    assert of_arrays(x=inner) == [{"x": {"in": expected}}, {"x": {}}]


def test_unions_and_runs() -> None:
    codes = pyarrow.array([0, 1, 1], pyarrow.int8())
    values = [pyarrow.array(["x"] * 3), pyarrow.array([{}, {"a": 1}, None], INNER)]
    union = pyarrow.UnionArray.from_sparse(codes, values)
    assert of_arrays(x=union) == [{"x": "x"}, {"x": {"a": 1}}, {}]
    untold = pyarrow.UnionArray.from_sparse(codes, [values[1], values[1]])
    with pytest.raises(DataError, match="x:1: x: values of the type .* cannot be read"):
        of_arrays(x=untold)
    ends = pyarrow.array([2, 3], pyarrow.int32())
    runs = pyarrow.RunEndEncodedArray.from_arrays(ends, ["a", "b"])
    assert of_arrays(x=runs) == [{"x": "a"}, {"x": "a"}, {"x": "b"}]


def test_two_fields_of_one_name_are_refused() -> None:
    ones = pyarrow.array([1])
    twice = pyarrow.StructArray.from_arrays([ones, ones], ["a", "a"])
    with pytest.raises(DataError, match="x:1: x: two fields are called 'a'"):
        of_arrays(x=twice)
    (batch,) = pyarrow.Table.from_arrays([ones, ones], ["a", "a"]).to_batches()
    with pytest.raises(DataError, match="x:1: two fields are called 'a'"):
        rows_of(batch, ["x:1"])
    pairs = pyarrow.array([[("a", 1), ("a", 2)]], pyarrow.map_(pyarrow.string(), pyarrow.int64()))
    with pytest.raises(DataError, match="two fields are called 'a'"):
        of_arrays(x=pairs)


words = st.text(st.sampled_from("ab \n\r\"',é字\u2028😀{}[]:"), max_size=8)
days, near = st.integers(-9, 2**53), st.lists(words, max_size=2)


def struct(**fields: Any) -> Any:
    return pyarrow.struct([*fields.items()])


TEXT, LEAVES = pyarrow.string(), {"city": pyarrow.string(), "days": pyarrow.int64()}
LEAVES["near"] = pyarrow.list_(TEXT)
FUNCTION = struct(name=TEXT, arguments=struct(of=TEXT, **LEAVES))
CALL = struct(type=TEXT, function=FUNCTION)
# a struct of a table has one order of its fields for all records
SCHEMA = pyarrow.schema(
    {
        "messages": pyarrow.list_(
            struct(role=TEXT, content=TEXT, tool_calls=pyarrow.list_(CALL), name=TEXT)
        ),
        "tools": pyarrow.list_(
            struct(
                type=TEXT,
                function=struct(
                    name=TEXT, description=TEXT, parameters=struct(type=TEXT, **LEAVES)
                ),
            )
        ),
        "meta": struct(
            of=TEXT,
            score=pyarrow.float64(),
            sure=pyarrow.bool_(),
            deep=pyarrow.list_(struct(**{"in": pyarrow.int64()}, **LEAVES)),
        ),
    }
)


@st.composite
def leaves(draw: st.DrawFn) -> dict[str, Any]:
    found = {"city": draw(words), "days": draw(days), "near": draw(near)}
    return {name: value for name, value in found.items() if draw(st.booleans())}


@st.composite
def records(draw: st.DrawFn) -> Rows:
    """Records of `SCHEMA`, whose calls, tools and other keys have other fields each, no null."""
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        messages: list[dict[str, Any]] = [{"role": "user", "content": draw(words) + "?"}]
        for number in range(draw(st.integers(0, 2))):
            arguments = {"of": draw(words)} | draw(leaves())
            messages.append(calls(f"f{number}", **arguments))
            messages.append({"role": "tool", "content": draw(words)})
        messages.append({"role": "assistant", "content": draw(words)})
        row: dict[str, Any] = {"messages": messages}
        if draw(st.booleans()):
            row["tools"] = [
                tool(f"f{number}", parameters={"type": "object"} | draw(leaves()))
                for number in range(draw(st.integers(0, 2)))
            ]
        meta = {"of": draw(words), "score": draw(st.floats(-1e9, 1e9)), "sure": draw(st.booleans())}
        row["meta"] = meta | {"deep": [{"in": 1} | draw(leaves())]}
        rows.append(row)
    return rows


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=records())
def test_every_format_says_the_same(tmp_path_factory: Any, rows: Rows) -> None:
    """Prompts, what is learned, and what graders see; of .csv the last is text."""
    tokenizer = tokenizer_of(CHATML)
    paths = write_all(tmp_path_factory.mktemp("rows"), rows, SCHEMA)
    found = {}
    for kind, path in paths.items():
        prompts = Prompts(path, CONVERSATIONS, tokenizer).take(len(rows))
        metas = [prompt.meta for prompt in prompts]
        if kind == "csv":
            metas = [{"meta": json.loads(meta["meta"])} for meta in metas]
        asked = [(prompt.text, prompt.tokens.tolist(), prompt.chat) for prompt in prompts]
        found[kind] = json.dumps([learned(path), asked, metas])
    assert set(found.values()) == {found["jsonl"]}
    assert [record.row for record in read_records(paths["parquet"])] == rows


def rewrite(kind: str, folder: Path, rows: Rows) -> None:
    """Write other records in the place of those of `write_all`."""
    shutil.rmtree(folder / "folder")
    write_all(folder, rows)


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "folder"])
def test_a_file_that_is_written_again_is_refused(tmp_path: Path, kind: str) -> None:
    path = write_all(tmp_path, ROWS)[kind]
    records = open_records(path)
    assert len(records.read([0, 1])) == 2
    rewrite(kind, tmp_path, ROWS[::-1] * 2)
    for look in (lambda: records.read([1]), records.digest):
        with pytest.raises(DataError, match="the file has changed since the run opened it"):
            look()


def test_a_data_set_of_other_files_is_refused(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "rows", ROWS, [1, 0])
    records = open_records(str(folder))
    (folder / "state.json").write_text('{"_data_files": [{"filename": "data-0.arrow"}]}')
    with pytest.raises(DataError, match=r"state\.json: the file has changed"):
        records.read([0])
