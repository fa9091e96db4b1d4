"""The processes behind a server on this machine, and the processor time that each has used."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

import psutil

_MODULE = "services.cli"
# The tiers of Octavo that are Python all through; a worker is mostly its kernels.
PYTHON_TIERS = ("gateway", "router", "engine", "telemetry", "up")


class ServerProcesses:
    """All processes of the server that listens at a URL; none when it is elsewhere or cannot be looked into."""

    def __init__(self, base_url: str) -> None:
        self._processes = _processes_behind(base_url)

    def cpu_seconds(self) -> dict[str, float]:
        """Return user and system time so far by process name."""
        seconds: dict[str, float] = {}
        for name, process in self._processes.items():
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            seconds[name] = times.user + times.system
        return seconds


def spent(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return what was used between two measurements."""
    return {name: round(seconds - before.get(name, 0.0), 2) for name, seconds in after.items()}


def share_of_python_tiers(cpu_seconds: Mapping[str, float]) -> float | None:
    """Return the part of Octavo's processor time that its Python tiers took, or None when it is not Octavo."""
    total = sum(cpu_seconds.values())
    if not total or not any(name.startswith("worker") for name in cpu_seconds):
        return None
    tiers = sum(seconds for name, seconds in cpu_seconds.items() if name.rpartition("-")[0] in PYTHON_TIERS)
    return round(tiers / total, 4)


def _processes_behind(base_url: str) -> dict[str, psutil.Process]:
    url = urlsplit(base_url)
    if not _is_local(url.hostname or ""):
        return {}
    try:
        connections = psutil.net_connections("tcp")
    except psutil.Error:
        return {}
    for connection in connections:
        # An address is empty while a connection is being closed.
        port = connection.laddr.port if connection.laddr else None
        if connection.status == psutil.CONN_LISTEN and port == url.port and connection.pid:
            return _family_of(psutil.Process(connection.pid))
    return {}


def _family_of(listener: psutil.Process) -> dict[str, psutil.Process]:
    parent = listener.parent()
    root = parent if parent is not None and _tier_of(parent) == "up" else listener
    named: dict[str, psutil.Process] = {}
    for process in (root, *root.children(recursive=True)):
        tier = _tier_of(process)
        number = sum(name.rpartition("-")[0] == tier for name in named)
        named[f"{tier}-{number}"] = process
    return named


def _tier_of(process: psutil.Process) -> str:
    """Return the tier that a process of Octavo runs, or the name of another program."""
    try:
        words = process.cmdline()
        if _MODULE in words:
            return words[words.index(_MODULE) + 1]
        if len(words) > 2 and words[1].endswith("/octavo"):
            return words[2]
        return process.name()
    except psutil.Error:
        return "gone"


def _is_local(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
