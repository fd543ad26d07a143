"""Run by `sandbox.py` in a process of its own: gives up every right but to compute, then runs a program and its tests.

Imports nothing but the standard library, and only what it needs before the walls are up. Numbers of system calls,
flags and structures are those of the kernel's headers (linux/landlock.h, linux/seccomp.h, linux/filter.h, asm/unistd.h).
"""

import ctypes
import errno
import json
import os
import platform
import resource
import signal
import struct
import sys

LIBC = ctypes.CDLL(None, use_errno=True)

PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, PR_SET_DUMPABLE = 1, 38, 22, 4

# Never for a program: new processes, network, signals to others, other processes' memory and limits, file modes and owners
# (which Landlock does not guard), what is shared beyond the process, the kernel itself. On x86-64, then on ARM64.
CALLS = {
    "x86_64": (0xC000003E, 126, {"clone": 56, "clone3": 435, "fcntl": 72, "ioctl": 16, "socketpair": 53}, (
        41, 42, 49, 57, 58, 59, 322,                                                            # socket connect bind fork vfork execve*
        62, 200, 234, 129, 297, 424, 434,                                                       # kill tkill tgkill *sigqueueinfo pidfd_*
        101, 310, 311, 440, 302, 160, 141, 142, 144, 314, 251, 203, 256, 279,                   # ptrace process_vm_* prlimit scheduling
        76, 90, 91, 268, 452, 92, 93, 94, 260, 132, 235, 261, 280, 133, 259,                    # truncate chmod* chown* utime* mknod*
        188, 189, 190, 197, 198, 199, 463, 466,                                                 # *setxattr *removexattr
        29, 64, 68, 240, 248, 249, 250,                                                         # shmget semget msgget mq_open keys
        155, 161, 163, 165, 166, 167, 169, 175, 313, 246, 320, 272, 308, 428, 429, 430, 442,    # mounts, reboot, modules, namespaces
        298, 300, 304, 321, 323, 425, 426, 427, 135, 172, 173, 103, 157,                       # perf, bpf, io_uring and such
    )),
    "aarch64": (0xC00000B7, 91, {"clone": 220, "clone3": 435, "fcntl": 25, "ioctl": 29, "socketpair": 199}, (
        198, 203, 200, 221, 281,
        129, 130, 131, 138, 240, 424, 434,
        117, 270, 271, 440, 261, 164, 140, 118, 119, 274, 30, 122, 238, 239,
        45, 52, 53, 452, 54, 55, 88, 33,
        5, 6, 7, 14, 15, 16, 463, 466,
        194, 190, 186, 180, 217, 218, 219,
        41, 51, 89, 40, 39, 224, 142, 105, 273, 104, 294, 97, 268, 428, 429, 430, 442,
        241, 262, 265, 280, 282, 425, 426, 427, 92, 116, 167,
    )),
}  # fmt: skip
"""Machine → (its number for seccomp, the number of capset, calls that depend on their arguments, what is refused)."""


class Missing(Exception):
    """A wall that this machine cannot put up."""


def main() -> None:
    descriptor = int(sys.argv[1])
    job = json.loads(sys.stdin.buffer.read())
    try:
        confine(job)
    except (Missing, OSError) as error:
        os.write(descriptor, f"{error}\n".encode())
        return
    mark(descriptor, job["marks"][0])
    space: dict = {"__name__": "__main__", "__builtins__": __builtins__}
    try:
        exec(compile(job["program"], "<program>", "exec"), space)
    except SystemExit as error:
        if error.code not in (None, 0):
            return
    for test, own in zip(job["tests"], job["marks"][1:], strict=True):
        try:
            exec(compile(test, "<test>", "exec"), space)
        except BaseException:
            continue
        mark(descriptor, own)
    os._exit(0)  # whatever threads the program has left


def mark(descriptor: int, text: str) -> None:
    os.write(descriptor, f"{text}\n".encode())


def confine(job: dict) -> None:
    """Give up every right. Raises Missing or OSError where the machine cannot take it."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in CALLS:
        raise Missing(f"it needs Linux on {' or '.join(CALLS)}, this is {sys.platform} on {machine}")
    audit, capset, looked_into, refused = CALLS[machine]
    check(LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    if os.getppid() != job["parent"]:
        raise Missing("its parent has ended")
    check(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    restrict_files(job["folder"])
    drop_capabilities(capset)
    limits(job)
    filter_calls(audit, looked_into, refused)


def limits(job: dict) -> None:
    cpu = int(job["seconds"]) + 1
    for what, most in (
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_AS, job["memory"]),
        (resource.RLIMIT_FSIZE, job["file"]),
        (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))


def restrict_files(folder: str) -> None:
    """Landlock: Python's own files and libraries may be read, `folder` read and written, nothing else be opened."""
    create, add, restrict = 444, 445, 446
    abi = LIBC.syscall(create, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    if abi < 3:  # before, whatever may be read could be cut to nothing
        raise Missing("the kernel has no Landlock that guards files from being cut (Linux 6.2 and later, unless it is switched off)")
    rights = (1 << (15 if abi < 5 else 16)) - 1
    read = 0b1100  # read files, list folders
    network = struct.pack("=Q", 0b11) if abi >= 4 else b""
    scopes = struct.pack("=Q", 0b11) if abi >= 6 else b""
    attributes = struct.pack("=Q", rights) + network + scopes
    ruleset = check(LIBC.syscall(create, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0)), "Landlock")
    library = os.path.dirname(os.__file__)
    readable = (library, os.path.join(sys.base_prefix, "lib"), "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo")
    allowed = [(path, read) for path in readable] + [(path, 0b100) for path in ("/dev/null", "/dev/urandom", "/dev/zero", "/dev/random")]
    own = rights & ~1  # all but to execute
    for path, given in [*allowed, (folder, own)]:
        try:
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        check(LIBC.syscall(add, ruleset, ctypes.c_int(1), struct.pack("=Qi", given, opened), ctypes.c_uint32(0)), f"Landlock, {path}")
        os.close(opened)
    check(LIBC.syscall(restrict, ruleset, ctypes.c_uint32(0)), "Landlock")
    os.close(ruleset)


def drop_capabilities(capset: int) -> None:
    """Of root nothing is left but the number."""
    version = struct.pack("=Ii", 0x20080522, 0)
    check(LIBC.syscall(capset, version, struct.pack("=6I", 0, 0, 0, 0, 0, 0)), "capset")


def filter_calls(audit: int, looked_into: dict, refused: tuple) -> None:
    """seccomp: the calls in `refused` fail with EPERM; `clone` makes threads only; of `clone3` the kernel is said to know nothing,
    so that libc takes `clone`, whose flags a filter can see. Nobody is made the owner of a file, which has signals sent to it, and
    socket pairs are streams: what goes into another one may be addressed to any socket of the machine."""
    load, equal, at_least, any_bit, mask, answer = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
    allow, kill, fail = 0x7FFF0000, 0x80000000, 0x00050000
    number, machine, first, second, thread = 0, 4, 16, 24, 0x00010000
    either = [(answer, 0, 0, fail | errno.EPERM), (answer, 0, 0, allow)]
    arguments = {
        "clone": [(load, 0, 0, first), (any_bit, 1, 0, thread), *either],
        "fcntl": [(load, 0, 0, second), (equal, 2, 0, 8), (equal, 1, 0, 10), (equal, 0, 1, 15), *either],  # F_SETOWN F_SETSIG F_SETOWN_EX
        "ioctl": [(load, 0, 0, second), (equal, 1, 0, 0x8901), (equal, 0, 1, 0x8902), *either],  # FIOSETOWN SIOCSPGRP
        "socketpair": [(load, 0, 0, first), (equal, 0, 3, 1), (load, 0, 0, second), (mask, 0, 0, 0xF), (equal, 1, 0, 1), *either],
    }  # AF_UNIX and SOCK_STREAM are 1
    program = [
        (load, 0, 0, machine), (equal, 1, 0, audit), (answer, 0, 0, kill),
        (load, 0, 0, number), (at_least, 0, 1, 0x40000000), (answer, 0, 0, kill),  # the x32 numbers of the same calls
        (equal, 0, 1, looked_into["clone3"]), (answer, 0, 0, fail | errno.ENOSYS),
    ]  # fmt: skip
    for call in refused:
        program += [(equal, 0, 1, call), (answer, 0, 0, fail | errno.EPERM)]
    for name, lines in arguments.items():
        program += [(equal, 0, len(lines), looked_into[name]), *lines]
    program.append((answer, 0, 0, allow))
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in program))
    given = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    check(LIBC.prctl(PR_SET_SECCOMP, 2, given, 0, 0), "seccomp")


def check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


if __name__ == "__main__":
    main()
