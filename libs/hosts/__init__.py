"""Names of hosts: which of them can be this machine's own."""

from libs.hosts.names import is_private_name

__all__ = ["is_private_name"]
