"""Public addresses, of the internet and no private network, in whatever notation they come; and loopback ones."""

import ipaddress

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_RESERVED = tuple(map(ipaddress.ip_network, ("192.0.0.0/24", "192.88.99.0/24", "3fff::/20")))
"""Assigned by IANA to protocols, relays and documentation; `is_global` of some versions of Python passes them."""
_UNICAST = ipaddress.ip_network("2000::/3")
"""All of IPv6 that is given to anybody; beyond it are older notations of IPv4, as `::127.0.0.1`."""


def is_public(address: Address) -> bool:
    """Return whether an address, and the IPv4 address within it, belongs to no private network."""
    if any(address in network for network in _RESERVED):
        return False
    if isinstance(address, ipaddress.IPv6Address):
        within = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
        if address in _NAT64:
            within = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if within is not None:
            return is_public(within)
        return address.is_global and address in _UNICAST
    return address.is_global and not address.is_multicast


def is_loopback(host: str) -> bool:
    """Return whether an address, a name or an IP in brackets or not, reaches this machine alone.

    True for ``localhost`` and the loopback addresses; False for every other name, resolved or not.
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
