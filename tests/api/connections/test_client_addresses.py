"""Whom a request is counted for: the other end of its connection, or whom a listed proxy names."""

from pathlib import Path

import pytest

from api.connections.client_addresses import ClientAddresses, default_gateways
from jobs.errors import SettingsInvalid

ADDRESSES = ClientAddresses(("127.0.0.1", "::1", "10.0.0.0/8"))


@pytest.mark.parametrize(
    ("peer", "client"),
    [
        ("198.51.100.7", "198.51.100.7"),
        ("::ffff:198.51.100.7", "198.51.100.7"),
        ("2001:db8:0:1:aaaa::1", "2001:db8:0:1::/64"),
        ("2001:db8:0:1:bbbb::2", "2001:db8:0:1::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("127.0.0.1", "127.0.0.1"),
        ("::1", "::1"),
        ("10.2.3.4", "10.2.3.4"),
        ("", ""),
    ],
)
def test_the_other_end_of_a_connection(peer: str, client: str) -> None:
    assert ADDRESSES.client_of({"type": "http", "client": (peer, 1), "headers": []}) == client


@pytest.mark.parametrize(
    ("peer", "header", "client"),
    [
        ("127.0.0.1", "198.51.100.7", "198.51.100.7"),
        ("127.0.0.1", "198.51.100.7:41234", "198.51.100.7"),
        ("127.0.0.1", "[2001:db8::1]:41234", "2001:db8::/64"),
        # what stands before the last foreign address, the client may have written itself
        ("127.0.0.1", "203.0.113.9, 198.51.100.7, 10.1.1.1", "198.51.100.7"),
        ("127.0.0.1", "10.1.1.1", None),
        ("127.0.0.1", "198.51.100.7, unknown", None),
        ("127.0.0.1", "", None),
        ("127.0.0.1", "," * 10_000, None),
        ("198.51.100.7", "203.0.113.9", None),
    ],
)
def test_whom_a_proxy_names(peer: str, header: str, client: str | None) -> None:
    assert ADDRESSES.forwarded_client(peer, header) == client


def test_the_gateway_of_a_container(tmp_path: Path) -> None:
    routes = tmp_path / "route"
    routes.write_text(
        "Iface\tDestination\tGateway\tFlags\neth0\t000012AC\t00000000\t0001\neth0\t00000000\t010012AC\t0003\n"
    )
    assert default_gateways(routes) == ("172.18.0.1",)
    assert default_gateways(tmp_path / "none") == ()


def test_an_entry_that_is_no_address_is_refused() -> None:
    with pytest.raises(SettingsInvalid, match="'nginx'"):
        ClientAddresses(("10.0.0.0/8", "nginx"))
