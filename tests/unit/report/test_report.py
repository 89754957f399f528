"""The report page: complete, self-contained, bounded, and safe against hostile text."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from spmd_rl.errors import ConfigError, DataError
from spmd_rl.observe.metrics import METRIC_OF_NAME, METRICS
from spmd_rl.observe.metrics_log import read_metrics
from spmd_rl.report import series as figures
from spmd_rl.report import write_report
from spmd_rl.report.about import about
from spmd_rl.report.build import gather
from spmd_rl.report.command import main
from spmd_rl.report.page import as_json
from spmd_rl.report.panels import PANEL_OF_METRIC, PHASES
from spmd_rl.report.pictures import colours, curves, time_axes
from spmd_rl.report.pictures.curve_painter import redraw
from spmd_rl.report.settings import differences
from spmd_rl.report.verdicts.comparison import as_number
from tests.unit.report.synthetic import HOSTILE, make_run

PAGE = Path(figures.__file__).parent / "page"


class Elements(HTMLParser):
    """The elements of a page with their attributes, and the text of its data."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.data = ""
        self._in_data = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._in_data = ("id", "data") in attrs

    def handle_data(self, text: str) -> None:
        self.data += text if self._in_data else ""

    def handle_endtag(self, tag: str) -> None:
        self._in_data = False


def page_of(*runs: Path) -> Elements:
    return Elements(write_report(runs).read_text(encoding="utf-8"))


OURS = "html head meta meta meta meta link title style body noscript script script".split()


@pytest.mark.parametrize(
    "text",
    [
        HOSTILE,
        "</SCRIPT >",
        "<!--",
        "]]>",
        "\ud83d alone",
        "\x00\x08\x7f",
        "a\u2028b\u2029c",
        "{{script}}",
    ],
)
def test_what_a_model_wrote_stays_data(tmp_path: Path, text: str) -> None:
    page = page_of(make_run(tmp_path / "run", num_steps=2, num_ranks=1, text=text))
    assert [tag for tag, _ in page.found] == OURS
    data = json.loads(page.data)
    group = data["runs"][0]["samples"]["steps"][0]["groups"][0]
    assert group["prompt"] == text
    assert "".join(group["samples"][0]["pieces"]) == text


def test_hostile_names_settings_and_plans_stay_data_too(tmp_path: Path) -> None:
    run = make_run(
        tmp_path / "<b onmouseover=x>&", num_steps=1, num_ranks=1, settings='note = "</script><b>"'
    )
    (run / "plan.json").write_text(json.dumps({"</script>": ["<img src=x>", float("nan")]}))
    page = page_of(run)
    assert [tag for tag, _ in page.found] == OURS
    assert json.loads(page.data)["runs"][0]["plan"] == {"</script>": ["<img src=x>", "NaN"]}


def test_the_check_for_elements_can_fail() -> None:
    assert [tag for tag, _ in Elements("<p><img src=x>").found] == ["p", "img"]


def test_json_in_a_page_has_no_character_that_matters_to_html() -> None:
    text = as_json({"a": "</script>&<!--\u2028é"})
    assert re.fullmatch(r"[ -~]*", text)
    assert not set("<>&") & set(text)
    assert json.loads(text) == {"a": "</script>&<!--\u2028é"}


def test_the_scripts_make_text_nodes_only() -> None:
    forbidden = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|new Function"
        r"|(?<![/\"])\beval\b(?!\\?/)|\bfetch\b|XMLHttp|import\(|https?://(?!www\.w3\.org/2000/svg)"
    )
    for script in sorted(PAGE.glob("*.js")):
        assert not forbidden.findall(script.read_text(encoding="utf-8")), script.name
    assert forbidden.search('node.innerHTML = "x"')


def test_the_page_names_nothing_outside_itself_and_admits_only_its_own_script(
    tmp_path: Path,
) -> None:
    page = page_of(make_run(tmp_path / "run", num_steps=1, num_ranks=1))
    links = [
        value
        for _, attributes in page.found
        for name, value in attributes.items()
        if name in ("src", "href", "action")
    ]
    assert links == ["data:,"]
    policy = next(
        a["content"] for _, a in page.found if a.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy


def test_a_page_reloads_itself_until_its_run_has_ended(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_steps=1, num_ranks=1)
    redraw(run / "metrics.jsonl", run / "curves.png", "run")
    page = Elements((run / "report.html").read_text(encoding="utf-8"))
    assert json.loads(page.data)["reload_s"] > 0
    assert json.loads(page_of(run).data)["reload_s"] == 0


def test_advice_leads_to_pages_that_are_beside_the_package(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_steps=1, num_ranks=1)
    docs = json.loads(page_of(run).data)["docs"]
    assert (run / docs / "docs/hyperparameters.md").is_file()
    assert gather([run])["docs"] == ""


@pytest.mark.parametrize("num_steps", [1, 2, 599, 601, 10_000])
def test_curves_of_any_length_have_bounded_size(num_steps: int) -> None:
    rows = [{"step": step, "x": float(step)} for step in range(1, num_steps + 1)]
    drawn = figures.curves(rows)
    num_points = len(drawn["first"])
    assert num_points == min(num_steps, figures.MAX_POINTS)
    assert (drawn["first"][0], drawn["last"][-1], drawn["num_steps"]) == (1, num_steps, num_steps)
    assert all(b == a + 1 for a, b in zip(drawn["last"], drawn["first"][1:], strict=False))
    column = drawn["columns"]["x"]
    means = [(a + b) / 2 for a, b in zip(drawn["first"], drawn["last"], strict=True)]
    assert column["mean"] == pytest.approx(means, rel=1e-6)
    assert ("low" in column) == (num_steps > figures.MAX_POINTS)


def test_one_step_that_stands_out_among_ten_thousand_is_still_seen() -> None:
    rows = [
        {"step": step, "onpolicy/mismatched_tokens": 512 if step == 7777 else 0}
        for step in range(1, 10_001)
    ]
    column = figures.curves(rows)["columns"]["onpolicy/mismatched_tokens"]
    assert max(column["high"]) == 512
    assert sum(value > 0 for value in column["high"]) == 1


def test_missing_values_are_gaps_and_words_are_no_metrics() -> None:
    rows = [{"step": 1, "a": None, "b": 1}, {"step": 2, "a": 2.0, "note": "hello", "flag": True}]
    assert figures.curves(rows)["columns"] == {"a": {"mean": [None, 2]}, "b": {"mean": [1, None]}}


def test_a_run_that_has_not_begun_makes_a_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_steps=1, num_ranks=1)
    (run / "metrics.jsonl").write_text("")
    for path in [*(run / "samples").iterdir(), *(run / "traces").iterdir()]:
        path.unlink()
    data = json.loads(page_of(run).data)["runs"][0]
    assert data["curves"]["columns"] == {}
    assert data["wall_s"] is None
    assert set(data["figures"]) == {None}


def test_final_figures_are_what_their_words_say() -> None:
    rows: list[dict[str, Any]] = [
        {
            "step": step,
            "reward/mean": step / 100,
            "onpolicy/mismatched_tokens": 2,
            "time/step": 9.0 if step == 1 else 1.0,
        }
        for step in range(1, 101)
    ]
    values = dict(
        zip(
            [figure.metric for figure in figures.KEY_FIGURES],
            figures.key_figures(rows),
            strict=True,
        )
    )
    reward = values["reward/mean"]
    assert reward is not None
    assert reward.value == pytest.approx(0.905)  # the mean of the last fifth
    assert reward.error == pytest.approx((35 / 20) ** 0.5 / 100)  # 20 steps: variance 20 * 21 / 12
    assert values["onpolicy/mismatched_tokens"] == (200, None)
    assert values["time/step"] == (1.0, None)
    assert values["perf/mfu"] is None


def figure_of(rows: list[dict[str, Any]], metric: str) -> float | None:
    metrics = [figure.metric for figure in figures.KEY_FIGURES]
    found = dict(zip(metrics, figures.key_figures(rows), strict=True))[metric]
    return found and found.value


def test_no_mismatches_are_counted_where_nothing_was_compared() -> None:
    rows = [
        {"step": step, "onpolicy/mismatched_tokens": 0, "onpolicy/compared_tokens": 0}
        for step in (1, 2)
    ]
    assert figure_of(rows, "onpolicy/mismatched_tokens") is None
    assert figure_of(rows, "onpolicy/compared_tokens") == 0
    assert "onpolicy/mismatched_tokens" not in figures.curves(rows)["columns"]
    rows[0] |= {"onpolicy/mismatched_tokens": 3, "onpolicy/compared_tokens": 9}
    assert figure_of(rows, "onpolicy/mismatched_tokens") == 3
    assert figures.curves(rows)["columns"]["onpolicy/mismatched_tokens"] == {"mean": [3, None]}


@pytest.mark.parametrize(
    ("better", "values", "winner"),
    [
        (1, [0.5, 0.6], 1),
        (-1, [0.5, 0.6], 0),
        (0, [0.5, 0.6], None),
        (1, [0.58, 0.6], None),  # 3 % is nothing
        (1, [1000.0, 951.0], None),
        (1, [1000.0, 950.0], 0),
        (1, [0.6, 0.59, 0.1], None),  # better than the third only
        (-1, [0, 3, None], 0),
        (-1, [0, 0], None),
        (1, [-2.0, -1.0], 1),
        (1, [0.7, None], None),
        (1, [None, None], None),
    ],
)
def test_a_winner_is_clearly_better_than_the_next(
    better: int, values: list[float | None], winner: int | None
) -> None:
    found = [None if value is None else figures.Figure(value, None) for value in values]
    assert figures.winner(figures.KeyFigure("", "", "total", better), found) == winner


@pytest.mark.parametrize(("error", "winner"), [(0.02, 1), (0.05, None)])
def test_a_winner_is_better_by_more_than_the_noise(error: float, winner: int | None) -> None:
    values = [figures.Figure(0.5, error), figures.Figure(0.6, error)]
    assert figures.winner(figures.KeyFigure("", "", "total", 1), values) == winner


def test_winners_are_named_in_the_page_and_only_of_qualities(tmp_path: Path) -> None:
    one, two = (
        make_run(tmp_path / name, num_steps=40, num_ranks=1, sample_steps=[])
        for name in ("one", "two")
    )
    rows = [json.loads(line) for line in (two / "metrics.jsonl").read_text().splitlines()]
    halved = [
        {name: value if name == "step" else value / 2 for name, value in row.items()}
        for row in rows
    ]
    (two / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in halved))
    winners = {figure["metric"]: figure["winner"] for figure in gather([one, two])["figures"]}
    qualities = {"reward/mean": 0, "rollout/tokens_per_s": 0, "perf/train_tokens_per_s": 0}
    assert winners == dict.fromkeys(winners) | qualities
    assert {figure["winner"] for figure in gather([one])["figures"]} == {None}


def test_a_comparison_has_the_figures_of_the_single_pages_in_one_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [
        make_run(tmp_path / name, num_steps=100, num_ranks=1, sample_steps=[], seed=n)
        for n, name in enumerate("ab")
    ]
    alone = [json.loads(page_of(run).data)["runs"][0] for run in runs]
    assert main([*map(str, runs)]) == 0
    said = capsys.readouterr().out
    rewards = [run["figures"][0] for run in alone]
    shown = [rf"{reward['value']:.4g} ± {reward['error']:.2g}" for reward in rewards]
    assert re.search(rf"reward \(last fifth\) +{shown[0]} +{shown[1]} *\n", said)
    assert [run["num_latest"] for run in alone] == [20, 20]
    assert re.search(r"compared tokens \(total\) +512,000 +512,000 *\n", said)
    assert re.search(r"time per step \(median\) +[\d.]+ s +[\d.]+ s *\n", said)


def test_numbers_in_the_terminal_have_four_digits_and_separators() -> None:
    values = (None, 0, 5, 0.0078125, 999.96, 45431.4, 118_890.0, 3_008_405, -1234.5, 1.23456e-5)
    shown = "- 0 5 0.007812 1,000 45,431 118,890 3,008,405 -1,234 1.23e-05".split()
    assert list(map(as_number, values)) == shown


def test_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = make_run(tmp_path / "one", num_steps=20, num_ranks=1, settings="lr = 1e-4")
    two = make_run(tmp_path / "two", num_steps=10, num_ranks=1, settings="lr = 3e-4", seed=1)
    assert main([str(one), str(two)]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == str(tmp_path / "compare.html")
    assert re.search(r"lr\s+0\.0001\s+0\.0003", said)
    assert "model" not in said  # the same in both
    data = json.loads(Elements((tmp_path / "compare.html").read_text(encoding="utf-8")).data)
    assert [run["curves"]["num_steps"] for run in data["runs"]] == [20, 10]
    assert [key for key, _ in data["differences"]] == ["steps", "lr", "run.seed", "run.name"]


def test_paths_of_one_file_are_no_difference(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    for file in ("model", "reward.py", "other"):
        (tmp_path / "a" / file).write_text("")
    away = tmp_path / "a"
    one = {"model": "model", "data": "../a/model@[0:9]", "reward": "reward.py:f", "lr": "16"}
    same = {
        "model": f"{away}/model",
        "data": f"{away}/model@[0:9]",
        "reward": f"{away}/./reward.py:f",
        "lr": "16",
    }
    assert differences([one, same], [away, tmp_path / "b"]) == []
    other = {
        "model": f"{away}/other",
        "data": f"{away}/model@[0:8]",
        "reward": f"{away}/reward.py:g",
        "lr": "17",
    }
    assert [key for key, _ in differences([one, other], [away, away])] == [
        "model",
        "data",
        "reward",
        "lr",
    ]


def test_a_setting_only_one_run_has_differs_and_words_differ_from_numbers() -> None:
    assert differences([{"a": 1, "b": 2}, {"b": 2}]) == [("a", ["1", None])]
    assert differences([{"a": [1, 2]}, {"a": [1, 2]}, {"a": [1, 3]}]) == [
        ("a", ["[1, 2]", "[1, 2]", "[1, 3]"])
    ]


FACTS = {
    "command": "spmd-rl run grpo --model=m",
    "commit": "1234567890ab-dirty",
    "spmd_rl": "0.1.0",
    "spmd_rl_commit": "ba0987654321",
    "host": "node1",
    "machine": "AMD EPYC, 2 cores, 24 GiB",
    "torch": "2.12",
    "parameters": 154656,
}


def test_the_head_says_what_a_run_was_made_of(tmp_path: Path) -> None:
    settings = 'data = "train.jsonl"\nreward = "r.py:f"'
    run = make_run(tmp_path / "run", num_steps=1, num_ranks=1, settings=settings)
    assert gather([run])["runs"][0]["about"] == {
        "model": "models/tiny", "data": "train.jsonl", "reward": "r.py:f", "ranks": "4",
    }  # fmt: skip
    (run / "run.json").write_text(json.dumps(FACTS))
    followed = [
        {
            "digest": "x",
            "by": ["train on rank 0"],
            "facts": {"device": "cuda", "gpu": "H200", "torch": "2.13"},
        }
    ]
    (run / "contract.json").write_text(json.dumps({"train": followed}))
    assert gather([run])["runs"][0]["about"] == {
        "model": "models/tiny",
        "parameters": "154,656",
        "data": "train.jsonl",
        "reward": "r.py:f",
        "ranks": "4",
        "device": "H200",
        "host": "node1",
        "machine": "AMD EPYC, 2 cores, 24 GiB",
        "torch": "2.13",
        "spmd-rl": "0.1.0 (ba0987654321)",
        "commit": "1234567890ab-dirty",
        "command": "spmd-rl run grpo --model=m",
    }
    for content in ("[]", '{"train": 1}', '{"train": [1]}', '{"train": [{"facts": 1}]}'):
        (run / "contract.json").write_text(content)
        assert gather([run])["runs"][0]["about"]["torch"] == "2.12"


def test_runs_on_two_commits_differ_in_that(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, num_steps=1, num_ranks=1) for name in "ab"]
    for run, commit in zip(runs, ("1", "2"), strict=True):
        (run / "run.json").write_text(
            json.dumps(FACTS | {"commit": commit, "command": f"x{commit}"})
        )
    assert [key for key, _ in gather(runs)["differences"]] == ["run.name", "commit"]


WARMED: list[dict[str, Any]] = [
    {"step": 0, "unix_s": 1025.0, "time/warmup": 5.0, "warmup/loss": 2.0, "train/tokens": 100},
    {
        "step": 1,
        "unix_s": 1060.0,
        "time/step": 20.0,
        "before/all": 40.0,
        "before/warm-up": 5.0,
        "train/tokens": 10,
    },
    {"step": 2, "unix_s": 1120.0, "time/step": 60.0},
    {"step": 3, "unix_s": 1119.0, "time/step": 60.0, "train/tokens": 30},  # a clock was set back
]


def test_minutes_and_tokens_count_from_the_runs_beginning() -> None:
    drawn = figures.curves(WARMED)
    assert drawn["ends"]["minutes"] == pytest.approx([25 / 60, 1, 2, 2], abs=1e-4)
    assert drawn["ends"]["tokens"] == [100, 110, 110, 140]
    assert (drawn["num_steps"], drawn["first"]) == (3, [0, 1, 2, 3])
    assert sorted(drawn["columns"]) == ["time/step", "time/warmup", "train/tokens", "warmup/loss"]
    assert time_axes.wall_s(WARMED) == 119.0
    assert time_axes.seconds_before_step_1(WARMED) == {"all": 40.0, "warm-up": 5.0}
    assert figure_of(WARMED, "time/step") == 60.0
    assert figures.curves(WARMED, 2)["ends"]["tokens"] == [110, 140]


def test_axes_that_a_run_knows_nothing_of_are_left_out() -> None:
    assert figures.curves([{"step": 1, "a": 1.0}])["ends"] == {}
    assert list(figures.curves([{"step": 1, "unix_s": 1.0}])["ends"]) == ["minutes"]
    assert (
        time_axes.wall_s([{"step": 1, "unix_s": 5.0, "time/step": 2.0}, {"step": 2, "unix_s": 9.0}])
        == 6.0
    )
    assert time_axes.wall_s([]) is None


def test_page_and_picture_have_the_same_colours(tmp_path: Path) -> None:
    style = (PAGE / "style.css").read_text(encoding="utf-8")
    for colour in colours.NAMED.values():
        assert f"{colour.variable}: light-dark({colour.code}," in style
    run = make_run(tmp_path / "run", num_steps=2, num_ranks=1)
    data, rows = gather([run]), read_metrics(run / "metrics.jsonl")
    drawn = {line["metric"]: line["colour"] for chart in data["charts"] for line in chart["lines"]}
    assert data["phase_colours"]["rollout"] == drawn["time/rollout"] == PHASES["rollout"].variable
    panels = {axes.get_title("left"): axes for axes in curves.picture(rows, "").axes}
    assert panels["Entropy"].lines[0].get_color() == colours.CODES[drawn["train/entropy"]]
    script = "".join(path.read_text(encoding="utf-8") for path in PAGE.glob("panels.js"))
    assert not re.findall(r"--c[1-9]", script), "a colour of its own"


def test_every_metric_of_ours_has_a_chart_in_words(tmp_path: Path) -> None:
    unseen = {name for name in METRIC_OF_NAME if name.startswith("eval/")}  # one for each set
    unseen |= {"time/step", "reward/mean_error"}  # the top of a stack, and ± beside a number
    assert set(METRIC_OF_NAME) - PANEL_OF_METRIC.keys() == unseen
    assert all(
        metric.label and "/" not in metric.label and "_" not in metric.label for metric in METRICS
    )


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / place / "demo", num_steps=1, num_ranks=1) for place in ("a", "b")]
    assert [run["name"] for run in gather(runs)["runs"]] == ["a/demo", "b/demo"]
    assert [run["name"] for run in gather([runs[0], runs[0]])["runs"]] == [
        f"{runs[0]} (1)",
        f"{runs[0]} (2)",
    ]


def test_out_and_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", num_steps=1, num_ranks=1)
    assert main([str(run), "--out", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").is_file()
    assert not (run / "report.html").exists()
    assert main([]) == 2
    assert main(["--help"]) == 0
    assert main([str(run), "--nonsense"]) == 2
    assert "usage: spmd-rl report" in capsys.readouterr().out


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_steps=1, num_ranks=1)
    with pytest.raises(
        ConfigError, match="cannot be written .*nowhere.*name another file with --out"
    ):
        main([str(run), "--out", str(tmp_path / "nowhere" / "page.html")])


def test_what_is_no_run_or_does_not_parse_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        write_report([tmp_path])
    run = make_run(tmp_path / "run", num_steps=3, num_ranks=1)
    (run / "plan.json").write_text('{"step": 1\n')
    with pytest.raises(DataError, match=r"plan\.json: not valid JSON: cut off at column 10"):
        write_report([run])
    assert not (run / "report.html").exists()


def sample_line(**changed: Any) -> str:
    row = {
        "prompt_uid": 1,
        "index": 0,
        "prompt": "p",
        "text": "ab",
        "tokens": [1, 2],
        "logprobs": [-0.5, -1.0],
    }
    return json.dumps(row | changed) + "\n"


SAMPLES, NO_LINE = "samples/step_00001.jsonl", "1: not a line of samples"
TRACE, NO_SPAN = "traces/x.jsonl", "neither the header nor a span"
DEEP = "it is nested too deeply"
CRAFTED = {
    "a string log-prob": (SAMPLES, sample_line(logprobs=["x"]), NO_LINE),
    "nested versions": (SAMPLES, sample_line(versions=[[1]]), NO_LINE),
    "tokens that are none": (SAMPLES, sample_line(tokens=5), NO_LINE),
    "nested parts": (SAMPLES, sample_line(parts={"a": {}}), NO_LINE),
    "a deep sample": (SAMPLES, "[" * 100_000, f"1: not valid JSON: {DEEP}"),
    "a deep plan": ("plan.json", "[" * 100_000, f"not valid JSON: {DEEP}"),
    "a deep config": ("config.toml", "a = " + "[" * 100_000, f"not valid TOML: {DEEP}"),
    "a span without times": (TRACE, '["a", "b", "c", "d", {}]\n', NO_SPAN),
    "a span without arguments": (TRACE, '["step", 1, 1, "main", 5]\n', NO_SPAN),
}


@pytest.mark.parametrize("case", CRAFTED)
def test_a_crafted_file_ends_with_a_sentence(tmp_path: Path, case: str) -> None:
    file, content, said = CRAFTED[case]
    run = make_run(tmp_path / "run", num_steps=1, num_ranks=1)
    (run / file).write_text(content)
    with pytest.raises(DataError, match=said):
        write_report([run])


def test_a_crafted_trace_json_ends_with_a_sentence(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_steps=1, num_ranks=1)
    for path in (run / "traces").iterdir():
        path.unlink()
    for content in (
        "[]",
        "{}",
        '{"otherData": {"began_unix_s": 1e999}, "traceEvents": []}',
        "[" * 100_000,
    ):
        (run / "trace.json").write_text(content)
        with pytest.raises(DataError, match=r"trace\.json: not "):
            write_report([run])


def test_numbers_without_end_are_none_in_the_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_steps=1, num_ranks=1)
    (run / "metrics.jsonl").write_text('{"step": 1, "train/loss": 1e999, "reward/mean": 0.5}\n')
    (run / "plan.json").write_text('{"bytes": 1e999}')
    line = (
        sample_line(reward=7.5, parts={"a": 7.5}).replace("7.5", "1e999").replace("-0.5", "-1e999")
    )
    (run / "samples/step_00001.jsonl").write_text(line)
    shown = json.loads(page_of(run).data)["runs"][0]
    assert list(shown["curves"]["columns"]) == ["reward/mean"]
    assert shown["plan"] == {"bytes": "1e999"}
    sample = shown["samples"]["steps"][0]["groups"][0]["samples"][0]
    assert (sample["reward"], sample["parts"], sample["logprobs"]) == (
        None,
        {"a": None},
        [None, -1.0],
    )


def test_a_page_of_ten_thousand_steps_stays_small(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_steps=10_000, num_ranks=8)
    assert write_report([run]).stat().st_size < 2_000_000


def test_the_facts_name_the_trainer_and_its_layers(tmp_path: Path) -> None:
    kind = "trainer.backend.kind"
    layers = {kind: "megatron", "trainer.backend.layers": "local"}
    assert about(tmp_path, layers, None, {})["trainer"] == "megatron, local layers"
    assert about(tmp_path, {kind: "fsdp2"}, None, {}) == {"trainer": "fsdp2"}
    assert "trainer" not in about(tmp_path, {}, None, {})


def test_the_head_names_mixtures_and_what_is_trained(tmp_path: Path) -> None:
    mixture = {"data.a.jsonl": 3, "data.b.jsonl": 1, "reward.m:f": 1.0}
    known = about(tmp_path, mixture, None, {})
    assert known == {"data": "a.jsonl: 3, b.jsonl: 1", "reward": "m:f: 1.0"}
    adapters = {"trainer.lora.rank": 8}
    assert about(tmp_path, adapters, None, {"trained_parameters": 29184})["trained"] == (
        "29,184 parameters, LoRA of rank 8"
    )
    frozen = about(tmp_path, {"trainer.lora.rank": 0}, None, {"trained_parameters": 100})
    assert frozen["trained"] == "100 parameters"
    assert "trained" not in about(tmp_path, {"trainer.lora.rank": 0}, None, {})
