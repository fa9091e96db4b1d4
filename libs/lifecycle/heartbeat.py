"""Signs of life of a process to the one that started it: a byte in a pipe now and then, from its event loop.

For processes that nobody can ask alone, because they share a port, or none listens. A process that is stopped, or
whose event loop hangs, writes nothing. Owns the pipe and the patience; what is done about silence is the starter's.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, MutableMapping
from typing import Final

# The descriptor to which a process writes.
_VARIABLE: Final = "OCTAVO_HEARTBEAT_FD"
_BEAT_SECONDS: Final = 0.5
# Silence is counted in so many parts: a starter that was stopped itself, and so has read nothing for long, waits on
# for a beat.
_NUM_PARTS: Final = 4
# All that a pipe holds, so that old beats stand for no new ones.
_READ_BYTES: Final = 65_536


class HeartbeatPipe:
    """The starter's end of a pipe, and the end that it hands to the process."""

    def __init__(self) -> None:
        self._read_fd, self.write_fd = os.pipe()
        for descriptor in (self._read_fd, self.write_fd):
            os.set_blocking(descriptor, False)

    @property
    def environ(self) -> Mapping[str, str]:
        """What tells the process about the pipe; ``write_fd`` must be passed to it."""
        return {_VARIABLE: str(self.write_fd)}

    async def wait_until_silent(self, limit_seconds: float) -> None:
        """Return when the process has beaten once and then not for so long; waits for ever for the first beat."""
        has_begun, num_missed = False, 0
        while num_missed < _NUM_PARTS:
            await asyncio.sleep(limit_seconds / _NUM_PARTS)
            if self._has_beaten():
                has_begun, num_missed = True, 0
            elif has_begun:
                num_missed += 1

    def _has_beaten(self) -> bool:
        """Tell whether it has since the last look: also while nobody could look."""
        try:
            return bool(os.read(self._read_fd, _READ_BYTES))
        except BlockingIOError:
            return False

    def close(self) -> None:
        """Close both ends."""
        os.close(self._read_fd)
        os.close(self.write_fd)


async def beat(descriptor: int) -> None:
    """Write signs of life until cancelled, or until nobody reads them."""
    while True:
        try:
            os.write(descriptor, b".")
        except BlockingIOError:
            # The starter is stopped; what it has not read yet is enough.
            pass
        except OSError:
            return
        await asyncio.sleep(_BEAT_SECONDS)


def take_descriptor(environ: MutableMapping[str, str]) -> int | None:
    """Return where this process writes, if its starter listens; what it starts itself does not hear of it."""
    value = environ.pop(_VARIABLE, None)
    return None if value is None else int(value)
