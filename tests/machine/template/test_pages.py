"""Large pages hold what the small ones held."""

import subprocess
import sys

PROGRAM = """
from pathlib import Path
from tests.machine.template.pages import enlarge

def large():
    return sum(int(line.split()[1]) for line in Path("/proc/self/smaps").read_text().splitlines() if "AnonHuge" in line)

kept = [bytes([number % 251]) * 4096 for number in range(20_000)]
before, enlarged = large(), enlarge()
assert all(each == bytes([number % 251]) * 4096 for number, each in enumerate(kept))
print(0 if not enlarged else f"{enlarged >= 2**25} {1024 * (large() - before) >= enlarged / 2}")
"""


def test_what_is_put_into_large_pages_stays_as_it_was() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    # a kernel before 6.1 leaves all pages as they are
    assert done.stdout in ("True True\n", "0\n")
