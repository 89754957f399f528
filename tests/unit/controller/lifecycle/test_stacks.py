"""Stacks of a process: all threads, and the line that the main thread is at."""

from __future__ import annotations

import threading

from spmd_rl.controller.lifecycle.stacks import SERVING, all_stacks, main_thread_location


def location_from_another_thread() -> str:
    locations: list[str] = []
    thread = threading.Thread(target=lambda: locations.append(main_thread_location()))
    thread.start()
    thread.join()
    return locations[0]


def test_here_is_this_line() -> None:
    assert "test_here_is_this_line" in all_stacks()


def test_a_main_thread_that_asks_itself_is_at_no_line() -> None:
    assert main_thread_location() == SERVING


def test_a_location_is_that_of_the_innermost_file_that_is_no_library() -> None:
    """The main thread waits inside the standard library's `threading` meanwhile."""
    assert location_from_another_thread().startswith("test_stacks.py:")
    assert location_from_another_thread().endswith(" in location_from_another_thread")
