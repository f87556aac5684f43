"""The one Celery task: a wake-up, a message that holds a job's id and nothing else."""

from typing import Any

from celery import shared_task


@shared_task(name="worker.tasks.ring", bind=True, ignore_result=True)  # type: ignore[untyped-decorator]
def wake_agent(self: Any, _job_id: str) -> None:  # noqa: ANN401 - Celery publishes no types
    """Make this process's Agent poll the queue, which says which job is next.

    Args:
        self: The task, bound by Celery; its application holds the Agent.
        _job_id: The id of a job that waits, for a reader of Redis; the Agent does not use it.
    """
    agent = self.app.agent
    if agent is not None:
        agent.wake()
