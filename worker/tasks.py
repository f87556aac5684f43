"""The one Celery task: a wake-up, of which nothing but its coming counts."""

from typing import Any

from celery import shared_task


@shared_task(name="worker.tasks.ring", bind=True, ignore_result=True)  # type: ignore[untyped-decorator]
def wake_agent(self: Any, _message_id: str) -> None:  # noqa: ANN401 - Celery publishes no types
    """Make this process's Agent poll the queue, which says which job is next."""
    agent = self.app.agent
    if agent is not None:
        agent.wake()
