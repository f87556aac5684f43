"""The source that a command names: a job of a service by its id, or the folder of a foreground run."""

import os
from pathlib import Path

import httpx

from kronoscope.client.client import Client, ClientError, ServiceUnreachable


def is_folder(source: str) -> bool:
    """Return whether a source is a folder; no id has a slash."""
    # of what no path can be, such as 300 letters, Path.is_dir raises
    return "/" in source or os.path.isdir(source)  # noqa: PTH112


def find_job(client: Client, source: str) -> str:
    """Return the whole id of a job where a folder could have been named as well.

    Args:
        source: A job's id, or the end of one, that is not a folder.

    Raises:
        ClientError: If the service has no such job, or does not answer; it names the source.
    """
    try:
        return client.job(client.full_id(source)).id
    except ServiceUnreachable as error:
        error.detail = f"there is no folder {source} here, and {error.detail}"
        raise
    except ClientError as error:
        if error.status != httpx.codes.NOT_FOUND:
            raise
        message = (
            f"{source} is neither a folder here nor a job at {client.url} ({'; '.join(error.lines)}); "
            "`kronoscope jobs` lists the jobs there"
        )
        raise ClientError(error.status, error.title, message) from error


def find_service_job(client: Client, job_id: str) -> str:
    """Return the whole id of a job; ``ClientError`` names what is no job of the service."""
    try:
        return client.job(client.full_id(job_id)).id
    except ClientError as error:
        if error.status != httpx.codes.NOT_FOUND:
            raise
        is_run = os.path.lexists(Path(job_id, "job.json"))
        remedy = (
            f"it is the folder of a run: `kronoscope run DOCUMENT -o {job_id}` computes it, `kronoscope results "
            f"{job_id}` shows it"
            if is_run
            else "`kronoscope jobs` lists the jobs there"
        )
        message = f"{job_id} is not a job at {client.url} ({'; '.join(error.lines)}); {remedy}"
        raise ClientError(error.status, error.title, message) from error
