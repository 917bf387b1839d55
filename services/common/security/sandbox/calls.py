"""System calls that a program or a command in the sandbox does not have, by the numbers of this machine's architecture.

Denied is what reaches other processes, the network, other namespaces or the kernel's rarer parts, and what changes
files without opening them, which Landlock does not see. A command has more of them than a program: it is made of
processes, and changes what it owns.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_COMMON = {
    "pidfd_send_signal": 424,
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "pidfd_open": 434,
    "openat2": 437,
    "pidfd_getfd": 438,
    "process_madvise": 440,
    "mount_setattr": 442,
    "memfd_secret": 447,
    "process_mrelease": 448,
    "fchmodat2": 452,
    "setxattrat": 463,
    "removexattrat": 466,
    "open_tree_attr": 467,
}
"""Numbers that all architectures share."""
_X86_64 = {
    "fork": 57,
    "vfork": 58,
    "execve": 59,
    "execveat": 322,
    "kill": 62,
    "tkill": 200,
    "tgkill": 234,
    "rt_sigqueueinfo": 129,
    "rt_tgsigqueueinfo": 297,
    "setsid": 112,
    "setpgid": 109,
    "ptrace": 101,
    "process_vm_readv": 310,
    "process_vm_writev": 311,
    "kcmp": 312,
    "prlimit64": 302,
    "setpriority": 141,
    "ioprio_set": 251,
    "sched_setparam": 142,
    "sched_setscheduler": 144,
    "sched_setaffinity": 203,
    "sched_setattr": 314,
    "migrate_pages": 256,
    "move_pages": 279,
    "socket": 41,
    "socketpair": 53,
    "mount": 165,
    "umount2": 166,
    "pivot_root": 155,
    "chroot": 161,
    "unshare": 272,
    "setns": 308,
    "bpf": 321,
    "perf_event_open": 298,
    "userfaultfd": 323,
    "add_key": 248,
    "request_key": 249,
    "keyctl": 250,
    "memfd_create": 319,
    "shmget": 29,
    "shmat": 30,
    "semget": 64,
    "msgget": 68,
    "mq_open": 240,
    "inotify_add_watch": 254,
    "fanotify_init": 300,
    "name_to_handle_at": 303,
    "open_by_handle_at": 304,
    "truncate": 76,
    "chmod": 90,
    "fchmod": 91,
    "fchmodat": 268,
    "chown": 92,
    "fchown": 93,
    "lchown": 94,
    "fchownat": 260,
    "utime": 132,
    "utimes": 235,
    "futimesat": 261,
    "utimensat": 280,
    "setxattr": 188,
    "lsetxattr": 189,
    "fsetxattr": 190,
    "removexattr": 197,
    "lremovexattr": 198,
    "fremovexattr": 199,
    "personality": 135,
    "syslog": 103,
    "open": 2,
    "creat": 85,
    "openat": 257,
    "mknod": 133,
    "mknodat": 259,
    "clone": 56,
    "fcntl": 72,
    "ioctl": 16,
}
_AARCH64 = {
    "execve": 221,
    "execveat": 281,
    "kill": 129,
    "tkill": 130,
    "tgkill": 131,
    "rt_sigqueueinfo": 138,
    "rt_tgsigqueueinfo": 240,
    "setsid": 157,
    "setpgid": 154,
    "ptrace": 117,
    "process_vm_readv": 270,
    "process_vm_writev": 271,
    "kcmp": 272,
    "prlimit64": 261,
    "setpriority": 140,
    "ioprio_set": 30,
    "sched_setparam": 118,
    "sched_setscheduler": 119,
    "sched_setaffinity": 122,
    "sched_setattr": 274,
    "migrate_pages": 238,
    "move_pages": 239,
    "socket": 198,
    "socketpair": 199,
    "mount": 40,
    "umount2": 39,
    "pivot_root": 41,
    "chroot": 51,
    "unshare": 97,
    "setns": 268,
    "bpf": 280,
    "perf_event_open": 241,
    "userfaultfd": 282,
    "add_key": 217,
    "request_key": 218,
    "keyctl": 219,
    "memfd_create": 279,
    "shmget": 194,
    "shmat": 196,
    "semget": 190,
    "msgget": 186,
    "mq_open": 180,
    "inotify_add_watch": 27,
    "fanotify_init": 262,
    "name_to_handle_at": 264,
    "open_by_handle_at": 265,
    "truncate": 45,
    "fchmod": 52,
    "fchmodat": 53,
    "fchownat": 54,
    "fchown": 55,
    "utimensat": 88,
    "setxattr": 5,
    "lsetxattr": 6,
    "fsetxattr": 7,
    "removexattr": 14,
    "lremovexattr": 15,
    "fremovexattr": 16,
    "personality": 92,
    "syslog": 116,
    "openat": 56,
    "mknodat": 33,
    "clone": 220,
    "fcntl": 25,
    "ioctl": 29,
}


_ATTRIBUTES = [
    "chmod",
    "fchmod",
    "fchmodat",
    "fchmodat2",
    "chown",
    "fchown",
    "lchown",
    "fchownat",
    "utime",
    "utimes",
    "futimesat",
    "utimensat",
    "setxattr",
    "lsetxattr",
    "fsetxattr",
    "removexattr",
    "lremovexattr",
    "fremovexattr",
    "setxattrat",
    "removexattrat",
]
"""Calls that change attributes of files, which mounts bound and Landlock does not."""
_SIGNALS = ["kill", "tkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo"]
_SET_ID_BITS = 0o6000
_CLONE_THREAD = 0x00010000
_NAMESPACES = 0x7E020000
"""Flags of clone that make namespaces."""
_SENDS_SIGNALS = (8, 10, 15)
"""F_SETOWN, F_SETSIG and F_SETOWN_EX of fcntl: a descriptor signals any process of the user."""
_TYPES_INTO_TERMINALS = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX of ioctl."""


@dataclass(frozen=True, slots=True)
class ByArgument:
    """Calls that are denied or not by one argument."""

    names: Sequence[str]
    place: int
    """Of the argument, from 0."""
    values: Sequence[int | None]
    """None: the id of the process that is filtered first."""
    mask: int = 0xFFFFFFFF
    allowed: bool = True
    """Whether the argument has to have one of the values under the mask; else it must not."""


@dataclass(frozen=True, slots=True)
class Denied:
    """Calls that a process does not have."""

    names: frozenset[str]
    by_argument: Sequence[ByArgument]


_BY_ARGUMENT = (
    ByArgument(["ioctl"], 1, _TYPES_INTO_TERMINALS, allowed=False),
    ByArgument(["fcntl"], 1, _SENDS_SIGNALS, allowed=False),
)
_ALWAYS = frozenset(_COMMON) | frozenset(_X86_64) | frozenset(_AARCH64)
_ALWAYS -= {"tgkill", "open", "creat", "openat", "openat2", "mknod", "mknodat", "clone", "fcntl", "ioctl"}

PROGRAMS = Denied(
    _ALWAYS,
    (*_BY_ARGUMENT, ByArgument(["clone"], 0, [_CLONE_THREAD], _CLONE_THREAD), ByArgument(["tgkill"], 0, [None])),
)
"""Denied to a program that is one process: threads only, and no signals but to itself."""


def of_commands(*, confined_signals: bool, confined_attributes: bool, network: bool) -> Denied:
    """What is denied to a command.

    Args:
        confined_signals: something else keeps its signals in the sandbox.
        confined_attributes: something else keeps changes of attributes in the sandbox.
        network: it is in a network namespace whose only way out is granted.
    """
    given = {"fork", "vfork", "execve", "truncate", "prlimit64", "socketpair"}
    given |= {*(_SIGNALS if confined_signals else ()), *(_ATTRIBUTES if confined_attributes else ())}
    given |= {"socket"} if network else set()
    lacks = (_ALWAYS | {"openat2"} | (set() if confined_signals else {"tgkill"})) - given
    rules = [
        *_BY_ARGUMENT,
        ByArgument(["clone"], 0, [0], _NAMESPACES),
        ByArgument(["prlimit64"], 0, [0]),  # its own limits
        # Unlike datagrams, a pair of streams reaches nothing but itself.
        ByArgument(["socketpair"], 1, [1], 0xF),
        # What has its owner's rights for others goes on having them outside.
        *(
            ByArgument(names, place, [0], _SET_ID_BITS)
            for names, place in ((["creat", "mknod"], 1), (["open", "mknodat"], 2), (["openat"], 3))
        ),
    ]
    if confined_attributes:
        rules += [
            ByArgument(["chmod", "fchmod"], 1, [0], _SET_ID_BITS),
            ByArgument(["fchmodat", "fchmodat2"], 2, [0], _SET_ID_BITS),
        ]
    if network:
        rules.append(ByArgument(["socket"], 0, [2, 10]))  # IPv4 and IPv6
    return Denied(frozenset(lacks), tuple(rules))


@dataclass(frozen=True, slots=True)
class Calls:
    """Numbers of one architecture."""

    audit: int
    """AUDIT_ARCH_… of its system calls."""
    clone3: int
    """Said not to exist, so that libraries take clone."""
    others: int | None
    """Numbers from here on are another calling convention's; None: it has none."""
    numbers: Mapping[str, int]

    def without(self, denied: Denied) -> dict[str, Any]:
        """What the launcher makes a filter of."""
        return {
            "audit": self.audit,
            "clone3": self.clone3,
            "others": self.others,
            "denied": sorted(self.numbers[name] for name in denied.names & self.numbers.keys()),
            "by_argument": [
                (self.numbers[name], rule.place, rule.mask, list(rule.values), rule.allowed)
                for rule in denied.by_argument
                for name in rule.names
                if name in self.numbers
            ],
        }


_MACHINES = {
    "x86_64": Calls(0xC000003E, 435, 0x40000000, _X86_64 | _COMMON),
    "aarch64": Calls(0xC00000B7, 435, None, _AARCH64 | _COMMON),
}


def calls() -> Calls | None:
    """The numbers of this machine; None: they are not known."""
    return _MACHINES.get(platform.machine())
