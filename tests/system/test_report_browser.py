"""Report page in a real browser: it is drawn, usable, without console messages or requests."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from spmd_rl.observe.run_folder import RunFolder
from spmd_rl.report import write_report
from spmd_rl.types.groups import Group
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample
from tests.system.browser import Browser, chromium, missing_programs
from tests.unit.report.synthetic import HOSTILE, make_run

pytestmark = pytest.mark.system

CHOSEN = "return document.querySelector('#samples select[aria-label=%s]').value"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if missing := missing_programs():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(
            f"{' and '.join(missing)} not installed"
        )
    with chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "demo", tokenizer=True)


def opened(browser: Browser, *runs: Path) -> Path:
    """Open the report of the runs, and discard earlier logs."""
    page = write_report(runs)
    browser.errors()
    browser.requests()
    browser.resize(1400, 1000)
    browser.open(page)
    return page


def check_quiet(browser: Browser, page: Path) -> None:
    assert browser.errors() == []
    assert browser.requests() == [page.resolve().as_uri()]


def curve(browser: Browser, metric: str) -> list[list[float]]:
    """Return the points of each line in the chart of `metric`, in pixels."""
    paths = browser.each(f"[data-metrics~='{metric}'] path.curve", "e.getAttribute('d')")
    return [[float(word) for word in re.findall(r"[ML ]([-\d.]+)", path)] for path in paths]


def test_curves_are_drawn(browser: Browser, demo: Path) -> None:
    page = opened(browser, demo)
    titles = browser.each(".chart .title")
    assert {"Reward", "Response length", "Entropy", "Clip fraction"} <= set(titles)
    assert {"Time per step", "Speed", "Device memory", "eval/gsm8k"} <= set(titles)
    assert not {"Mismatched tokens", "Trainer vs engine"} & set(titles)
    (constant,) = browser.each(".constant")
    assert "mismatched tokens 0 · trainer vs engine 0" in constant
    assert "tokens per step 5,120" in constant
    (mean,) = curve(browser, "reward/mean")
    solve_all, solve_none = curve(browser, "reward/solve_none")
    assert len(mean) == 2 * 120
    assert mean[0::2] == sorted(mean[0::2])  # steps go to the right
    assert mean[1] > mean[-1]  # reward grows, and the axis goes up
    assert solve_none[1] < solve_none[-1]
    assert len(solve_all) == 2 * 120
    # five phases and the rest
    assert len(browser.each("[data-metrics~='time/rollout'] svg g path")) == 6
    sides = browser.each(".chart svg", "[e.clientWidth, e.clientHeight]")
    assert all(width > 200 and height > 100 for width, height in sides)
    check_quiet(browser, page)


def test_every_chart_reads_out_the_step_under_the_pointer(browser: Browser, demo: Path) -> None:
    page = opened(browser, demo)
    browser.drag("[data-metrics~='reward/mean'] svg", (-60, 0), (-30, 0), press=False)
    browser.run(
        "return new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))"
    )
    steps = set(browser.each(".chart .at"))
    assert len(steps) == 1
    step = int(steps.pop().removeprefix("step "))
    assert 20 < step < 80
    [shown] = browser.each("[data-metrics~='train/entropy'] .legend b")
    data = json.loads(browser.each("#data")[0])
    values = data["runs"][0]["curves"]["columns"]["train/entropy"]["mean"]
    assert float(shown) == pytest.approx(values[step - 1], rel=1e-3)
    check_quiet(browser, page)


ACROSS = """
const choice = document.querySelector("select[aria-label='x axis']");
choice.value = arguments[0];
choice.dispatchEvent(new Event("change"));
"""


def warmed(folder: Path) -> Path:
    """Write a run with a warm-up of ten steps of a minute each, and ten tokens in every step."""
    run = make_run(folder, num_steps=20)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    early = [
        {"step": step, "unix_s": 60.0 * (step + 10), "warmup/loss": -step, "time/warmup": 60.0}
        for step in range(-9, 1)
    ]
    late = [row | {"unix_s": 600.0 + 60 * row["step"], "time/step": 60.0} for row in rows]
    late[0] |= {"before/all": 600.0, "before/warm-up": 590.0}
    lines = [json.dumps(row | {"train/tokens": 10}) + "\n" for row in early + late]
    (run / "metrics.jsonl").write_text("".join(lines))
    return run


def ticks(browser: Browser, metric: str) -> list[float]:
    return [float(text) for text in browser.each(f"[data-metrics~='{metric}'] text.tick")]


def test_the_charts_have_steps_minutes_or_tokens_across(browser: Browser, tmp_path: Path) -> None:
    page = opened(browser, warmed(tmp_path / "run"))
    assert browser.each("select[aria-label='x axis'] option") == [
        "steps",
        "wall-clock minutes",
        "trained tokens",
    ]
    assert (
        "20 steps · in 30 min 0 s (10 min 0 s of it before step 1, with 9 min 50 s of warm-up)"
        in (browser.each(".sub")[0])
    )
    assert (min(ticks(browser, "reward/mean")), max(ticks(browser, "reward/mean"))) == (5, 20)
    assert max(ticks(browser, "warmup/loss")) <= 0
    assert browser.each("[data-metrics~='reward/mean'] .xlabel") == ["step"]
    assert browser.each("[data-metrics~='warmup/loss'] .xlabel") == [
        "step of the warm-up, which ends at 0"
    ]
    left = curve(browser, "reward/mean")[0][0]
    browser.run(ACROSS, "minutes")
    for metric in ("reward/mean", "warmup/loss"):  # from the beginning of the run to its end
        assert (ticks(browser, metric)[0], ticks(browser, metric)[-1]) == (0, 30)
    assert curve(browser, "reward/mean")[0][0] > left + 50, "what came before step 1 has its place"
    browser.drag("[data-metrics~='reward/mean'] svg", (100, 0), (101, 0), press=False)
    browser.run(
        "return new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))"
    )
    [at] = browser.each("[data-metrics~='reward/mean'] .at")
    step, _, minutes = at.removeprefix("step ").removesuffix(" min").partition(" · ")
    assert float(minutes) == 10 + int(step)
    # a click selects that step
    browser.drag("[data-metrics~='reward/mean'] svg", (100, 0), (100, 0))
    assert int(browser.run(CHOSEN % "step")) == min(
        (1, 10, 20), key=lambda kept: abs(kept - int(step))
    )
    browser.drag("[data-metrics~='reward/mean'] svg", (-20, 0), (100, 0))
    assert ticks(browser, "reward/mean")[0] > 5
    browser.run(ACROSS, "tokens")
    assert (ticks(browser, "reward/mean")[0], ticks(browser, "reward/mean")[-1]) == (0, 300)
    check_quiet(browser, page)


def test_an_axis_that_a_run_has_no_values_for_is_not_offered(
    browser: Browser, demo: Path, tmp_path: Path
) -> None:
    opened(browser, demo, warmed(tmp_path / "run"))
    assert browser.each("select[aria-label='x axis'] option") == ["steps", "wall-clock minutes"]


def test_the_head_says_what_the_run_was_made_of(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_steps=2)
    (run / "run.json").write_text(
        json.dumps({"command": HOSTILE, "commit": "12ab", "parameters": 154656})
    )
    page = opened(browser, run)
    assert browser.each(".facts dt") == ["model", "parameters", "ranks", "commit", "command"]
    assert browser.each(".facts dd") == ["models/tiny", "154,656", "4", "12ab", HOSTILE]
    check_quiet(browser, page)


def test_links_lead_to_what_is_there(browser: Browser, demo: Path, tmp_path: Path) -> None:
    opened(browser, demo)
    assert browser.each("nav a", "e.hash") == ["#curves", "#timeline", "#samples", "#settings"]
    bare = make_run(tmp_path / "bare", num_steps=2, sample_steps=[])
    for path in (bare / "traces").iterdir():
        path.unlink()
    opened(browser, bare)
    assert browser.each("nav a", "e.hash") == ["#curves", "#settings"]


def last_tick(browser: Browser) -> int:
    return max(map(int, browser.each("[data-metrics~='train/loss'] text.tick")))


def test_each_line_of_a_chart_has_its_own_colour(browser: Browser, tmp_path: Path) -> None:
    """The colours that the browser computes, in the light and the dark scheme."""
    names = ("dpo/margin", "dpo/chosen_reward", "dpo/rejected_reward", "train/kl", "train/ppo_kl")
    rows = [
        {"step": step} | {name: i * step for i, name in enumerate(names)} for step in range(1, 9)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    opened(browser, tmp_path)
    for scheme in ("light", "dark"):
        browser.emulate(scheme)
        for metric, count in (("dpo/margin", 3), ("train/kl", 2)):
            chart = f"[data-metrics~='{metric}']"
            colours = browser.each(f"{chart} path.curve", "getComputedStyle(e).stroke")
            keys = browser.each(f"{chart} .key", "getComputedStyle(e, '::before').backgroundColor")
            assert len(colours) == len(set(colours)) == count
            assert keys == colours
    browser.emulate("light")


FIRST_SCREEN = "e.getBoundingClientRect().bottom <= innerHeight"


def troubled(folder: Path) -> Path:
    """Write a run that rose and fell, with a long chat prompt, long names and every warning."""
    run = make_run(folder, num_steps=40, num_ranks=1, text="<|im_start|>user\n" + 90 * "how? ")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        step = row["step"]
        row |= {"reward/mean": 0.9 if 10 < step < 20 else 0.1, "reward/mean_error": 0.01}
        row |= {"rollout/truncated": 0.5, "reward/solve_none": 0.75, "train/kl": step / 10}
        row |= {f"reward/{'a_long_name_' * 5}{i}": step / (9 + i) for i in range(3)}
        score = {10: 0.2, 20: 0.8, 40: 0.4}.get(step)
        if score:
            row |= {"eval/held_out/reward": score, "eval/held_out/reward_error": 0.02}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def test_the_first_screen_says_what_improved_what_did_not_and_what_to_do(
    browser: Browser, tmp_path: Path
) -> None:
    page = opened(browser, troubled(tmp_path / "run"))
    browser.resize(1400, 900)
    assert browser.each(".finding h2") == ["What improved", "What did not", "What to do next"]
    assert all(browser.each(".finding li", FIRST_SCREEN))
    (improved,) = browser.each(".finding:first-child li")
    assert "it rose; down from its best, 0.800 ± 0.02 at step 20" in improved
    assert "taught nothing" in "".join(browser.each(".finding:nth-child(2) li"))
    assert "sampling.max_tokens" in "".join(browser.each(".finding:nth-child(3) li"))
    check_quiet(browser, page)


WIDE = """
const scrolled = (e) => e.closest('.scroll, .timeline, .settings, .notes, svg, .text');
return [...document.body.querySelectorAll('*')]
    .filter((e) => e.getBoundingClientRect().right > innerWidth + 1 && !scrolled(e))
    .map((e) => `${e.tagName}.${e.className}`);
"""


@pytest.mark.parametrize("several", [False, True])
def test_a_phone_shows_the_whole_width(browser: Browser, tmp_path: Path, several: bool) -> None:
    runs = [troubled(tmp_path / "a_run_with_quite_a_long_name")]
    runs += [troubled(tmp_path / "another_run_with_a_longer_name_still")] if several else []
    page = opened(browser, *runs)
    browser.emulate_width(420, 900)
    try:
        browser.open(page)
        assert browser.run("return innerWidth") == 420
        assert browser.run("return document.documentElement.scrollWidth") <= 420
        assert browser.run(WIDE) == []
        links = browser.each("nav a", "[e.textContent, e.getBoundingClientRect().width > 0]")
        assert links == [["Curves", True], ["Timeline", True], ["Samples", True], ["Config", True]]
        if not several:
            check_folded(browser)
    finally:
        browser.end_emulation()


def check_folded(browser: Browser) -> None:
    shown = "return [...document.querySelectorAll('.chart')].filter((e) => e.clientHeight).length"
    height = browser.run("return document.body.scrollHeight")
    assert browser.run(shown) == 6
    browser.click(".more")
    assert browser.run(shown) == len(browser.each(".chart")) > 6
    assert browser.run("return document.body.scrollHeight") > height
    assert height < 10_000


def test_legends_are_whole(browser: Browser, tmp_path: Path) -> None:
    opened(browser, troubled(tmp_path / "run"))
    for width in (1400, 700):
        browser.resize(width, 900)
        cut = browser.each(
            ".legend .key > span", "e.scrollWidth > e.clientWidth + 1 ? e.textContent : ''"
        )
        assert not any(cut)


def test_nothing_is_smoothed_unless_asked_and_no_peak_decays(
    browser: Browser, tmp_path: Path
) -> None:
    rows = [{"step": step, "train/tokens": 1000, "x": 0.0} for step in range(-49, 101)]
    for row in rows[50:]:
        row |= {"train/tokens": 4000, "x": 1.0 if row["step"] == 50 else 0.0}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    opened(browser, tmp_path)
    (raw,) = curve(browser, "train/tokens")
    assert len(set(raw[1::2])) == 2, "1,000 to step 0 and 4,000 from step 1 on"
    (spike,) = curve(browser, "x")
    assert len(set(spike[1::2])) == 2
    browser.run(
        """
        const slider = document.querySelector("input[type=range]");
        slider.value = 5;
        slider.dispatchEvent(new Event("input"));
        """
    )
    (smooth,) = curve(browser, "train/tokens")
    assert smooth == raw, "the warm-up is no neighbour of step 1"
    (spread,) = curve(browser, "x")
    raised = [i for i, y in enumerate(spread[1::2]) if y != spread[1]]
    peak = spike[1::2].index(min(spike[1::2]))
    assert raised == list(range(peak - 5, peak + 6)), "as much before a peak as after it"


def test_settings_that_were_set_stand_before_all(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_steps=2, settings="lr = 3e-4")
    (run / "run.json").write_text(json.dumps({"defaults": {"lr": 1e-6, "model": None}}))
    opened(browser, run)
    first = browser.each(".settings > table tbody tr", "e.innerText.replaceAll('\\t', ' ')")
    assert first == ["model models/tiny –", "lr 0.0003 1e-06"]
    everything = browser.each(".settings details tr[data-key] th")
    assert {"steps", "lr", "run.seed"} <= set(everything)
    marked = browser.each(".settings details tr.set th")
    assert marked == ["model", "lr"]
    assert not browser.each(".settings", "e.scrollHeight > e.clientHeight + 1")[0]


def test_dragging_zooms_all_charts_and_a_button_ends_it(browser: Browser, demo: Path) -> None:
    opened(browser, demo)
    assert last_tick(browser) == 100
    browser.drag("[data-metrics~='reward/mean'] svg", (-100, 0), (-20, 0))
    assert last_tick(browser) < 70
    browser.click("#curves .tools button")
    assert last_tick(browser) == 100


def test_samples_are_read_side_by_side(browser: Browser, demo: Path) -> None:
    page = opened(browser, demo)
    assert browser.run(CHOSEN % "step") == "120"
    answers = browser.each("#samples .answer .text")
    assert len(answers) == 8
    first_prompt = browser.each("#samples .ask .text")[0]
    browser.click("#samples [aria-label='next prompt']")
    assert browser.run(CHOSEN % "prompt") == "1"
    assert browser.each("#samples .ask .text")[0] != first_prompt
    browser.click("#samples [aria-label='previous step']")
    assert browser.run(CHOSEN % "step") == "60"
    assert browser.each("#samples .answer .text") != answers
    browser.click("#samples .overview button:nth-child(4)")
    assert browser.run(CHOSEN % "prompt") == "3"
    browser.click("#samples [aria-label='next order']")
    rewards = [
        float(text.removeprefix("reward ")) for text in browser.each("#samples .badge.reward")
    ]
    assert len(rewards) == 8
    assert rewards == sorted(rewards, reverse=True)
    check_quiet(browser, page)


def test_tokens_are_coloured_by_how_unlikely_they_were(browser: Browser, demo: Path) -> None:
    opened(browser, demo)
    tokens = browser.each(
        "#samples .answer .t", "[e.dataset.about, getComputedStyle(e).backgroundColor]"
    )
    by_logprob = sorted(
        (float(about.split("log-prob ")[1].split("\n")[0]), opacity(colour))
        for about, colour in tokens
    )
    assert len(by_logprob) > 100
    assert by_logprob[0][1] > 0.1 > by_logprob[-1][1]
    assert all(a >= b - 0.02 for (_, a), (_, b) in pairwise(by_logprob))


def opacity(colour: str) -> float:
    """Parse a computed colour: `rgba(1, 2, 3, 0.5)` or `color(srgb 0.1 0.2 0.3 / 0.5)`."""
    inside = colour.partition("(")[2].rstrip(")")
    if "/" in inside:
        return float(inside.rpartition("/")[2])
    numbers = inside.split(",")
    return float(numbers[3]) if len(numbers) == 4 else 1.0


def test_a_click_on_a_curve_goes_to_that_steps_samples_and_timeline(
    browser: Browser, demo: Path
) -> None:
    opened(browser, demo)
    browser.drag("[data-metrics~='reward/mean'] svg", (-150, 0), (-150, 0))
    assert browser.run(CHOSEN % "step") == "1"
    assert (
        int(
            browser.run(
                "const select = document.querySelector('#timeline select');"
                "return select.options[select.selectedIndex].text"
            )
        )
        < 20
    )


def test_the_timeline_draws_every_rank(browser: Browser, demo: Path) -> None:
    page = opened(browser, demo)
    colours = browser.run(
        """
        const canvas = document.querySelector('#timeline canvas');
        const pen = canvas.getContext('2d'), seen = {};
        const pixels = pen.getImageData(0, 0, canvas.width, canvas.height).data;
        for (let i = 0; i < pixels.length; i += 4) {
            const name = [...pixels.slice(i, i + 4)].join();
            seen[name] = (seen[name] || 0) + 1;
        }
        return Object.values(seen).filter((count) => count > 2000).length;
        """
    )
    assert colours >= 4  # background, rollout, train, step
    browser.drag("#timeline canvas", (-60, 0), (-50, 0), press=False)
    assert browser.each("#timeline .tip b")[0].endswith("ms")
    assert "rank " in browser.each("#timeline .tip span")[0]
    before = browser.run("return document.querySelector('#timeline canvas').toDataURL()")
    browser.drag("#timeline canvas", (-100, 0), (100, 0))
    assert browser.run("return document.querySelector('#timeline canvas').toDataURL()") != before
    check_quiet(browser, page)


def test_hostile_samples_are_text(browser: Browser, tmp_path: Path) -> None:
    page = opened(browser, make_run(tmp_path / "hostile", num_steps=3, num_ranks=1, text=HOSTILE))
    assert browser.run("return document.title") == "hostile"
    assert browser.run("return document.images.length") == 0
    assert HOSTILE in browser.each("#samples .ask .text")
    assert HOSTILE in browser.each("#samples .answer .text")
    check_quiet(browser, page)


def test_a_conversation_is_a_tree_of_text(browser: Browser, tmp_path: Path) -> None:
    """Who said what, whether it is learned, and by which weights; the prompt is said above."""
    run = RunFolder.open(tmp_path / "talk", "", {})
    tokens, versions = np.array([5, 6, 7], np.int32), np.array([2, -1, 3], np.int32)
    said = [{"role": role, "content": HOSTILE} for role in ("assistant", HOSTILE, "assistant")]
    sample = Sample(0, 0, tokens, np.zeros(3, np.float32), versions, "completed", execution=1)
    talk = sample.replace(metadata={"messages": said, "agent": HOSTILE})
    branch = sample.replace(index=1, context=np.array([1, 5, 6], np.int32), mask=tokens < 0)
    group = Group(Prompt(0, np.array([1], np.int32)), [talk, branch])
    run.write_samples(1, [group])
    page = opened(browser, run.path)
    assert browser.run("return document.title") == "talk"
    assert browser.each(".conversation > summary") == ["conversation of episode 1: samples #0, #1"]
    roles = ["assistant", HOSTILE, "assistant", "assistant", "tool", "assistant"]
    assert browser.each(".conversation .badge") == roles
    assert browser.each(".conversation .more")[:2] == [
        f"{HOSTILE} · 1 token, learned · version 2",
        f"{HOSTILE} · 1 token, not learned",
    ]
    assert browser.each(".conversation .more")[3] == "1 token, drawn, not learned · version 2"
    assert browser.each(".conversation .text")[:3] == [HOSTILE] * 3
    labels = ["branch 1 of 2: sample #0", "branch 2 of 2: sample #1"]
    assert browser.each(".conversation .branch > .label") == labels
    assert browser.run("return document.images.length") == 0
    check_quiet(browser, page)


def test_the_pages_policy_stops_what_gets_in_all_the_same(browser: Browser, demo: Path) -> None:
    """Negative control: a script and a request from the page are seen and refused."""
    opened(browser, demo)
    browser.run(
        """
        const script = document.createElement('script');
        script.textContent = "document.title = 'owned'";
        document.body.append(script);
        const image = document.createElement('img');
        image.src = 'http://127.0.0.1:9/x.png';
        document.body.append(image);
        """
    )
    assert browser.run("return document.title") == "demo"
    errors = browser.errors()
    assert sum("Content Security Policy" in error for error in errors) == 2, errors


def test_runs_are_overlaid(browser: Browser, demo: Path) -> None:
    other = make_run(demo.parent / "other", num_steps=60, num_ranks=2, seed=1, settings="lr = 3e-4")
    page = opened(browser, demo, other)
    lines = curve(browser, "reward/mean")
    assert [len(line) // 2 for line in lines] == [120, 60]
    assert lines[1][-2] < lines[0][-2]  # half the steps end half way
    assert "lr" in browser.each("tr.differs th")
    browser.click(".runs button:nth-child(2)")
    assert len(curve(browser, "reward/mean")) == 1
    browser.click("#samples [aria-label='next run']")
    assert browser.run(CHOSEN % "step") == "60"
    check_quiet(browser, page)


@pytest.mark.parametrize("num_steps", [1, 10_000])
def test_short_and_long_runs(browser: Browser, tmp_path: Path, num_steps: int) -> None:
    page = opened(browser, make_run(tmp_path / "run", num_steps=num_steps, num_ranks=2))
    assert len(curve(browser, "train/loss")[0]) == 2 * min(num_steps, 600)
    assert browser.each("#samples .answer .text")
    check_quiet(browser, page)


def test_cards_hold_large_numbers_and_claim_nothing_without_a_comparison(
    browser: Browser, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", num_steps=60)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    changed = {"onpolicy/compared_tokens": 0, "rollout/tokens_per_s": 3008405}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row | changed) + "\n" for row in rows))
    opened(browser, run)
    assert not any(browser.each(".figure .value", "e.scrollWidth > e.clientWidth"))
    assert "no tokens compared" in browser.each(".figure .how")
    assert not browser.each(".figure .good, .figure .bad")


def test_a_run_folder_with_a_config_only(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("steps = 3\n")
    page = opened(browser, tmp_path)
    assert len(browser.each(".empty")) == 3
    assert "steps" in browser.each("#settings th")
    check_quiet(browser, page)


def test_light_and_dark(browser: Browser, demo: Path) -> None:
    page = opened(browser, demo)
    background = "return getComputedStyle(document.body).backgroundColor"
    browser.emulate("light")
    light = browser.run(background)
    browser.emulate("dark")
    assert browser.run(background) != light
    browser.click("nav button")  # from automatic to light
    assert browser.run(background) == light
    browser.emulate("light")
    check_quiet(browser, page)
