"""Resolve ``package.module:callable`` to the callable: the one place that imports by name.

Our own entries (the menu's functions, the sources' loaders) resolve as they are. A caller's
factory is resolved with the caller's paths appended *last* to ``sys.path``, so that nothing of
theirs can take the place of an installed package; where that hides theirs, it is said.
"""

import importlib
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from worker.execution.refusal import Refusal, names

_ALL = frozenset({"api", "catalog", "engine", "jobs", "kronoscope", "migrations", "worker"})
OUR_MODULES = _ALL if __name__.partition(".")[0] == "worker" else frozenset({"kronoscope"})
"""Names that a caller's module cannot have: those of a checkout's folders, or of the wheel's one package."""


def resolve(name: str) -> Callable[..., Any]:
    """Import a callable of this project."""
    module, _, attribute = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return found


def resolve_factory(name: str, paths: Sequence[Path], allowed: Sequence[str], pointer: str) -> Callable[..., Any]:
    """Import a caller's factory."""
    if "*" not in allowed and name not in allowed:
        raise Refusal(
            f"factory `{name}` is not listed by this service's operator; use a listed one, or `kronoscope run`",
            pointer=pointer,
            code="not_allowed",
        )
    module_name, _, attribute = name.partition(":")
    _require_reachable(module_name.partition(".")[0], paths, pointer)
    for path in map(str, paths):
        if path not in sys.path:
            sys.path.append(path)
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        looked = names([str(path) for path in paths]) or "the installed packages"
        raise Refusal(
            f"module `{error.name}` was not found; it is looked for among the installed packages and in {looked}",
            pointer=pointer,
            code="factory_not_found",
        ) from error
    except (Exception, SystemExit) as error:
        raise Refusal(
            f"importing `{module_name}` raised {describe_exception(error)}",
            pointer=pointer,
            code="factory_failed",
        ) from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        fault = "has no" if factory is None else "holds no callable"
        raise Refusal(f"module `{module_name}` {fault} `{attribute}`", pointer=pointer, code="factory_not_found")
    found: Callable[..., Any] = factory
    return found


def call_factory(factory: Callable[..., Any], name: str, kwargs: dict[str, Any], pointer: str) -> Any:  # noqa: ANN401
    """Call a caller's code; what it raises is reported as the caller's fault."""
    try:
        return factory(**kwargs)
    except (Exception, SystemExit) as error:
        raise Refusal(
            f"factory `{name}` raised {describe_exception(error)}",
            pointer=pointer,
            code="factory_failed",
        ) from error


def describe_exception(error: BaseException) -> str:
    """Describe an exception of a caller's code."""
    try:
        text = str(error)[:500]
    except (Exception, SystemExit):  # noqa: BLE001 - a caller's code again
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _require_reachable(top: str, paths: Sequence[Path], pointer: str) -> None:
    theirs = next((path for path in paths if (path / f"{top}.py").is_file() or (path / top).is_dir()), None)
    if theirs is None:
        return
    installed = None
    if top in OUR_MODULES or top in sys.stdlib_module_names:
        installed = "Kronoscope" if top in OUR_MODULES else "Python"
    else:
        elsewhere = [entry for entry in sys.path if entry and Path(entry) not in {Path(path) for path in paths}]
        spec = importlib.machinery.PathFinder.find_spec(top, elsewhere)
        if spec is not None and spec.origin is not None:
            installed = f"an installed package ({spec.origin})"
    if installed is not None:
        raise Refusal(
            f"`{top}` in {theirs} has the name of a module of {installed}, which comes first; rename yours",
            pointer=pointer,
            code="name_clash",
        )
