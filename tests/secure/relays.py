"""A consortium whose sites are reached through FLARE's relays, each with a kit of its own, on loopback."""

from collections.abc import Mapping, Sequence
from typing import Any

from tests.secure.consortium import free_port


def participants(relays: Mapping[str, Sequence[str]], *, gathering: bool) -> list[dict[str, Any]]:
    """Entries of a project file: FLARE's relays and the sites that connect through them.

    Args:
        relays: by relay the sites behind it.
        gathering: a client of the relay's name, `<relay>-sum`, is the parent of its sites: they get their tasks from it
            and answer to it. Else the relay only carries the messages between sites and server.
    """
    entries: list[dict[str, Any]] = []
    for relay, sites in relays.items():
        # FLARE leaves what connects to a relay in clear text unless this says otherwise
        place = {"default_host": "localhost", "port": free_port(), "scheme": "tcp", "connection_security": "mtls"}
        entries.append({"name": relay, "type": "relay", "org": "consortium", "listening_host": place})
        behind = {"type": "client", "connect_to": {"name": relay}}
        if gathering:
            entries.append({"name": f"{relay}-sum", "org": "consortium", **behind})
            behind = {**behind, "parent": f"{relay}-sum"}
        entries += [{"name": site, "org": "hospitals", **behind} for site in sites]
    return entries
