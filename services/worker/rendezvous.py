"""How the ranks of a group find each other, share memory and hear of each other's end. Linux only.

Owns the socket between rank 0 and each other rank, and the shared memory. It must not know what is exchanged.

Rank 0 listens under the group's id in the abstract namespace of Unix sockets, which has no files: a process that is
killed at any moment leaves nothing behind, neither a name nor memory, and an id that was used has no listener any
more, so that a rank that starts again alone cannot come into the old group. The memory is a file without a name
(memfd) whose descriptor rank 0 hands out. The sockets stay open: the system closes those of a process that dies,
and the others hear of it at once, also in the middle of a step.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libs.errors import ModelLoadFailed, WorkerLost
from libs.obs import get_logger
from services.worker.exchange import MAX_RANKS, Exchange
from services.worker.input_batch import FlatBatch
from services.worker.rank_group import LoneRank, Membership, RankGroup

_log = get_logger("rendezvous")

# A rank loads for minutes where models are large; the engine gives up before, or asks anew.
_FORM_SECONDS = 1_800.0
_POLL_MILLISECONDS = 100
_RETRY_SECONDS = 0.05
_MAX_MESSAGE_BYTES = 4_096
_LEAVE_SECONDS = 2.0


def form_group(membership: Membership, on_wait: Callable[[], None]) -> RankGroup:
    """Return when all ranks have come together.

    ``on_wait`` is called again and again while others are waited for; what it raises ends the waiting.

    Raises:
        WorkerLost: another rank left while the group was forming, or did not come.
        ModelLoadFailed: the ranks do not serve the same, or this system cannot share memory.
    """
    if membership.layout.num_ranks == 1:
        return LoneRank(membership.num_blocks)
    if not hasattr(os, "memfd_create"):
        raise ModelLoadFailed("Several ranks need Linux; serve with a tensor_parallel_size of 1 here.")
    if membership.layout.num_ranks > MAX_RANKS:
        raise ModelLoadFailed(f"A group has {MAX_RANKS} ranks at most, not {membership.layout.num_ranks}.")
    waiting = _Waiting(on_wait, time.monotonic() + _FORM_SECONDS)
    with ExitStack() as on_failure:
        formed = (_gather if membership.rank == 0 else _come)(membership, waiting, on_failure)
        on_failure.pop_all()
    _log.info(
        "ranks joined", rank=membership.rank, num_ranks=membership.layout.num_ranks, group_id=membership.group_id
    )
    return formed


class SharedMemoryGroup:
    """Ranks on one machine. A thread listens for their ends."""

    def __init__(
        self, membership: Membership, num_blocks: int, memory: mmap.mmap, peers: list[socket.socket]
    ) -> None:
        self._num_blocks = num_blocks
        self._peers = peers
        self._exchange = Exchange(
            np.frombuffer(memory, dtype=np.uint8),
            membership.layout,
            membership.rank,
            timeout_seconds=membership.exchange_timeout_seconds,
        )
        self._has_left = False
        self._listener = threading.Thread(target=self._listen, name="ranks", daemon=True)
        self._listener.start()

    @property
    def num_blocks(self) -> int:
        """KV blocks that every rank has room for."""
        return self._num_blocks

    @property
    def exchange(self) -> Exchange:
        """Where the ranks meet within a step."""
        return self._exchange

    def meet(self) -> None:
        """Return when all ranks have come here; raises WorkerLost when one does not."""
        self._exchange.meet()

    def begin_batch(self, batch: FlatBatch) -> None:
        """Note which batch this rank is about to compute."""
        self._exchange.begin_batch(batch.digest)

    def end_batch(self) -> None:
        """Make sure that all ranks have computed the same batch; raises InternalError."""
        self._exchange.end_batch()

    def agree(self, is_so: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return what is so on all ranks; raises WorkerLost when one does not come."""
        return self._exchange.agree(is_so)

    def leave(self) -> None:
        """Leave the group, so that no other rank waits for this one; may be called again."""
        if self._has_left:
            return
        self._has_left = True
        self._exchange.break_group()
        for peer in self._peers:
            # Wakes the listener here and those of the others.
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
        self._listener.join(_LEAVE_SECONDS)
        for peer in self._peers:
            peer.close()

    def _listen(self) -> None:
        """Wait until a peer's socket ends: nobody sends anything on it once the group has formed."""
        poll = select.poll()
        for peer in self._peers:
            poll.register(peer, select.POLLIN | select.POLLHUP)
        poll.poll()
        self._exchange.break_group()
        if not self._has_left:
            _log.warning("a rank has left the group", rank=self._exchange.rank)


@dataclass(frozen=True, slots=True)
class _Arrival:
    """What a rank says of itself."""

    rank: int
    contract: str
    size_bytes: int
    num_blocks: int

    @classmethod
    def of(cls, message: dict[str, Any]) -> _Arrival:
        return cls(**message)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """The bound of all waits of one forming."""

    on_wait: Callable[[], None]
    deadline: float

    def readable(self, waited_for: socket.socket, what: str) -> None:
        """Return when there is something to read or accept; raises WorkerLost at the deadline."""
        poll = select.poll()
        poll.register(waited_for, select.POLLIN)
        while not poll.poll(_POLL_MILLISECONDS):
            self.tick(what)

    def tick(self, what: str) -> None:
        """Raise when nobody wants the group any more, or when the time is up."""
        self.on_wait()
        if time.monotonic() > self.deadline:
            raise WorkerLost(f"The group did not form within {_FORM_SECONDS:g} seconds: {what} did not come.")


def _gather(membership: Membership, waiting: _Waiting, on_failure: ExitStack) -> SharedMemoryGroup:
    """Wait for all other ranks, then give each the memory."""
    own = _arrival_of(membership)
    peers: dict[int, socket.socket] = {}
    num_blocks = own.num_blocks
    with _listening(membership.group_id, membership.layout.num_ranks) as listener:
        while len(peers) < membership.layout.num_ranks - 1:
            waiting.readable(listener, "another rank")
            peer = on_failure.enter_context(listener.accept()[0])
            if not _is_same_user(peer):
                peer.close()
                continue
            arrival = _Arrival.of(_receive(peer, waiting)[0])
            _require_equal(own, arrival)
            if arrival.rank in peers:
                raise WorkerLost(f"Two workers came as rank {arrival.rank}.")
            peers[arrival.rank] = peer
            num_blocks = min(num_blocks, arrival.num_blocks)
    with _new_memory(membership) as memory_fd:
        for peer in peers.values():
            _send(peer, {"num_blocks": num_blocks}, memory_fd)
        return SharedMemoryGroup(membership, num_blocks, mmap.mmap(memory_fd, own.size_bytes), list(peers.values()))


def _come(membership: Membership, waiting: _Waiting, on_failure: ExitStack) -> SharedMemoryGroup:
    """Come to rank 0 and wait until all others have."""
    peer = on_failure.enter_context(_connected(membership.group_id, waiting))
    _send(peer, asdict(_arrival_of(membership)))
    answer, memory_fd = _receive(peer, waiting)
    if memory_fd is None:
        raise WorkerLost("Rank 0 gave no memory to share.")
    with _closing(memory_fd):
        memory = mmap.mmap(memory_fd, membership.layout.size_bytes)
    return SharedMemoryGroup(membership, answer["num_blocks"], memory, [peer])


def _arrival_of(membership: Membership) -> _Arrival:
    return _Arrival(membership.rank, membership.contract, membership.layout.size_bytes, membership.num_blocks)


def _require_equal(own: _Arrival, other: _Arrival) -> None:
    if (own.contract, own.size_bytes) != (other.contract, other.size_bytes):
        raise ModelLoadFailed(
            f"Rank {other.rank} serves {other.contract}, rank 0 serves {own.contract}; start all workers of an "
            "engine with the same settings."
        )


@contextmanager
def _listening(group_id: str, num_ranks: int) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(_name_of(group_id))
        except OSError as error:
            raise WorkerLost(f"Rank 0 cannot listen for the group {group_id}: {error}.") from error
        listener.listen(num_ranks)
        yield listener


def _connected(group_id: str, waiting: _Waiting) -> socket.socket:
    while True:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            peer.connect(_name_of(group_id))
        except OSError:
            # Rank 0 is still loading.
            peer.close()
            waiting.tick("rank 0")
            time.sleep(_RETRY_SECONDS)
        else:
            return peer


@contextmanager
def _new_memory(membership: Membership) -> Iterator[int]:
    """Give the descriptor of zeroed memory; who has mapped it keeps it."""
    with _closing(os.memfd_create(f"octavo-{membership.group_id}", os.MFD_CLOEXEC)) as memory_fd:
        os.ftruncate(memory_fd, membership.layout.size_bytes)
        yield memory_fd


@contextmanager
def _closing(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _name_of(group_id: str) -> str:
    return f"\0octavo-ranks-{group_id}"


def _is_same_user(peer: socket.socket) -> bool:
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == os.getuid())


def _send(peer: socket.socket, message: dict[str, Any], descriptor: int | None = None) -> None:
    try:
        socket.send_fds(peer, [json.dumps(message).encode()], [] if descriptor is None else [descriptor])
    except OSError as error:
        raise WorkerLost(f"A rank left while the group was forming: {error}.") from error


def _receive(peer: socket.socket, waiting: _Waiting) -> tuple[dict[str, Any], int | None]:
    # Any: messages are JSON of a process that runs the same code.
    waiting.readable(peer, "a rank's word")
    try:
        data, descriptors, _, _ = socket.recv_fds(peer, _MAX_MESSAGE_BYTES, 1)
    except OSError as error:
        raise WorkerLost(f"A rank left while the group was forming: {error}.") from error
    if not data:
        raise WorkerLost("A rank left while the group was forming.")
    message: dict[str, Any] = json.loads(data)
    return message, descriptors[0] if descriptors else None
