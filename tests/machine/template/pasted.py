"""Code that is no program of this project, run as one: a block of a page, an example, pytest itself.

    python -P -m tests.machine.template.pasted FILE.py|CODE ARGUMENTS…

So it is forked from a template, which has imported torch and what else such code spends its first seconds on.
"""

import runpy
import sys

PASTED = (sys.executable, "-P", "-m", "tests.machine.template.pasted")
PYTEST = (*PASTED, "import pytest; raise SystemExit(pytest.main())")


def main() -> None:
    """Run the file or the code, as the interpreter would run it in this folder."""
    what, *rest = sys.argv[1:]
    if what.endswith(".py"):
        sys.argv = [what, *rest]
        runpy.run_path(what, run_name="__main__")
    else:
        sys.argv = ["-c", *rest]
        sys.path.insert(0, "")
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()
