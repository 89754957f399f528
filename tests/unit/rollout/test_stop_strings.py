"""Stop strings: found at the same token whatever the token boundaries, characters of several bytes
included.
"""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from spmd_rl.rollout.native.stop_strings import StopStringMatcher


def byte_text(tokens: tuple[int, ...]) -> str:
    """One token a byte, as byte-level tokenizers fall back to."""
    return bytes(tokens).decode("utf-8", errors="replace")


def first_stop(stops: list[str], tokens: list[int], decode) -> int | None:
    watch = StopStringMatcher(stops, decode)
    return next((order for order, token in enumerate(tokens) if watch.push(token)), None)


@given(
    text=st.text(alphabet="ab<é中🙂", max_size=20),
    stop=st.text(alphabet="ab<é中🙂", min_size=1, max_size=4),
)
def test_the_first_token_that_completes_the_string_is_found(text, stop):
    tokens = list(text.encode())
    whole = [byte_text(tuple(tokens[: n + 1])) for n in range(len(tokens))]
    expected = next((n for n, so_far in enumerate(whole) if stop in so_far), None)
    assert first_stop([stop], tokens, byte_text) == expected


CHARACTERS = st.sampled_from("ab<é中🙂").map(str.encode)
UNDECODABLE = st.tuples(st.sampled_from([b"\xff", b"\xe4", b"\x80"]), st.integers(1, 40)).map(
    lambda run: run[0] * run[1]
)


@given(
    pieces=st.lists(CHARACTERS | UNDECODABLE, max_size=12),
    stop=st.text("ab<é中🙂", min_size=1, max_size=2),
)
@example(pieces=[b"\xff" * 15, "中".encode(), "é".encode()], stop="中é")
@example(pieces=[b"\xff" * 14, "中".encode(), "é".encode()], stop="中é")
@example(pieces=[b"\xff" * 17, "中é".encode()], stop="中é")
def test_a_string_is_found_in_time_also_among_bytes_that_are_no_text(pieces, stop):
    tokens = list(b"".join(pieces))
    whole = [byte_text(tuple(tokens[: n + 1])) for n in range(len(tokens))]
    expected = next((n for n, so_far in enumerate(whole) if stop in so_far), None)
    assert first_stop([stop], tokens, byte_text) == expected


@pytest.mark.parametrize(
    ("pieces", "stop"),
    [
        ([*[b"b\xf0\x9f"] * 17, b"b"], "bb"),
        ([*[b"\xff"] * 12, b"a\xe4\xb8", b"\xad\xe4", b"\xff", b"\xff", b"b"], "中中"),
    ],
)
def test_characters_before_bytes_that_are_no_text_are_seen_once(pieces, stop):
    def decode(tokens: tuple[int, ...]) -> str:
        return b"".join(pieces[token] for token in tokens).decode("utf-8", errors="replace")

    tokens = list(range(len(pieces)))
    assert first_stop([stop], tokens, decode) == (
        None if stop not in decode(tuple(tokens)) else len(tokens) - 1
    )


@pytest.mark.parametrize(
    ("pieces", "stops", "order"),
    [
        (["an", "swer</", "ans", "wer", "> and"], ["</answer>"], 4),
        (["a", "b", "c"], ["zz", "bc"], 2),
        (["stop"], ["top"], 0),
        (["a", "b"], ["c"], None),
    ],
)
def test_a_string_over_several_tokens(pieces, stops, order):
    def decode(tokens: tuple[int, ...]) -> str:
        return "".join(pieces[token] for token in tokens)

    assert first_stop(stops, list(range(len(pieces))), decode) == order


def test_a_first_token_that_loses_its_space_does_not_shift_the_rest():
    words = ["_the", "_end", "ing"]

    def decode(tokens: tuple[int, ...]) -> str:
        return "".join(words[token] for token in tokens).replace("_", " ").lstrip()

    assert first_stop(["the end"], [0, 1, 2], decode) == 1
    assert first_stop(["theend"], [0, 1, 2], decode) is None


def test_bytes_that_never_become_a_character_do_not_grow_the_window():
    lengths = []

    def decode(tokens: tuple[int, ...]) -> str:
        lengths.append(len(tokens))
        return byte_text(tokens)

    assert first_stop(["end"], [0xFF] * 200 + list(b"end"), decode) == 202
    assert max(lengths) <= 32
