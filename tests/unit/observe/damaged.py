"""Content that no file of a run has: torn, empty, of another type, or not text."""

DAMAGED = [
    *(b"", b"{", b'{"a": {"b": 1', b"[]", b"null", b"3", b'"x"', b"true"),
    *(b"\0\0\0", b"{}\0", b"\xff\xfe", b'{"a": "\xff"}', b"[" * 200_000, b"9" * 5000),
]
