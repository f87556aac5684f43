"""Imports of the template: modules that programs of this project spend their first seconds on."""

import importlib
import pkgutil
import sys
from collections.abc import Mapping
from pathlib import Path
from weakref import finalize

ASKS = "asks"
"""A program that starts programs while threads of its own run: it asks a template of its own for them."""
FORKS = "forks"
"""A program that starts one of our programs and has run nothing before that a fork could disturb: it forks itself."""
STARTS_NONE = "starts none"
MODULES = {
    "api": STARTS_NONE,
    "api.__main__": STARTS_NONE,
    "celery": ASKS,
    "jobs.autoscale": STARTS_NONE,
    "jobs.tenancy.api_keys": STARTS_NONE,
    "jobs.webhooks": STARTS_NONE,
    "jobs.webhooks.__main__": STARTS_NONE,
    "migrations": STARTS_NONE,
    "migrations.__main__": STARTS_NONE,
    "tests.machine.template.pasted": ASKS,
    "worker.embedded": ASKS,
    "worker.execution": STARTS_NONE,
    "worker.execution.data.apart.table_program": STARTS_NONE,
    "worker.execution.models.builtin": STARTS_NONE,
    "worker.execution.ranks": FORKS,
    "worker.foreground": ASKS,
    "worker.process.guardian": FORKS,
}
"""Programs that a template runs, and how they start others."""
COMPUTES_NOTHING = {"worker.execution.data.apart.table_program"}
"""Programs to which the variables of numerical libraries say nothing, and which are given few of them."""
COMMANDS_THAT_START = {"export", "plan", "reproduce", "run", "serve"}
"""Words of the command, which is code, that start our programs; after others nothing is asked for."""
IMPORTED = (
    "torch",
    "transformers",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "sklearn.datasets",
    "worker.execution.__main__",
    "worker.execution.data.apart.table_program",
    "worker.execution.data.texts.text_rows",
    "worker.execution.models.builtin",
    "worker.execution.ranks.__main__",
    "kronoscope.cli.main",
    "worker.foreground.__main__",
    "worker.embedded",
    "celery.apps.worker",
    "celery.bin.celery",
    "celery.concurrency.thread",
    "kombu.transport.redis",
    "uvicorn",
    "api.main",
    "jobs.webhooks.__main__",
)
_READ_AT_IMPORT = (
    *("OMP_", "GOMP_", "MKL_", "KMP_", "OPENBLAS_", "NUMEXPR_", "PYTORCH_", "TORCH", "TRANSFORMERS_", "TOKENIZERS_"),
    *("HF_ENDPOINT", "HF_HUB_", "HF_DATASETS_", "LD_", "MALLOC_", "LANG", "LC_", "PYTHON"),
)
_FORKED_WELL = {"jemalloc_bg_thd"}
"""Names of threads that a fork ends and begins anew."""
_NOT_READ = {
    "HF_HUB_DISABLE_PROGRESS_BARS",
    "HF_HUB_DISABLE_TELEMETRY",
    # threadpoolctl and scikit-learn set these as they are imported, here and in whatever asks
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "OPENBLAS_NUM_THREADS",
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONPATH",
    "PYTHONUNBUFFERED",
    "PYTHONWARNINGS",
    "TORCHINDUCTOR_CACHE_DIR",
}
"""Variables with such a name that a forked program reads or sets itself, or that none needs."""


def read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an environment that only an import or the interpreter's start reads.

    A template can run a program whose variables are its own. It asks no hub, as no test does but those that name one.
    """
    given = {
        name: value for name, value in environment.items() if name.startswith(_READ_AT_IMPORT) and name not in _NOT_READ
    }
    return {"HF_HUB_OFFLINE": "1"} | given


def import_all() -> None:
    """Import what the programs need; nothing is computed, so no thread runs afterwards."""
    for name in IMPORTED:
        importlib.import_module(name)
    from catalog import ANALYSES  # noqa: PLC0415 - after torch
    from worker.execution.job_inputs import DATA_SOURCES, MODEL_SOURCES  # noqa: PLC0415 - after torch
    from worker.execution.resolve import resolve  # noqa: PLC0415

    for loader in (*MODEL_SOURCES.values(), *DATA_SOURCES.values()):
        resolve(loader)
    for analysis in ANALYSES.values():
        pkgutil.resolve_name(analysis.implementation)
    for finalizer in list(finalize._registry):  # type: ignore[attr-defined]
        # torch takes its operators apart at the end of each program, which shows nobody anything and takes 40 ms
        finalizer.atexit = False
    transformers = sys.modules["transformers"]
    for name in ("AutoModel", "AutoTokenizer", "AutoConfig"):
        getattr(transformers, name)
    threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    if others := set(threads[1:]) - _FORKED_WELL:
        raise RuntimeError(f"a template must have one thread, and its imports have started {sorted(others)}")
