"""The data folder: its lock, its parts, and the short-lived folder of sockets beside it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from services.supervisor.failures import UpFailed

_RUN_FILE = "run.json"
_PARTS = ("logs", "valkey", "clickhouse", "telemetry")
# sockaddr_un holds 108 bytes; the longest name that we append is below 30.
_MAX_SOCKET_DIR_BYTES = 75
_SOCKET_DIR_PREFIX = "octavo-"
_LOCK_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class RunningProcess:
    """A process as run.json tells of it."""

    pid: int | None
    address: str
    num_restarts: int
    is_healthy: bool
    log: str


@dataclass(frozen=True, slots=True)
class RunState:
    """What runs now, for people and tests."""

    supervisor_pid: int
    is_ready: bool
    base_url: str
    grpc_address: str
    redis_url: str
    clickhouse_url: str
    socket_dir: str
    processes: dict[str, RunningProcess]


class DataDir:
    """A locked data folder; made by ``open_data_dir`` only."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        # Children inherit the lock, so that it is free only when the last of them has ended.
        self.lock_fd = lock_fd

    def write_run_state(self, state: RunState) -> None:
        """Replace run.json in one step."""
        fresh = self.path / f"{_RUN_FILE}.new"
        # The URLs of stores may hold passwords. Who may read it is settled before anything is in it.
        fresh.unlink(missing_ok=True)
        with open(fresh, "w", opener=_open_private) as file:
            file.write(json.dumps(asdict(state), indent=2) + "\n")
        fresh.replace(self.path / _RUN_FILE)

    def log_path(self, process_name: str) -> Path:
        """Return the log file of a process."""
        return self.path / "logs" / f"{process_name}.log"


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_EXCL, 0o600)


@contextmanager
def open_data_dir(path: Path, *, wait_seconds: float = 20.0) -> Iterator[DataDir]:
    """Make and lock the data folder for as long as the block runs; remove run.json at its end.

    A folder whose supervisor was killed is waited for, because its processes are about to end.

    Raises:
        UpFailed: when another ``octavo up`` uses the folder, or it cannot be made.
    """
    try:
        # What is in it is nobody's but this user's: logs, records of requests, and run.json with the stores' URLs.
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for part in _PARTS:
            (path / part).mkdir(parents=True, exist_ok=True)
        # The folder keeps itself out of the repository that it may lie in.
        (path / ".gitignore").write_text("*\n")
        lock_fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UpFailed(f"The data folder {path} cannot be used: {error}.") from error
    try:
        _lock(path, lock_fd, wait_seconds)
        _remove_leftovers(path)
        try:
            yield DataDir(path, lock_fd)
        finally:
            (path / _RUN_FILE).unlink(missing_ok=True)
    finally:
        os.close(lock_fd)


def _lock(path: Path, lock_fd: int, wait_seconds: float) -> None:
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _owner_of(path)
            if owner is not None and _is_alive(owner):
                raise UpFailed(
                    f"The data folder {path} is used by another `octavo up` (process {owner}); "
                    "stop it or choose another folder with --data-dir."
                ) from None
            if time.monotonic() > deadline:
                raise UpFailed(
                    f"The data folder {path} is still used by processes of an earlier `octavo up`; "
                    f"{path / _RUN_FILE} names them."
                ) from None
            time.sleep(_LOCK_POLL_SECONDS)
        else:
            return


def _remove_leftovers(path: Path) -> None:
    """Remove what a supervisor that was killed could not: its run.json and its folder of sockets."""
    try:
        socket_dir = Path(json.loads((path / _RUN_FILE).read_text())["socket_dir"])
        if socket_dir.name.startswith(_SOCKET_DIR_PREFIX) and all(
            entry.is_socket() for entry in socket_dir.iterdir()
        ):
            shutil.rmtree(socket_dir, ignore_errors=True)
    except (OSError, ValueError, KeyError, TypeError):
        # There is none, or it is not of our making.
        pass
    (path / _RUN_FILE).unlink(missing_ok=True)


def _owner_of(path: Path) -> int | None:
    """Return the supervisor that run.json names; None where there is none yet or any more."""
    try:
        return int(json.loads((path / _RUN_FILE).read_text())["supervisor_pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@contextmanager
def private_socket_dir() -> Iterator[Path]:
    """Make a folder for Unix sockets that only this user can enter, and remove it at the end.

    It is not part of the data folder, because the path of a socket must be short.
    """
    parent = tempfile.gettempdir()
    if len(os.fsencode(parent)) > _MAX_SOCKET_DIR_BYTES - len(f"/{_SOCKET_DIR_PREFIX}12345678"):
        parent = "/tmp"
    with tempfile.TemporaryDirectory(prefix=_SOCKET_DIR_PREFIX, dir=parent, ignore_cleanup_errors=True) as folder:
        yield Path(folder)
