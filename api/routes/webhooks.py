"""Webhooks over HTTP: create, list, rotate, delete, and what came of deliveries."""

from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool

from api.problem_details import Refusal, not_found
from api.requests.auth import Reader, Submitter
from api.requests.body import read_record
from api.requests.openapi import error_responses, webhook_body
from api.service import Service, ServiceOf
from catalog.webhooks import DeliveryListView, WebhookListView, WebhookRequest, WebhookView
from jobs.webhooks import registry

router = APIRouter(prefix="/v1/webhooks", tags=["webhooks"])

_NONE = "there is no such webhook"


@router.post(
    "",
    operation_id="create_webhook",
    status_code=201,
    summary="Create a webhook",
    responses=error_responses(408, 409, 413, 415),
    openapi_extra=webhook_body(),
)
async def create(request: Request, caller: Submitter, service: ServiceOf) -> WebhookView:
    """Post each change of a job's state to an address, signed as Standard Webhooks; the secret is shown this once."""
    url = (await read_record(request, service.settings, WebhookRequest)).url
    if len(await run_in_threadpool(registry.list_webhooks, service.engine, caller.tenant_id)) >= registry.MOST_WEBHOOKS:
        limit = f"you have {registry.MOST_WEBHOOKS} webhooks, which is the limit; delete one first"
        raise Refusal(409, "too-many-webhooks", "Too many webhooks", limit)
    return await run_in_threadpool(registry.create_webhook, service.engine, _keys(service), caller.tenant_id, url)


@router.get("", operation_id="list_webhooks", summary="List webhooks", responses=error_responses())
def list_all(caller: Reader, service: ServiceOf) -> WebhookListView:
    """Your webhooks, without their secrets."""
    return WebhookListView(items=registry.list_webhooks(service.engine, caller.tenant_id))


@router.post(
    "/{webhook_id}:rotate", operation_id="rotate_webhook", summary="Rotate a secret", responses=error_responses(404)
)
def rotate(webhook_id: str, caller: Submitter, service: ServiceOf) -> WebhookView:
    """Give a webhook another secret, shown this once; the one before it signs too until the next rotation."""
    rotated = registry.rotate_secret(service.engine, _keys(service), caller.tenant_id, webhook_id)
    if rotated is None:
        raise not_found(_NONE)
    return rotated


@router.delete(
    "/{webhook_id}",
    operation_id="delete_webhook",
    status_code=204,
    summary="Delete a webhook",
    responses=error_responses(404),
)
def delete(webhook_id: str, caller: Submitter, service: ServiceOf) -> Response:
    """Delete a webhook with its deliveries; the answer has no body."""
    if not registry.delete_webhook(service.engine, caller.tenant_id, webhook_id):
        raise not_found(_NONE)
    return Response(status_code=204)


@router.get(
    "/{webhook_id}/deliveries",
    operation_id="list_deliveries",
    summary="List deliveries",
    responses=error_responses(404),
)
def deliveries(webhook_id: str, caller: Reader, service: ServiceOf) -> DeliveryListView:
    """The newest deliveries to a webhook, with their outcomes; they are kept for 30 days or longer."""
    if webhook_id not in {each.id for each in registry.list_webhooks(service.engine, caller.tenant_id)}:
        raise not_found(_NONE)
    return DeliveryListView(items=registry.list_deliveries(service.engine, caller.tenant_id, webhook_id))


def _keys(service: Service) -> str:
    """Return the operator's keys of secrets."""
    if service.settings.webhook_key is None:
        off = "this service sends no webhooks: its operator has not set KRONOSCOPE_WEBHOOK_KEY"
        raise Refusal(503, "no-webhooks", "No webhooks", off)
    return service.settings.webhook_key
