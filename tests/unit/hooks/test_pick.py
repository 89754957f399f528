"""The user's function that weights sources: what is told of one that fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from spmd_rl.errors import DataError, SpmdError
from spmd_rl.hooks.controller_hooks import pick_of


def written(folder: Path, body: str) -> str:
    (folder / "curriculum.py").write_text(
        f"from spmd_rl.errors import DataError\n\n\ndef pick(step, sources):\n    {body}\n"
    )
    return f"{folder / 'curriculum.py'}:pick"


def test_weights_are_returned(tmp_path: Path) -> None:
    assert pick_of(written(tmp_path, "return {sources[step]: 1.0}"))(1, ["a", "b"]) == {"b": 1.0}


def test_a_failing_pick_is_named_with_its_line(tmp_path: Path) -> None:
    pick = pick_of(written(tmp_path, "return {}[step]"))
    with pytest.raises(
        SpmdError, match=r"curriculum.py:pick, for step 8: raised KeyError: 7 \(at curriculum.py:5"
    ):
        pick(7, [])


def test_its_own_sentence_stays(tmp_path: Path) -> None:
    pick = pick_of(written(tmp_path, "raise DataError('levels.csv', 'no level 9')"))
    with pytest.raises(DataError, match=r"^levels.csv: no level 9$"):
        pick(0, [])


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_end_of_the_process_is_no_failure(tmp_path: Path, error: type[BaseException]) -> None:
    pick = pick_of(written(tmp_path, f"raise {error.__name__}"))
    with pytest.raises(error):
        pick(0, [])
