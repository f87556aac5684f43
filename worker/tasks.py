"""The doorbell: the one Celery task, whose message is a job's id and nothing else."""

from typing import Any

from celery import shared_task


@shared_task(name="worker.tasks.ring", bind=True, ignore_result=True)  # type: ignore[untyped-decorator]
def ring(self: Any, job_id: str) -> None:  # noqa: ANN401 - Celery publishes no types
    """Ask this process's Agent to take the job; where it does not, the database keeps it."""
    agent = self.app.agent
    if agent is not None:
        agent.offer(str(job_id))
