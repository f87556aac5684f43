"""Control groups in made trees of `proc` and `sys`, as the kernel's documentation lays them out."""

from pathlib import Path

from catalog.cgroups import free_group_bytes, memory_groups, oom_kills, process_limit

UNIFIED = "29 23 0:26 {root} /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
FIRST = "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
HYBRID = FIRST + "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"


def tree(root: Path, membership: str, mounts: str, files: dict[str, object]) -> Path:
    for name, content in {"proc/self/cgroup": membership, "proc/self/mountinfo": mounts, **files}.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}")
    return root


def test_the_tightest_of_the_own_group_and_those_above_it(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/slice/job"
    files = {
        f"{group}/memory.max": "max\n",
        f"{group}/memory.high": 900,
        f"{group}/memory.current": 700,
        f"{group}/memory.stat": "anon 500\nfile 200\ninactive_file 150\nactive_file 50\n",
        f"{group}/memory.events": "low 0\nhigh 3\nmax 0\noom 0\noom_kill 2\noom_group_kill 0\n",
        "sys/fs/cgroup/slice/memory.max": 2000,
        "sys/fs/cgroup/slice/memory.high": "max",
        "sys/fs/cgroup/slice/memory.current": 1800,
        "sys/fs/cgroup/slice/memory.stat": "inactive_file 100\n",
    }
    root = tree(tmp_path, "0::/slice/job\n", UNIFIED.format(root="/"), files)
    own, above, top = memory_groups(root)
    # 900 - 700 + 150, 2000 - 1800 + 100, and no file at the top
    assert (own.free_bytes(), above.free_bytes(), top.free_bytes()) == (350, 300, None)
    assert free_group_bytes(root) == 300
    assert oom_kills(root) == 2


def test_the_first_version_beside_an_empty_second(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/docker/abc"
    files = {
        f"{group}/memory.limit_in_bytes": 5000,
        f"{group}/memory.usage_in_bytes": 4000,
        f"{group}/memory.stat": "cache 900\ninactive_file 1\ntotal_inactive_file 500\n",
        f"{group}/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": 2**63 - 4096,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": 9000,
    }
    root = tree(tmp_path, "4:memory:/docker/abc\n3:cpu,cpuacct:/x\n0::/\n", HYBRID.format(root="/"), files)
    assert free_group_bytes(root) == 1500
    assert oom_kills(root) == 1


def test_a_container_sees_its_own_group_at_the_mount_point(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory/memory.limit_in_bytes": 800, "sys/fs/cgroup/memory/memory.usage_in_bytes": 300}
    mounted = FIRST.format(root="/docker/abc")
    assert free_group_bytes(tree(tmp_path / "a", "4:memory:/docker/abc\n", mounted, files)) == 500
    # the path of the host's hierarchy, where the container's own namespace hides it
    assert free_group_bytes(tree(tmp_path / "b", "4:memory:/../elsewhere\n", mounted, files)) == 500


def test_no_group_and_no_limit(tmp_path: Path) -> None:
    assert free_group_bytes(tmp_path) is None
    assert oom_kills(tmp_path) == 0
    unlimited = {"sys/fs/cgroup/job/memory.max": "max", "sys/fs/cgroup/job/memory.current": 5}
    assert free_group_bytes(tree(tmp_path, "0::/job\n", UNIFIED.format(root="/"), unlimited)) is None


def test_processes_are_limited_by_the_tightest_group(tmp_path: Path) -> None:
    both = {"sys/fs/cgroup/slice/job/pids.max": "max\n", "sys/fs/cgroup/slice/pids.max": "512\n"}
    assert process_limit(tree(tmp_path / "a", "0::/slice/job\n", UNIFIED.format(root="/"), {**both})) == 512
    mounts = FIRST.replace("memory", "pids").format(root="/")
    first: dict[str, object] = {"sys/fs/cgroup/pids/docker/abc/pids.max": 300}
    assert process_limit(tree(tmp_path / "b", "5:pids:/docker/abc\n", mounts, first)) == 300
    assert process_limit(tmp_path / "none") is None
