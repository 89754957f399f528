"""docs/combinations.md is what its generator makes of the rows that runs are checked by."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from types import ModuleType, SimpleNamespace

from docs.build_combinations import PAGE, page
from spmd_rl.config.combinations import ON, Combination
from spmd_rl.plan.combinations import Section, sections
from tests.laws.source import imports, package_modules

TEXT = PAGE.read_text(encoding="utf-8")
ROW = "spmd_rl.config.combinations.Combination"
PLANTED = Combination({"a.b": ON, "c": ON}, "{0.key} goes alone")


def unlisted(
    modules: Iterable[ModuleType | SimpleNamespace], listed: Iterable[Section]
) -> list[str]:
    """Return the sentences of the rows in these modules that no section has."""
    known = [row for section in listed for row in section.rows]
    rows = [
        row
        for module in modules
        for value in vars(module).values()
        for row in (value if isinstance(value, tuple) else (value,))
        if isinstance(row, Combination)
    ]
    return [row.sentence for row in rows if row not in known]


def test_the_page_is_what_the_rows_say() -> None:
    assert page(sections()) == TEXT, "run `python -m docs.build_combinations`"


def test_another_row_makes_another_page() -> None:
    text = page([*sections(), Section("Planted", (PLANTED,))])
    assert text.startswith(TEXT)
    assert "\n## Planted\n" in text
    assert "| `a.b` set, `c` set | a.b goes alone |" in text


def test_all_rows_of_the_package_are_on_the_page() -> None:
    with_rows = [
        module.name
        for module in package_modules()
        if any(item.target == ROW for item in imports(module))
    ]
    assert len(with_rows) >= 10
    assert unlisted(map(import_module, with_rows), sections()) == []


def test_a_row_that_no_section_has_is_seen() -> None:
    planted = [SimpleNamespace(ROWS=(PLANTED,)), SimpleNamespace(ALONE=PLANTED)]
    assert unlisted(planted, sections()) == [PLANTED.sentence] * 2
    assert unlisted(planted, [Section("Planted", (PLANTED,))]) == []
