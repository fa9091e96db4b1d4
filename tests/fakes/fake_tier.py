"""Any tier as the supervisor sees it: a command with flags, a health check, an end at SIGTERM.

``--behaviour`` makes it misbehave; ``--journal FILE`` makes it note its end.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from libs.config import ConfigError
from libs.errors import ModelLoadFailed
from libs.lifecycle import Lifecycle, run
from libs.rpc import RpcServer, make_server


def main() -> None:
    tier, *arguments = sys.argv[1:]
    flags = dict(argument.removeprefix("--").split("=", 1) for argument in arguments if "=" in argument)
    behaviour = flags.get("behaviour", "")
    print(f"fake {tier} starts", file=sys.stderr)
    if behaviour == "refuse-config":
        print(ConfigError("The fake refuses its configuration."), file=sys.stderr)
        sys.exit(2)

    async def serve(lifecycle: Lifecycle) -> None:
        if behaviour == "fail-to-load":
            raise ModelLoadFailed("The fake has no weights.")
        if behaviour == "ignore-sigterm":
            asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if "listen-address" in flags:
            server = make_server(flags["listen-address"], [])
            await server.start()
            await server.set_serving(behaviour != "never-ready")
            if tier == "worker":
                await _load(server, behaviour)
            await lifecycle.wait_for_shutdown()
            await server.stop(0)
        else:
            host = flags.get("host") or flags["listen-host"]
            async with await asyncio.start_server(_answer, host, int(flags["port"])):
                await lifecycle.wait_for_shutdown()
        if "journal" in flags:
            with Path(flags["journal"]).open("a") as journal:
                journal.write(f"{tier}\n")

    run(serve, tier=tier)


async def _load(server: RpcServer, behaviour: str) -> None:
    """Have the health of a worker that loads its model, or die of that while there is a file."""
    if behaviour.startswith("die-at-load-while:") and Path(behaviour.partition(":")[2]).exists():
        os._exit(1)
    await server.set_health("octavo.worker.v1.Model", is_serving=True)


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readline()
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    await writer.drain()
    writer.close()


if __name__ == "__main__":
    main()
