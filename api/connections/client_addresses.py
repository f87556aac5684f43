"""The address that a client is counted by: its own, or the one that a listed proxy names for it.

The header is read of proxies that are listed in ``trusted_proxies`` alone; it decides whom a request is counted for,
and nothing else: no right comes with an address.
"""

import ipaddress
from collections.abc import Iterable
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import Scope

from jobs.errors import SettingsInvalid

GATEWAY = "gateway"
"""The entry that stands for the gateway of this machine's, or container's, default route."""
_ROUTES = Path("/proc/net/route")
_HEADER = "x-forwarded-for"
_MAX_FORWARDED = 20
"""Entries of `X-Forwarded-For` that are looked at, from the last."""
_V6_PREFIX = 64

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class ClientAddresses:
    """The proxies that are believed, and the clients behind them."""

    def __init__(self, trusted: Iterable[str]) -> None:
        """Read the operator's list."""
        self._trusted = tuple(network for entry in trusted for network in _networks(entry))

    def forwarded_client(self, peer: str, header: str) -> str | None:
        """Return the client for whom a proxy forwards a request."""
        address = _parse(peer)
        if address is None or not self._is_trusted(address):
            return None
        for entry in reversed(header.rsplit(",", _MAX_FORWARDED)):
            named = _parse(entry.strip())
            if named is None:
                return None
            if not self._is_trusted(named):
                return _name(named)
        return None

    def client_of(self, scope: Scope) -> str:
        """Return the client of a request."""
        peer: str = (scope.get("client") or ("",))[0]
        forwarded = Headers(scope=scope).getlist(_HEADER)
        named = self.forwarded_client(peer, ",".join(forwarded)) if forwarded else None
        address = _parse(peer)
        return named or (peer if address is None else _name(address))

    def _is_trusted(self, address: _Address) -> bool:
        return any(address in network for network in self._trusted)


def _name(address: _Address) -> str:
    """Return the name to count by: one subscriber has a whole network of IPv6 addresses."""
    if isinstance(address, ipaddress.IPv6Address) and not address.is_loopback:
        return str(ipaddress.ip_network((address, _V6_PREFIX), strict=False))
    return str(address)


def _parse(text: str) -> _Address | None:
    host = text.partition("%")[0]
    if host.startswith("["):
        host = host[1:].partition("]")[0]
    elif host.count(":") == 1:  # some proxies name the port too
        host = host.partition(":")[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return (address.ipv4_mapped or address) if isinstance(address, ipaddress.IPv6Address) else address


def _networks(entry: str) -> tuple[_Network, ...]:
    if entry == GATEWAY:
        return tuple(ipaddress.ip_network(gateway) for gateway in default_gateways())
    try:
        return (ipaddress.ip_network(entry, strict=False),)
    except ValueError:
        raise SettingsInvalid(
            f"KRONOSCOPE_TRUSTED_PROXIES has {entry[:40]!r}, which is neither an address nor a network; "
            "write a comma list such as 127.0.0.1,10.0.0.0/8, or `gateway`"
        ) from None


def default_gateways(routes: Path = _ROUTES) -> tuple[str, ...]:
    """Return the gateways of the default routes."""
    try:
        lines = routes.read_text().splitlines()[1:]
    except OSError:
        return ()
    fields = [line.split() for line in lines]
    gateways = [each[2] for each in fields if len(each) > 2 and each[1] == "00000000" and each[2] != "00000000"]
    return tuple(str(ipaddress.IPv4Address(bytes.fromhex(each)[::-1])) for each in gateways)
