"""Which addresses lead into no private network: by the registries of IANA, and IPv4 within IPv6 as the IPv4 address."""

import ipaddress

import pytest

from catalog.public_address import is_public

WITHIN = (
    *("127.0.0.1", "10.1.2.3", "172.31.255.255", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0"),
    *("224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1"),
    *("192.0.0.8", "192.0.0.171", "192.88.99.1"),
)
OUTSIDE = ("1.1.1.1", "8.8.8.8", "172.32.0.1", "100.128.0.1")
NOTATIONS = {
    "mapped": lambda four: 0xFFFF << 32 | four,
    "translated": lambda four: 0x64FF9B << 96 | four,
    "6to4": lambda four: 0x2002 << 112 | four << 80,
    "Teredo": lambda four: 0x20010000 << 96 | (four ^ 0xFFFFFFFF),
}


@pytest.mark.parametrize("text", WITHIN)
def test_a_private_address_is_none_in_any_notation(text: str) -> None:
    four = ipaddress.IPv4Address(text)
    assert not is_public(four)
    for notation in NOTATIONS.values():
        assert not is_public(ipaddress.IPv6Address(notation(int(four))))
    # older ones are closed whatever they hold
    for prefix in (0, 0xFFFF << 48):
        assert not is_public(ipaddress.IPv6Address(prefix | int(four)))


@pytest.mark.parametrize("text", OUTSIDE)
def test_a_public_address_is_one_in_each_notation_of_today(text: str) -> None:
    four = ipaddress.IPv4Address(text)
    assert is_public(four)
    assert all(is_public(ipaddress.IPv6Address(notation(int(four)))) for notation in NOTATIONS.values())


@pytest.mark.parametrize(
    ("text", "public"),
    [
        *(
            (each, False)
            for each in ("::", "::1", "fe80::1", "fec0::1", "fc00::1", "fd12::1", "ff02::1", "2001:db8::1")
        ),
        *((each, False) for each in ("64:ff9b:1::1", "100::1", "5f00::1", "3fff::1")),
        *((each, True) for each in ("2606:4700:4700::1111", "2a00:1450:4001::8a")),
    ],
)
def test_of_ipv6_what_is_given_to_anybody_is_public(text: str, public: bool) -> None:
    assert is_public(ipaddress.ip_address(text)) is public
