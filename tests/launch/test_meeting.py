"""The address at which several hosts meet."""

import ipaddress
from typing import Any

import pytest

from shardwise.base.errors import ConfigError
from shardwise.launch.meeting import addresses_here, meeting_address


def hello(*addresses: str, client: str = "", server: str = "") -> dict[str, Any]:
    return {"client": client, "server": server, "addresses": list(addresses)}


@pytest.mark.parametrize(
    ("hellos", "given", "found"),
    [
        ([hello(server="10.0.0.1"), hello(server="10.0.0.2")], "10.9.9.9", "10.9.9.9"),
        ([hello(server="10.0.0.1"), hello(server="10.0.0.2")], None, "10.0.0.1"),
        ([hello(server="fd00::1"), hello(server="fd00::2")], None, "fd00::1"),
        ([hello(server="127.0.1.1"), hello(client="10.0.0.1", server="10.0.0.2")], None, "10.0.0.1"),
        ([hello(server="127.0.0.1", client="127.0.0.1"), hello("10.1.0.2/24")], None, None),
        ([hello("10.2.0.1/16", "10.1.0.1/24"), hello("10.1.0.2/24")], None, "10.1.0.1"),
        ([hello("172.17.0.1/16", "fd00:1::1/64"), hello("172.17.0.1/16", "fd00:1::2/64")], None, "fd00:1::1"),
        ([hello("10.1.0.1/24"), hello("10.1.0.2/24"), hello("10.2.0.3/24")], None, None),
        ([hello("nonsense", "169.254.0.1/16"), hello("169.254.0.2/16")], None, None),
    ],
)
def test_the_first_address_that_is_there(
    hellos: list[dict[str, Any]], given: str | None, found: str | None
) -> None:
    if found is None:
        with pytest.raises(ConfigError, match="gpu1.invalid has no address .* give --master_addr"):
            meeting_address(hellos, "gpu1.invalid", given)
    else:
        assert meeting_address(hellos, "gpu1.invalid", given) == found


def test_a_name_of_loopback_is_no_address_for_others() -> None:
    with pytest.raises(ConfigError, match="localhost has no address"):
        meeting_address([hello(), hello()], "localhost", None)


def test_addresses_of_this_host_have_their_networks() -> None:
    for text in addresses_here():
        assert not ipaddress.ip_interface(text).is_loopback and "/" in text
