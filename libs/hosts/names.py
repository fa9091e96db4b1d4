"""By which names a server of one machine may be called.

Such a server listens on an address that only its machine can reach, but a browser on that machine shows pages of
others. A page cannot read what another site answers; so its author lets the name of the page's own site point at
127.0.0.1 (DNS rebinding), and then the browser takes the server for that site. Its requests still say the name.
Owns the rule; it must not know HTTP.
"""

from __future__ import annotations

import ipaddress
from typing import Final

# Names under these are nobody's on the internet.
_PRIVATE_ENDINGS: Final = (".localhost", ".local", ".internal")


def is_private_name(authority: str) -> bool:
    """Tell whether a host and port, as a request says them, cannot be the name of somebody else's site.

    That is so for addresses, for names of one part, and for names with a private ending.
    """
    host = _host_of(authority)
    return "." not in host or host.endswith(_PRIVATE_ENDINGS) or _is_address(host)


def _host_of(authority: str) -> str:
    if authority.startswith("["):
        return authority[1:].partition("]")[0]
    return authority.partition(":")[0].lower().removesuffix(".")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
