"""Nobody's word about an address is believed but that of a proxy that the operator has named; none is by default."""

import pytest

from api.connections.client_addresses import ClientAddresses
from api.requests.middleware import _name
from api.settings import Settings
from catalog.public_address import is_loopback
from jobs.errors import SettingsInvalid


@pytest.mark.parametrize("peer", ["127.0.0.1", "::1", "10.0.0.1", "198.51.100.7"])
def test_by_default_no_header_is_read(peer: str) -> None:
    assert Settings.model_fields["trusted_proxies"].default == ()
    nobody = ClientAddresses(())
    assert nobody.forwarded_client(peer, "203.0.113.9") is None
    assert nobody.client_of(
        {"type": "http", "client": (peer, 1), "headers": [(b"x-forwarded-for", b"203.0.113.9")]}
    ) == ("::1" if peer == "::1" else peer)


@pytest.mark.parametrize("proxies", ["", "127.0.0.1", "::1,127.0.0.0/8,localhost"])
def test_the_api_listens_beyond_loopback_behind_a_proxy_alone(proxies: str) -> None:
    beyond = {
        "KRONOSCOPE_DATABASE_URL": "sqlite:////tmp/none.db",
        "KRONOSCOPE_KEY_SECRET": "x" * 16,
        "KRONOSCOPE_HOST": "0.0.0.0",
    }
    with pytest.raises(SettingsInvalid, match="only a proxy bounds silent and slow connections"):
        Settings.from_environment({**beyond, "KRONOSCOPE_TRUSTED_PROXIES": proxies})
    for named in ("10.213.77.2", "gateway", f"{proxies},10.0.0.0/8"):
        assert Settings.from_environment({**beyond, "KRONOSCOPE_TRUSTED_PROXIES": named}).host == "0.0.0.0"


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
