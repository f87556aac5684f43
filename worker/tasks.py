"""The one Celery task: a wake-up, a message that holds a job's id and nothing else."""

from typing import Any

from celery import shared_task


@shared_task(name="worker.tasks.ring", bind=True, ignore_result=True)  # type: ignore[untyped-decorator]
def wake_agent(self: Any, _job_id: str) -> None:  # noqa: ANN401 - Celery publishes no types
    """Make this process's Agent poll the queue, which says which job is next; the id is for a human who reads Redis."""
    agent = self.app.agent
    if agent is not None:
        agent.wake()
