"""Inside of the sandbox: shuts this process in, and runs a program in it.

Run as a file of its own by `shut_in.Launch`, with the standard library only. Standard input is a JSON object: verdict,
level, reads, limits, calls, and either program and token, or command. What cannot be shut in is not run: an exception
ends the process before "ready" is written to the descriptor ``verdict``. The token is written behind it once a program
has run to its end. A command is a list of arguments with a workspace; this process starts it and ends as it does.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import signal
import socket
import struct
import sys
import traceback
import types
from typing import Any, NoReturn

_NOBODY = 65534
_ROOT = "/tmp"  # where the new root is put together, in a mount namespace of its own
_CLONE_NEW = 0x00020000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000
"""Namespaces of mounts, host names, IPC, processes and network."""
_CLONE_NEWUSER = 0x10000000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MNT_DETACH = 1, 2, 4, 8, 2
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
_AT_FDCWD, _AT_RECURSIVE, _MOUNT_SETATTR = -100, 0x8000, 442
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_FS_EXECUTE, _FS_WRITE_FILE, _FS_READ_FILE, _FS_READ_DIR = 1, 2, 4, 8
_FS_MAKES_DEVICES = 1 << 6 | 1 << 11 | 1 << 15
"""Rights to make character and block devices, and to call devices."""
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_DEVICES = ("/dev/null", "/dev/urandom")
_MORE_DEVICES = ("/dev/zero", "/dev/full", "/dev/random")
"""Devices that commands have beside those."""
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Never returns."""
    job = json.load(sys.stdin)
    verdict, limits, command = job["verdict"], job["limits"], job.get("command")
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # nobody would watch its limits any more
    os.nice(19)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    if job["level"] == "namespaces":
        in_memory = limits["file_bytes"] if command is None else command["temporary_bytes"]
        _enter_namespaces(job["reads"], in_memory, command)
    if command is not None and command["listener"] is not None:
        _offer_network(command["listener"], command["port"])
    _limit(limits)
    os.closerange(3, verdict)
    os.closerange(verdict + 1, 4096)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # of this process, which need not be the first one, with its user now
    if job["level"] == "landlock":
        os.chdir("/")
        _landlock(job["reads"], [] if command is None else [command["workspace"]])
    _drop_capabilities()
    if command is not None:
        os.chdir(command["workspace"])
        _check(0 if os.access(".", os.W_OK | os.X_OK) else -1, f"{command['workspace']} cannot be written to")
    _filter_calls(job["calls"])
    os.write(verdict, b"ready\n")
    if command is not None:
        os.close(verdict)
        _start(command["arguments"], command["environment"])
    _run(job["program"])
    os.write(verdict, job["token"].encode())
    os._exit(0)


def _start(arguments: list[str], environment: dict[str, str]) -> NoReturn:
    """Runs a command, and ends as it does: with its status, or 128 and the signal that ended it."""
    _prctl(_PR_SET_DUMPABLE, 0)
    child = os.fork()
    if not child:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        try:
            os.execvpe(arguments[0], arguments, environment)
        except OSError as error:
            sys.stderr.write(f"{arguments[0]}: {error.strerror}\n")
        os._exit(127)
    while True:  # of a process namespace this is the first process, which takes in those without a parent
        ended, status = os.wait()
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _offer_network(channel: int, port: int) -> None:
    """Sends a listening socket of this network namespace, which has no other way out, to the one who started this."""
    with socket.socket() as any_socket:
        asked = struct.pack("16sH14x", b"lo", 0)
        (flags,) = struct.unpack_from("H", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, asked), 16)
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))
    with socket.socket() as listener, socket.socket(fileno=channel) as sender:
        listener.bind(("127.0.0.1", port))
        listener.listen(64)
        socket.send_fds(sender, [b"l"], [listener.fileno()])


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


def _enter_namespaces(reads: list[str], in_memory: int, command: dict[str, Any] | None) -> None:
    """New namespaces of everything, and a root that holds ``reads`` and an empty directory to write to; for a command
    its workspace, its own processes in /proc, and more devices. A command keeps its user, who owns the workspace."""
    uid, gid = os.getuid(), os.getgid()
    as_root = command is None and uid == 0 and _libc.unshare(_CLONE_NEW) == 0
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
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    devices = _DEVICES if command is None else (*_DEVICES, *_MORE_DEVICES)
    places = [(path, os.open(path, os.O_PATH)) for path in (*reads, *devices) if not os.path.islink(path)]
    links = [(path, os.readlink(path)) for path in reads if os.path.islink(path)]
    workspace = None if command is None else os.open(command["workspace"], os.O_PATH | os.O_NOFOLLOW)
    # The new root hides what lies below it, so that all is opened before.
    _mount("tmpfs", _ROOT, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={in_memory},nr_inodes=4096,mode=755")
    for name in () if command is None else ("tmp", "dev/shm"):  # before what may lie in them
        os.makedirs(f"{_ROOT}/{name}", exist_ok=True)
        _mount("tmpfs", f"{_ROOT}/{name}", "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={in_memory},nr_inodes=65536")
    for path, descriptor in places:
        _bind(f"/proc/self/fd/{descriptor}", path)
    for path, target in links:
        os.symlink(target, _ROOT + path)
    if command is None:
        for name in ("tmp", "work"):
            os.mkdir(f"{_ROOT}/{name}")
            os.chmod(f"{_ROOT}/{name}", 0o1777)
    else:
        _bind(f"/proc/self/fd/{workspace}", command["workspace"], read_only=False)
        _own_proc(command["processes"] if uid == 0 else None)
        _set_attributes(_ROOT, _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV, 0)
    os.chdir(_ROOT)
    _check(_libc.syscall(_PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _MNT_DETACH), "umount2")
    os.chdir("/work" if command is None else "/")
    if as_root:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
        _check(_libc.unshare(_CLONE_NEWUSER), "unshare")  # limits on threads count in it alone


def _own_proc(most: int | None) -> None:
    """/proc of the new root: processes of this namespace only, and nothing of the machine.

    Args:
        most: limit on the processes of this namespace, for root, whom the kernel exempts from limits of users.
    """
    place = f"{_ROOT}/proc"
    os.mkdir(place)
    if most is not None:
        _mount("proc", place, "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
        # Kernels before 6.14 have it for the machine only: nothing is written then, and the limit does not hold, which
        # the check before the first command finds.
        with contextlib.suppress(OSError), open(f"{place}/sys/kernel/pid_max", "r+") as file:
            file.write(str(most))
        _check(_libc.umount2(place.encode(), 0), "umount2 /proc")
    _mount("proc", place, "proc", _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, "subset=pid")


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind, data)]
    done = _libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    _check(done, f"mount {target}")


def _bind(source: str, path: str, *, read_only: bool = True) -> None:
    """What is at ``source``, at ``path`` of the new root; a device as it is."""
    target = _ROOT + path
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "w"):
            pass
    _mount(source, target, None, _MS_BIND | _MS_REC)
    if path in _DEVICES + _MORE_DEVICES:
        return
    _set_attributes(target, _ATTR_NOSUID | _ATTR_NODEV | (_ATTR_RDONLY if read_only else 0), _AT_RECURSIVE)


def _set_attributes(path: str, wanted: int, flags: int) -> None:
    attributes = struct.pack("<QQQQ", wanted, 0, 0, 0)
    _check(
        _libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, path.encode(), flags, attributes, len(attributes)),
        f"mount_setattr {path}",
    )


def _limit(limits: dict[str, int]) -> None:
    for name, value in (
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(name, (value, value))
    # A soft limit ends a process by a signal of its own, which says why; not the first one of a namespace.
    seconds = limits["cpu_seconds"]
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + limits["with_others"]))
    # Threads, those of processes, too. In a namespace of users they are counted there, elsewhere all of the user's.
    if os.getpid() == 1:
        resource.setrlimit(resource.RLIMIT_NPROC, (limits["threads"], limits["threads"]))
    elif limits["with_others"]:
        most = limits["threads"] + _threads_of(os.getuid())
        resource.setrlimit(resource.RLIMIT_NPROC, (most, most))


def _threads_of(user: int) -> int:
    found = 0
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == user:
                    found += len(os.listdir(f"/proc/{name}/task"))
    return found


def _landlock(reads: list[str], writes: list[str]) -> None:
    """Nothing but ``reads`` and ``writes`` can be opened, and nothing be written but ``writes`` and /dev/null."""
    abi = _check(_libc.syscall(_LANDLOCK_CREATE, None, 0, 1), "landlock (the kernel has none)")
    handled = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)) - 1
    network = 3 if abi >= 4 else 0
    scoped = 3 if abi >= 6 else 0
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    attributes = struct.pack("<QQQ", handled, network, scoped)[:size]
    ruleset = _check(_libc.syscall(_LANDLOCK_CREATE, attributes, size, 0), "landlock_create_ruleset")
    looks = _FS_EXECUTE | _FS_READ_FILE | _FS_READ_DIR
    rules = [(path, looks if os.path.isdir(path) else _FS_EXECUTE | _FS_READ_FILE) for path in reads]
    rules += [(path, handled & ~_FS_MAKES_DEVICES) for path in writes]
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
    """A seccomp filter; see calls.Denied."""
    load, equal, at_least, mask, give = 0x20, 0x15, 0x35, 0x54, 0x06
    allow, refuse, missing, kill = 0x7FFF0000, 0x00050000 | 1, 0x00050000 | 38, 0x80000000
    lines: list[tuple[int, int, int, int]] = [
        (load, 0, 0, 4),
        (equal, 1, 0, calls["audit"]),
        (give, 0, 0, kill),
        (load, 0, 0, 0),
    ]
    if calls["others"] is not None:
        lines += [(at_least, 0, 1, calls["others"]), (give, 0, 0, kill)]
    lines += [(equal, 0, 1, calls["clone3"]), (give, 0, 0, missing)]
    for number in calls["denied"]:
        lines += [(equal, 0, 1, number), (give, 0, 0, refuse)]
    for number, place, bits, values, allowed in calls["by_argument"]:
        values = [os.getpid() if value is None else value for value in values]
        lines += [(equal, 0, len(values) + 4, number), (load, 0, 0, 16 + 8 * place), (mask, 0, 0, bits)]
        lines += [(equal, len(values) - index, 0, value) for index, value in enumerate(values)]
        lines += [(give, 0, 0, refuse if allowed else allow), (give, 0, 0, allow if allowed else refuse)]
    lines += [(give, 0, 0, allow)]
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
