"""A TCP proxy that makes what is behind it slow, silent or unreachable."""

from __future__ import annotations

import asyncio
from contextlib import suppress

_CHUNK_BYTES = 65536


class TcpProxy:
    """Passes bytes between clients and one server."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._target = (host, port)
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        # Every answer comes so much later.
        self.delay_seconds = 0.0
        # Connections break, and new ones are not served.
        self._is_cut = False

    async def start(self) -> int:
        """Listen; returns the port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def stop(self) -> None:
        """Close everything."""
        await self.cut()
        if self._server is not None:
            self._server.close()

    async def cut(self) -> None:
        """Break all connections and let no new ones through."""
        self._is_cut = True
        connections = list(self._connections)
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    def mend(self) -> None:
        """Let connections through again."""
        self._is_cut = False

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "a connection is served by a task"
        self._connections.add(task)
        try:
            if not self._is_cut:
                await self._connect(reader, writer)
        except asyncio.CancelledError:
            # That of the proxy's own cut ends here; asyncio's server would report it.
            pass
        finally:
            self._connections.discard(task)
            writer.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection(*self._target)
        pumps = [
            asyncio.create_task(_pump(reader, server_writer)),
            asyncio.create_task(self._pump_late(server_reader, writer)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            server_writer.close()

    async def _pump_late(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_CHUNK_BYTES):
            await asyncio.sleep(self.delay_seconds)
            writer.write(data)
            await writer.drain()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
