"""What is shipped beside the package stays true: every TOML fits its recipe, every path in the
README exists.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import pytest

from spmd_rl.config.load import load
from spmd_rl.controller.run.recipe import shipped_recipes
from spmd_rl.errors import ConfigError
from spmd_rl.recipes import grpo
from tests.laws.source import ROOT

EXAMPLE_CONFIGS = sorted(path for path in (ROOT / "examples").rglob("*.toml"))
README = ROOT / "README.md"
_LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")


TOUR, TOURS_PAGE = ROOT / "examples/own_recipe/tour.py", ROOT / "docs/recipes.md"
NOTES = ROOT / "docs/lab-notes"
MAX_README_LINES = 120
FIRST_JOB = ROOT / "docs/first-job.md"
_TOML = re.compile(r"^```toml\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def foreign_snippets(page: str, source: str) -> list[str]:
    """Python on a page that is no run of whole lines of the source."""
    return [snippet for snippet in _SNIPPET.findall(page) if f"\n{snippet}" not in source]


def recipe_of(config: Path) -> ModuleType:
    """The recipe.py in the folder of an example's TOML, else the shipped recipe that a command in
    the TOML runs with it, or else the one of its name.
    """
    path = config.parent / "recipe.py"
    if not path.exists():
        own = re.escape(config.relative_to(ROOT).as_posix())
        said = re.search(rf"spmd-rl run (\S+) --config {own}", config.read_text(encoding="utf-8"))
        name = said[1] if said else config.stem
        if not name.endswith(".py"):
            return importlib.import_module(f"spmd_rl.recipes.{name}")
        path = ROOT / name
    spec = importlib.util.spec_from_file_location(f"shipped_{path.parent.name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look up the types of their fields
    spec.loader.exec_module(module)
    return module


def missing_links(page: Path) -> list[str]:
    return [
        link
        for link in _LINK.findall(page.read_text(encoding="utf-8"))
        if not (page.parent / link).exists()
    ]


@pytest.mark.parametrize("config", EXAMPLE_CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_config_fits_its_recipe(config: Path) -> None:
    assert load(recipe_of(config).Config, config)


@pytest.mark.parametrize("config", EXAMPLE_CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_stale_key_is_seen(config: Path) -> None:
    with pytest.raises(ConfigError, match="no_such_key"):
        load(recipe_of(config).Config, config, ["no_such_key=1"])


def test_most_recipes_have_an_example() -> None:
    """Each shipped recipe has a TOML of its name, but for GRPO: its example is a recipe itself."""
    shipped = set(shipped_recipes())
    examples = {path.stem for path in (ROOT / "examples/recipes").glob("*.toml")}
    assert shipped - examples <= {"grpo", "grpo_async"}
    assert examples <= shipped


def test_the_settings_of_the_first_job_fit_the_recipe(tmp_path: Path) -> None:
    (settings,) = _TOML.findall(FIRST_JOB.read_text(encoding="utf-8"))
    path = tmp_path / "job.toml"
    path.write_text(settings)
    cfg = load(grpo.Config, path)
    assert (cfg.prompts.prompt_key, cfg.sampling.num_samples) == ("question", 8)


@pytest.mark.parametrize(
    "page",
    [README, *sorted(ROOT.glob("docs/**/*.md")), *ROOT.glob("C*.md")],
    ids=str,
)
def test_links_lead_somewhere(page: Path) -> None:
    assert missing_links(page) == []


def unlisted(readme: str, pages: Iterable[Path]) -> list[str]:
    """Pages that README does not link to."""
    return [page.name for page in pages if f"](docs/{page.name})" not in readme]


def test_readme_lists_every_page() -> None:
    pages = sorted(ROOT.glob("docs/*.md"))
    assert len(pages) > 10
    assert unlisted(README.read_text(encoding="utf-8"), pages) == []


def test_readme_fits_on_two_screens() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= MAX_README_LINES


def test_the_lab_notes_are_all_listed() -> None:
    index = (NOTES / "README.md").read_text(encoding="utf-8")
    names = {page.name for page in NOTES.glob("*.md")} - {"README.md"}
    assert {name for name in names if f"]({name})" not in index} == set()
    assert set(re.findall(r"\]\((\d{4}[^)]*)\)", index)) == names


def test_an_unlisted_page_is_seen() -> None:
    assert unlisted("[wire](docs/wire.md)", [Path("docs/wire.md"), Path("docs/plan.md")]) == [
        "plan.md"
    ]


def test_a_dead_link_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("[here](page.md) and [gone](gone.md) and [web](https://x.org)")
    assert missing_links(page) == ["gone.md"]


def test_the_page_on_recipes_shows_one_that_runs() -> None:
    page = TOURS_PAGE.read_text(encoding="utf-8")
    assert len(_SNIPPET.findall(page)) > 10
    assert foreign_snippets(page, TOUR.read_text(encoding="utf-8")) == []


def test_a_stale_snippet_is_seen() -> None:
    page = "```python\n    x = 1\n```\nor\n```python\nx = 1\n```\n"
    assert foreign_snippets(page, "def f():\n    x = 1\n") == ["x = 1\n"]
