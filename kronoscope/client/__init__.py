"""The HTTP client: ``Client``, its errors, and the records that it returns."""

from kronoscope.client.client import DEFAULT_URL, Client
from kronoscope.client.errors import ClientError, DownloadFailed, ServiceUnreachable

__all__ = ["DEFAULT_URL", "Client", "ClientError", "DownloadFailed", "ServiceUnreachable"]
