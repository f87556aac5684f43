"""The worker without Celery, whose jobs are computed by the chaos campaign's quick child: it starts in a second."""

import functools
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

import worker.agent.agent  # noqa: E402 - found by the line above
import worker.embedded  # noqa: E402
import worker.service  # noqa: E402

child = [sys.executable, "-P", str(ROOT / "tests/chaos/stack/quick_child.py")]
worker.service.Agent = functools.partial(worker.agent.agent.Agent, command=child)  # type: ignore[attr-defined]

if __name__ == "__main__":
    sys.exit(worker.embedded.main())
