"""Attempts of a command to get out of its sandbox. Each is a piece of Python that runs to its end where it works and
raises where it is refused.

Run as a file it makes all of them, each in a process of its own: `python attempts.py PLACE`, PLACE being JSON of what
there is to get at. It prints a line of JSON for each.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from dataclasses import dataclass

SECONDS = 5


@dataclass(frozen=True, slots=True)
class Attempt:
    """One way out."""

    name: str
    code: str
    outside: str = "works"
    """Whether the same code works outside of the sandbox: "works", "root" (for a root with all rights), or why it is
    not tried there."""


_DANGEROUS = "would change this machine"
_DEPENDS = "on some machines denied to root, too"

ATTEMPTS = tuple(
    Attempt(*one)
    for one in (
        # Files, read.
        ("reads a file by its path", "open(P['secret']).read()"),
        ("reads a file by way of ..", "open('../outside/secret').read()"),
        ("reads through a symbolic link", "os.symlink(P['secret'], 'link'); open('link').read()"),
        ("reads through a link to a directory", "os.symlink(P['outside'], 'links'); open('links/secret').read()"),
        ("reads through a hard link", "os.link(P['secret'], 'hard'); open('hard').read()"),
        ("reads through the root of /proc/self", "open('/proc/self/root' + P['secret']).read()"),
        ("reads through the root of process 1", "open('/proc/1/root' + P['secret']).read()", _DEPENDS),
        ("reads through another process's directory", "open(f'/proc/{P[\"victim\"]}/cwd/secret').read()"),
        ("lists a directory", "os.listdir(P['outside'])"),
        ("watches a directory", "fd = check(libc.inotify_init()); path = P['outside'].encode()\n"
         "check(libc.inotify_add_watch(fd, path, 0x100))"),
        ("opens by a handle", "handle = struct.pack('Ii128s', 128, 0, b'')\n"
         "buffer = ctypes.create_string_buffer(handle)\n"
         "number = ctypes.c_int()\n"
         "check(libc.name_to_handle_at(-100, P['secret'].encode(), buffer, ctypes.byref(number), 0))\n"
         "mount = os.open(P['outside'], os.O_RDONLY)\n"
         "check(libc.open_by_handle_at(mount, buffer, os.O_RDONLY))", "root"),
        ("reads shared memory of this machine", "open(P['shared']).read()"),
        ("reads an inherited descriptor", "os.lseek(P['descriptor'], 0, 0)\n"
         "assert os.read(P['descriptor'], 99) == SECRET"),
        ("finds a key in its environment", "assert SECRET.decode() in os.environ.values()"),
        ("reads the environment of its parent",
         "assert SECRET in open(f'/proc/{P[\"parent\"]}/environ', 'rb').read()"),
        ("reads the environment of another process", "open(f'/proc/{P[\"victim\"]}/environ', 'rb').read()"),
        ("reads the environment of process 1", "open('/proc/1/environ', 'rb').read()", _DEPENDS),
        # Files, written.
        ("writes a file", "open(P['outside'] + '/new', 'w').write('mine')"),
        ("writes beside its workspace", "open('../new', 'w').write('mine')"),
        ("writes through a link", "os.symlink(P['outside'], 'w'); open('w/new2', 'w').write('mine')"),
        ("shortens a file", "os.truncate(P['outside'] + '/long', 0)"),
        ("changes rights of a file", "os.chmod(P['outside'] + '/long', 0o666)"),
        ("changes rights of its workspace's parent", "os.chmod('..', 0o777)"),
        ("changes times of a file", "os.utime(P['outside'] + '/long', (1, 1))"),
        ("moves a file out", "open('mine', 'w').close(); os.rename('mine', P['outside'] + '/moved')"),
        ("moves a file out by way of ..", "open('mine2', 'w').close(); os.rename('mine2', '../outside/moved2')"),
        ("links a file out", "open('mine3', 'w').close(); os.link('mine3', P['outside'] + '/linked')"),
        ("moves its workspace",
         "os.rename(P['workspace'], P['workspace'] + '2'); os.rename(P['workspace'] + '2', P['workspace'])"),
        ("deletes a file", "os.unlink(P['outside'] + '/doomed')"),
        ("adds a key for ssh", "open(P['home'] + '/.ssh/authorized_keys', 'a').write('')", _DANGEROUS),
        ("adds a job to cron", "open('/etc/cron.d/mine', 'a')", _DANGEROUS),
        ("adds a library to all programs", "open('/etc/ld.so.preload', 'a')", _DANGEROUS),
        ("writes into the interpreter", "open(os.__file__, 'a').close()", _DANGEROUS),
        ("writes the pattern of core dumps", "open('/proc/sys/kernel/core_pattern', 'r+').close()", "root"),
        ("opens the kernel's own trigger", "open('/proc/sysrq-trigger', 'w').close()", _DANGEROUS),
        ("makes a program of its owner's rights", "open('s', 'w').close(); os.chmod('s', 0o4755)"),
        ("creates one", "os.close(os.open('s2', os.O_CREAT | os.O_WRONLY, 0o4755)); "
         "assert os.stat('s2').st_mode & 0o4000"),
        ("makes one as a node", "os.mknod('s3', 0o104755); assert os.stat('s3').st_mode & 0o4000"),
        ("runs a program from outside", "os.waitpid(os.posix_spawn(P['outside'] + '/program', ['x'], {}), 0)"),
        ("runs a program that is no file", "fd = os.memfd_create('x'); os.write(fd, open('/bin/true', 'rb').read())\n"
         "os.waitpid(os.posix_spawn(f'/proc/self/fd/{fd}', ['x'], {}), 0)"),
        # Devices.
        ("makes a device file", "os.mknod('disk', 0o060600, os.makedev(8, 0))", "root"),
        ("opens a device", "open('/dev/kmsg', 'rb').close()", "root"),
        ("types into a terminal", "fd = os.open(P['terminal'], os.O_RDWR); fcntl.ioctl(fd, 0x5412, b'x')", "root"),
        ("opens a terminal", "os.open(P['terminal'], os.O_RDWR | os.O_NOCTTY)"),
        ("makes a terminal", "os.openpty()"),
        # Processes.
        ("signals its parent", "os.kill(P['parent'], signal.SIGCONT)"),
        ("signals another process", "os.kill(P['victim'], signal.SIGCONT)"),
        ("signals a thread", "check(libc.syscall(CALLS['tgkill'], P['victim'], P['victim'], signal.SIGCONT))"),
        ("signals with a value", "check(libc.sigqueue(P['victim'], signal.SIGCONT, ctypes.c_void_p(1)))"),
        ("signals by a descriptor of a process",
         "signal.pidfd_send_signal(os.pidfd_open(P['victim']), signal.SIGCONT)"),
        ("has a descriptor signal", "fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, P['victim'])"),
        ("traces", "check(libc.ptrace(0x4206, P['victim'], 0, 0))", "root"),
        ("reads memory of a process", "open(f'/proc/{P[\"victim\"]}/mem', 'rb').close()", "root"),
        ("copies memory of a process", "one = ctypes.create_string_buffer(8)\n"
         "mine = struct.pack('QQ', ctypes.addressof(one), 8); far = struct.pack('QQ', P['address'], 8)\n"
         "check(libc.process_vm_readv(P['victim'], mine, 1, far, 1, 0))", "root"),
        ("takes a descriptor of a process", "check(libc.syscall(438, os.pidfd_open(P['victim']), 0, 0))", "root"),
        ("limits a process", "resource.prlimit(P['victim'], resource.RLIMIT_CORE, (0, 0))"),
        ("slows a process", "os.setpriority(os.PRIO_PROCESS, P['victim'], 19)"),
        ("moves a process to a processor", "os.sched_setaffinity(P['victim'], {min(os.sched_getaffinity(0))})"),
        ("leaves its session", "os.setsid()"),
        ("leaves its group", "os.setpgid(0, 0)"),
        ("lifts its limits", "soft, hard = resource.getrlimit(resource.RLIMIT_AS)\n"
         "resource.setrlimit(resource.RLIMIT_AS, (-1, -1)); assert resource.getrlimit(resource.RLIMIT_AS) == (-1, -1)"),
        ("goes before others", "os.nice(-5)", "root"),
        ("becomes root", "os.setresuid(0, 0, 0)", "root"),
        # Network.
        ("connects", "socket.create_connection(('127.0.0.1', P['tcp']), 2).close()"),
        ("sends datagrams", "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', P['udp']))"),
        ("connects to a socket in the file system", "socket.socket(socket.AF_UNIX).connect(P['outside'] + '/socket')"),
        ("connects to a socket in its workspace", "socket.socket(socket.AF_UNIX).connect('socket')"),
        ("connects to a socket without a file", "socket.socket(socket.AF_UNIX).connect(chr(0) + P['abstract'])"),
        ("sends from one end of a pair", "one, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
         "one.sendto(b'x', chr(0) + P['abstract'] + '-datagrams')"),
        ("asks the kernel for its networks", "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).close()"),
        ("sends raw packets", "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1).close()", "root"),
        # The kernel's rarer parts.
        ("mounts", "os.mkdir('m'); check(libc.mount(b't', b'm', b'tmpfs', 0, None)); libc.umount2(b'm', 2)", "root"),
        ("takes a namespace of users", "check(libc.unshare(0x10000000))", "root"),
        ("starts a process in a namespace of users",
         "child = check(libc.syscall(CALLS['clone'], 0x10000011, 0, 0, 0, 0))\n"
         "if child == 0: os._exit(0)", "root"),
        ("starts one by the newer call", "arguments = struct.pack('QQQQQQQQ', 0x10000000, 0, 0, 0, 17, 0, 0, 0)\n"
         "child = check(libc.syscall(435, arguments, 64))\nif child == 0: os._exit(0)", "root"),
        ("enters a namespace", "check(libc.setns(os.open(f'/proc/{P[\"victim\"]}/ns/uts', os.O_RDONLY), 0))", "root"),
        ("changes its root", "check(libc.chroot(b'/'))", "root"),
        ("opens a tree of mounts", "check(libc.syscall(428, -100, b'/usr', 1))", "root"),
        ("loads a program into the kernel",
         "check(libc.syscall(CALLS['bpf'], 0, struct.pack('IIIII108x', 2, 4, 4, 1, 0), 128))", "root"),
        ("measures the kernel", "event = struct.pack('IIQQQQQ72x', 1, 120, 0, 0, 0, 0, 0)\n"
         "check(libc.syscall(CALLS['perf_event_open'], event, 0, -1, -1, 0))", "root"),
        ("handles faults of pages", "check(libc.syscall(CALLS['userfaultfd'], 0))", "root"),
        ("queues calls past the filter", "check(libc.syscall(425, 1, ctypes.create_string_buffer(120)))", "root"),
        ("makes a key", "check(libc.syscall(CALLS['add_key'], b'user', b'temper', b'x', 1, -2))"),
        ("finds a keyring", "check(libc.syscall(CALLS['keyctl'], 0, -2, 1))"),
        ("shares memory by number", "number = check(libc.shmget(0, 4096, 0o1600)); libc.shmctl(number, 0, None)"),
        ("reads the kernel's messages", "check(libc.klogctl(10, None, 0))", "root"),
        ("names the machine", "socket.sethostname(socket.gethostname())", "root"),
        ("sets the clock", "time.clock_settime(time.CLOCK_REALTIME, time.time())", _DANGEROUS),
        ("restarts the machine", "check(libc.reboot(0x01234567))", _DANGEROUS),
        ("watches all files", "check(libc.fanotify_init(0, 0))", "root"),
        ("turns off the shuffling of addresses", "check(libc.personality(0x0040000))"),
    )
)  # fmt: skip

_NUMBERS = {
    "x86_64": {"tgkill": 234, "clone": 56, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "add_key": 248,
               "keyctl": 250},
    "aarch64": {"tgkill": 131, "clone": 220, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282, "add_key": 217,
                "keyctl": 219},
}  # fmt: skip
_PRELUDE = "import ctypes, fcntl, os, resource, signal, socket, struct, time"


def main() -> None:
    place = json.loads(sys.argv[1])
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int) -> int:
        if result < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return result

    names = {
        "P": place,
        "SECRET": place["key"].encode(),
        "libc": libc,
        "check": check,
        "CALLS": _NUMBERS[os.uname().machine],
    }
    for attempt in ATTEMPTS:
        if attempt.outside not in place["tries"]:
            continue
        read, write = os.pipe()
        child = os.fork()
        if not child:
            signal.alarm(SECONDS)
            try:
                exec(f"{_PRELUDE}\n{attempt.code}", dict(names))
                said = "worked"
            except BaseException as error:
                said = f"{type(error).__name__}: {error}"
            os.write(write, said.encode())
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            said = pipe.read()
        _, status = os.waitpid(child, 0)
        sys.stdout.write(json.dumps([attempt.name, said or f"ended with {status}"]) + "\n")
        sys.stdout.flush()
        time.sleep(0)


if __name__ == "__main__":
    main()
