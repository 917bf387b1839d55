"""Inside of the sandbox: shuts this process in, and runs a program in it.

Run as a file of its own by `sandbox.Sandbox`, with the standard library only. Standard input is a JSON object: program,
token, verdict, level, reads, limits and calls. What cannot be shut in is not run: an exception ends the process before
"ready" is written to the descriptor ``verdict``. The token is written behind it once the program has run to its end.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import struct
import sys
import traceback
import types
from typing import Any

_NOBODY = 65534
_ROOT = "/tmp"  # where the new root is put together, in a mount namespace of its own
_CLONE_NEW = 0x00020000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000
"""Namespaces of mounts, host names, IPC, processes and network."""
_CLONE_NEWUSER = 0x10000000
_CLONE_THREAD = 0x00010000
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 2, 4, 4096, 16384, 1 << 18, 2
_AT_FDCWD, _AT_RECURSIVE, _MOUNT_SETATTR = -100, 0x8000, 442
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_FS_EXECUTE, _FS_WRITE_FILE, _FS_READ_FILE, _FS_READ_DIR = 1, 2, 4, 8
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_DEVICES = ("/dev/null", "/dev/urandom")

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Never returns."""
    job = json.load(sys.stdin)
    verdict, limits = job["verdict"], job["limits"]
    os.nice(19)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    if job["level"] == "namespaces":
        _enter_namespaces(job["reads"], limits["file_bytes"])
    _limit(limits)
    os.closerange(3, verdict)
    os.closerange(verdict + 1, 4096)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    if job["level"] == "landlock":
        os.chdir("/")
        _landlock(job["reads"])
    _drop_capabilities()
    _filter_calls(job["calls"])
    os.write(verdict, b"ready\n")
    _run(job["program"])
    os.write(verdict, job["token"].encode())
    os._exit(0)


def _run(program: str) -> None:
    """Runs a program to its end. What it raises, SystemExit, too, ends this process before anything is written behind
    it; its traceback begins in the program."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = ["answer"]
    try:
        exec(compile(program, "<answer>", "exec"), module.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        inside = error.__traceback__
        traceback.print_exception(type(error), error, None if inside is None else inside.tb_next)
        os._exit(1)
    with contextlib.suppress(Exception):
        sys.stdout.flush()


def _enter_namespaces(reads: list[str], file_bytes: int) -> None:
    """New namespaces of everything, and a root that holds ``reads`` and an empty directory to write to."""
    uid, gid = os.getuid(), os.getgid()
    as_root = uid == 0 and _libc.unshare(_CLONE_NEW) == 0
    if not as_root:
        _check(_libc.unshare(_CLONE_NEW | _CLONE_NEWUSER), "unshare")
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{_NOBODY} {uid} 1"),
            ("gid_map", f"{_NOBODY} {gid} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    places = [(path, os.open(path, os.O_PATH)) for path in (*reads, *_DEVICES) if not os.path.islink(path)]
    links = [(path, os.readlink(path)) for path in reads if os.path.islink(path)]
    # The new root hides what lies below it, so that all is opened before.
    _mount("tmpfs", _ROOT, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={file_bytes},nr_inodes=4096,mode=755")
    for path, descriptor in places:
        _bind(f"/proc/self/fd/{descriptor}", path)
    for path, target in links:
        os.symlink(target, _ROOT + path)
    for name in ("tmp", "work"):
        os.mkdir(f"{_ROOT}/{name}")
        os.chmod(f"{_ROOT}/{name}", 0o1777)
    os.chdir(_ROOT)
    _check(_libc.syscall(_PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _MNT_DETACH), "umount2")
    os.chdir("/work")
    if as_root:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
        _check(_libc.unshare(_CLONE_NEWUSER), "unshare")  # limits on threads count in it alone


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind, data)]
    done = _libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    _check(done, f"mount {target}")


def _bind(source: str, path: str) -> None:
    """What is at ``source``, read-only at ``path`` of the new root."""
    target = _ROOT + path
    if path in _DEVICES:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "w"):
            pass
        _mount(source, target, None, _MS_BIND)
        return
    os.makedirs(target, exist_ok=True)
    _mount(source, target, None, _MS_BIND | _MS_REC)
    _read_only(target)


def _read_only(path: str) -> None:
    attributes = struct.pack("<QQQQ", _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV, 0, 0, 0)
    _check(
        _libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, path.encode(), _AT_RECURSIVE, attributes, len(attributes)),
        f"mount_setattr {path}",
    )


def _limit(limits: dict[str, int]) -> None:
    for name, value in (
        (resource.RLIMIT_CPU, limits["cpu_seconds"]),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(name, (value, value))
    # Threads; in the namespace of one user, for where a user has other processes they would count.
    if os.getpid() == 1:
        resource.setrlimit(resource.RLIMIT_NPROC, (limits["threads"], limits["threads"]))


def _landlock(reads: list[str]) -> None:
    """Nothing but ``reads`` can be opened, and nothing be written but /dev/null."""
    abi = _check(_libc.syscall(_LANDLOCK_CREATE, None, 0, 1), "landlock (the kernel has none)")
    handled = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)) - 1
    network = 3 if abi >= 4 else 0
    scoped = 3 if abi >= 6 else 0
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    attributes = struct.pack("<QQQ", handled, network, scoped)[:size]
    ruleset = _check(_libc.syscall(_LANDLOCK_CREATE, attributes, size, 0), "landlock_create_ruleset")
    rules = [(path, _FS_EXECUTE | _FS_READ_FILE | _FS_READ_DIR) for path in reads if os.path.isdir(path)]
    rules += [("/dev/null", _FS_READ_FILE | _FS_WRITE_FILE), ("/dev/urandom", _FS_READ_FILE)]
    for path, access in rules:
        descriptor = os.open(path, os.O_PATH)
        rule = struct.pack("<Qi", access, descriptor)
        _check(_libc.syscall(_LANDLOCK_ADD, ruleset, 1, rule, 0), f"landlock_add_rule {path}")
        os.close(descriptor)
    _check(_libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


def _drop_capabilities() -> None:
    header, nothing = struct.pack("<Ii", 0x20080522, 0), struct.pack("<6I", *[0] * 6)
    _check(_libc.capset(header, nothing), "capset")


def _filter_calls(calls: dict[str, Any]) -> None:
    """A seccomp filter; see calls.Calls."""
    load, equal, at_least, has, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, missing, kill = 0x7FFF0000, 0x00050000 | 1, 0x00050000 | 38, 0x80000000
    denied = calls["denied"]
    lines: list[tuple[int, int, int, int]] = [
        (load, 0, 0, 4),
        (equal, 1, 0, calls["audit"]),
        (give, 0, 0, kill),
        (load, 0, 0, 0),
    ]
    if calls["others"] is not None:
        lines += [(at_least, 0, 1, calls["others"]), (give, 0, 0, kill)]
    lines += [(equal, 0, 1, calls["clone3"]), (give, 0, 0, missing)]
    lines += [(equal, len(denied) - place + 1, 0, number) for place, number in enumerate(denied)]
    lines += [(equal, 2, 0, calls["clone"]), (give, 0, 0, allow), (give, 0, 0, refuse)]
    lines += [(load, 0, 0, 16), (has, 0, 1, _CLONE_THREAD), (give, 0, 0, allow), (give, 0, 0, refuse)]
    code = b"".join(struct.pack("<HBBI", *line) for line in lines)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("<HxxxxxxQ", len(lines), ctypes.addressof(buffer))
    filters = ctypes.create_string_buffer(program, len(program))
    _prctl(_PR_SET_SECCOMP, 2, ctypes.addressof(filters))


def _prctl(option: int, first: int, second: int = 0) -> None:
    _check(
        _libc.prctl(option, ctypes.c_ulong(first), ctypes.c_ulong(second), ctypes.c_ulong(0), ctypes.c_ulong(0)),
        f"prctl {option}",
    )


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


if __name__ == "__main__":
    main()
