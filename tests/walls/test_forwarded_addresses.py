"""Nobody's word about an address is believed but that of a proxy that the operator has named; none is by default."""

import pytest

from api.connections.client_addresses import ClientAddresses
from api.requests.middleware import _name
from api.settings import Settings, is_loopback


@pytest.mark.parametrize("peer", ["127.0.0.1", "::1", "10.0.0.1", "198.51.100.7"])
def test_by_default_no_header_is_read(peer: str) -> None:
    assert Settings.model_fields["trusted_proxies"].default == ()
    nobody = ClientAddresses(())
    assert nobody.forwarded_client(peer, "203.0.113.9") is None
    assert nobody.client_of(
        {"type": "http", "client": (peer, 1), "headers": [(b"x-forwarded-for", b"203.0.113.9")]}
    ) == ("::1" if peer == "::1" else peer)


def test_loopback_stays_a_shared_address() -> None:
    nobody = ClientAddresses(())
    assert (nobody.direct_client("127.0.0.1"), nobody.direct_client("::1")) == (None, None)
    assert nobody.direct_client("198.51.100.7") == "198.51.100.7"


@pytest.mark.parametrize(
    ("host", "ours"),
    [
        ("127.0.0.1:8000", True),
        ("localhost", True),
        ("[::1]:8000", True),
        ("[::1]", True),
        ("[::1]evil.example", False),
        ("[::1]:80evil.example", False),
        ("127.0.0.1:80.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("localhost:evil.example", False),
        ("", False),
    ],
)
def test_a_host_is_loopback_as_a_whole(host: str, ours: bool) -> None:
    assert is_loopback(_name(host)) is ours
