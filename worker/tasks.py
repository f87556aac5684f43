"""The doorbell: the one Celery task, whose message is a job's id and nothing else."""

from typing import Any

from celery import shared_task


@shared_task(name="worker.tasks.ring", bind=True, ignore_result=True)  # type: ignore[untyped-decorator]
def ring(self: Any, _job_id: str) -> None:  # noqa: ANN401 - Celery publishes no types
    """Have this process's Agent look into the queue, which says whose turn it is; the id is for whoever reads Redis."""
    agent = self.app.agent
    if agent is not None:
        agent.wake()
