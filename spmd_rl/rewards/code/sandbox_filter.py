"""System calls that a program in the sandbox may not make, as a filter for seccomp.

Namespaces do not hold for all: sockets between virtual machines, keys of the kernel, and io_uring,
which opens sockets by itself. Limits of a process do not hold for memory that no process has
mapped: segments, queues and semaphores of System V, files in memory, large pipes, pages that a
pipe keeps, events of watched files, and what is sent to a socket that nobody reads. A connection
that nobody accepts keeps it even without a descriptor, and all TCP of the host shares one bound. So
a program has pairs of connected sockets alone, each with the buffer that the host gives it. Other
calls are refused because programs do not need them, and faults of the kernel were often found in
them. A refused call returns an error; the program goes on.
"""

from __future__ import annotations

import errno
import platform
import struct

UNIX = 1  # AF_UNIX, the family of pairs of sockets
SET_PIPE_SIZE = 1031  # F_SETPIPE_SZ, a command of fcntl
NEW_USER = 0x10000000  # the flag of clone for a user namespace
# what seccomp calls the architecture, and the column of its numbers below
_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
# numbers of system calls that are refused, on x86_64 and on 64-bit ARM
_REFUSED: dict[str, tuple[int, int | None]] = {
    "add_key": (248, 217),
    "bind": (49, 200),
    "bpf": (321, 280),
    "inotify_init1": (294, 26),
    "io_setup": (206, 0),
    "io_uring_setup": (425, 425),
    "keyctl": (250, 219),
    "listen": (50, 201),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "mount": (165, 40),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "perf_event_open": (298, 241),
    "ptrace": (101, 117),
    "request_key": (249, 218),
    "semget": (64, 190),
    "setns": (308, 268),
    "setsockopt": (54, 208),
    "shmat": (30, 196),
    "shmget": (29, 194),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "vmsplice": (278, 75),
    "inotify_init": (253, None),
}
# and of those that are refused in part, or with another error
_IN_PART = {
    "clone": (56, 220),
    "clone3": (435, 435),
    "fcntl": (72, 25),
    "socket": (41, 198),
    "socketpair": (53, 199),
}

# instructions of classic BPF, as in linux/bpf_common.h
_LOAD, _IF_EQUAL, _IF_LEAST, _IF_ANY, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
# offsets in struct seccomp_data
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24
_KILL, _ERROR, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000  # answers of a filter
_FOREIGN = 0x40000000  # first number of the calls of x32, which are the same under other numbers


def filter_program(machine: str = "") -> bytes:
    """Return the filter for a machine such as "x86_64"; b"" where its calls are not known."""
    audit, column = _MACHINES.get(machine or platform.machine(), (None, 0))
    if audit is None:
        return b""
    calls = {name: numbers[column] for name, numbers in _IN_PART.items()}
    program = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_IF_EQUAL, audit, 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER),
        _step(_IF_LEAST, _FOREIGN, 0, 1),
        _step(_RETURN, _KILL),
    ]
    for numbers in _REFUSED.values():
        if (number := numbers[column]) is not None:
            program += _refused(number, errno.EPERM)
    program += _refused(calls["clone3"], errno.ENOSYS)  # libraries then use clone
    program += _refused(calls["socket"], errno.EAFNOSUPPORT)
    for name, argument, allowed, error in (
        ("fcntl", _SECOND_ARGUMENT, _step(_IF_EQUAL, SET_PIPE_SIZE, 0, 1), errno.EPERM),
        ("clone", _FIRST_ARGUMENT, _step(_IF_ANY, NEW_USER, 0, 1), errno.EPERM),
        ("socketpair", _FIRST_ARGUMENT, _step(_IF_EQUAL, UNIX, 1, 0), errno.EAFNOSUPPORT),
    ):
        program += [_step(_IF_EQUAL, calls[name], 0, 4), _step(_LOAD, argument), allowed]
        program += [_step(_RETURN, _ERROR | error), _step(_RETURN, _ALLOW)]
    return b"".join([*program, _step(_RETURN, _ALLOW)])


def _refused(number: int, error: int) -> list[bytes]:
    """Return steps that answer a call with an error."""
    return [_step(_IF_EQUAL, number, 0, 1), _step(_RETURN, _ERROR | error)]


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)
