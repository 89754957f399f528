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
from collections.abc import Mapping
from typing import NamedTuple

UNIX = 1  # AF_UNIX, the family of pairs of sockets
SET_PIPE_SIZE = 1031  # F_SETPIPE_SZ, a command of fcntl
NEW_USER = 0x10000000  # the flag of clone for a user namespace
_REFUSED = (
    "add_key",
    "bind",
    "bpf",
    "inotify_init1",
    "io_setup",
    "io_uring_setup",
    "keyctl",
    "listen",
    "memfd_create",
    "memfd_secret",
    "mount",
    "mq_open",
    "msgget",
    "perf_event_open",
    "ptrace",
    "request_key",
    "semget",
    "setns",
    "setsockopt",
    "shmat",
    "shmget",
    "unshare",
    "userfaultfd",
    "vmsplice",
)


class _Machine(NamedTuple):
    audit: int  # what seccomp calls the architecture
    calls: Mapping[str, int]  # numbers of system calls


_X86_64 = {
    "add_key": 248,
    "bind": 49,
    "bpf": 321,
    "clone": 56,
    "clone3": 435,
    "fcntl": 72,
    "inotify_init": 253,
    "inotify_init1": 294,
    "io_setup": 206,
    "io_uring_setup": 425,
    "keyctl": 250,
    "listen": 50,
    "memfd_create": 319,
    "memfd_secret": 447,
    "mount": 165,
    "mq_open": 240,
    "msgget": 68,
    "perf_event_open": 298,
    "ptrace": 101,
    "request_key": 249,
    "semget": 64,
    "setns": 308,
    "setsockopt": 54,
    "shmat": 30,
    "shmget": 29,
    "socket": 41,
    "socketpair": 53,
    "unshare": 272,
    "userfaultfd": 323,
    "vmsplice": 278,
}
_ARM_64 = {
    "add_key": 217,
    "bind": 200,
    "bpf": 280,
    "clone": 220,
    "clone3": 435,
    "fcntl": 25,
    "inotify_init1": 26,
    "io_setup": 0,
    "io_uring_setup": 425,
    "keyctl": 219,
    "listen": 201,
    "memfd_create": 279,
    "memfd_secret": 447,
    "mount": 40,
    "mq_open": 180,
    "msgget": 186,
    "perf_event_open": 241,
    "ptrace": 117,
    "request_key": 218,
    "semget": 190,
    "setns": 268,
    "setsockopt": 208,
    "shmat": 196,
    "shmget": 194,
    "socket": 198,
    "socketpair": 199,
    "unshare": 97,
    "userfaultfd": 282,
    "vmsplice": 75,
}
_MACHINES = {
    "x86_64": _Machine(0xC000003E, _X86_64),
    "aarch64": _Machine(0xC00000B7, _ARM_64),
}

# instructions of classic BPF, as in linux/bpf_common.h
_LOAD, _IF_EQUAL, _IF_LEAST, _IF_ANY, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
# offsets in struct seccomp_data
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24
_KILL, _ERROR, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000  # answers of a filter
_FOREIGN = 0x40000000  # first number of the calls of x32, which are the same under other numbers


def filter_program(machine: str = "") -> bytes:
    """Return the filter for a machine such as "x86_64"; b"" where its calls are not known."""
    known = _MACHINES.get(machine or platform.machine())
    if known is None:
        return b""
    program = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_IF_EQUAL, known.audit, 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER),
        _step(_IF_LEAST, _FOREIGN, 0, 1),
        _step(_RETURN, _KILL),
    ]
    for name in _REFUSED:
        program += _refused(known.calls[name], errno.EPERM)
    program += _refused(known.calls["clone3"], errno.ENOSYS)  # libraries then use clone
    program += _refused(known.calls["socket"], errno.EAFNOSUPPORT)
    if "inotify_init" in known.calls:
        program += _refused(known.calls["inotify_init"], errno.EPERM)
    program += [
        _step(_IF_EQUAL, known.calls["fcntl"], 0, 4),
        _step(_LOAD, _SECOND_ARGUMENT),
        _step(_IF_EQUAL, SET_PIPE_SIZE, 0, 1),
        _step(_RETURN, _ERROR | errno.EPERM),
        _step(_RETURN, _ALLOW),
        _step(_IF_EQUAL, known.calls["clone"], 0, 4),
        _step(_LOAD, _FIRST_ARGUMENT),
        _step(_IF_ANY, NEW_USER, 0, 1),
        _step(_RETURN, _ERROR | errno.EPERM),
        _step(_RETURN, _ALLOW),
        _step(_IF_EQUAL, known.calls["socketpair"], 0, 3),
        _step(_LOAD, _FIRST_ARGUMENT),
        _step(_IF_EQUAL, UNIX, 1, 0),
        _step(_RETURN, _ERROR | errno.EAFNOSUPPORT),
        _step(_RETURN, _ALLOW),
    ]
    return b"".join(program)


def _refused(number: int, error: int) -> list[bytes]:
    """Return steps that answer a call with an error."""
    return [_step(_IF_EQUAL, number, 0, 1), _step(_RETURN, _ERROR | error)]


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)
