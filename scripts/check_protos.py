"""Lint the protos and compare them with the branch that they will land on, with buf and without its registry.

The protos import ``google/rpc/status.proto``. buf would fetch it from its registry; here it is copied beside our
files in a scratch workspace, from the Python package that ships it; buf.yaml leaves it out.
"""

from __future__ import annotations

import importlib.resources
import io
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
BUF = Path(sys.executable).with_name("buf")
_BORROWED = ("google/rpc/status.proto",)


def main() -> None:
    """Check and exit with a clear word."""
    with tempfile.TemporaryDirectory() as scratch:
        head = Path(scratch) / "head"
        (head / "protos").mkdir(parents=True)
        for source in (REPOSITORY / "protos").rglob("*.proto"):
            _copy(source, head / "protos" / source.relative_to(REPOSITORY / "protos"))
        _complete_workspace(head)
        _buf(head, "lint")
        base = _base_commit()
        if base is None or not _has_protos(base):
            print("There are no protos before this change, so none can break.")
            return
        before = Path(scratch) / "base"
        _extract_protos(base, before)
        _complete_workspace(before)
        _buf(head, "breaking", "--against", str(before))
        print(f"The protos are clean and break nothing of {base[:12]}.")


def _base_commit() -> str | None:
    """Return the commit to compare with: where this work left main, or main's parent when this is main itself."""
    head = _git("rev-parse", "--verify", "--quiet", "HEAD")
    if head is None:
        return None
    for main in ("origin/main", "main"):
        fork = _git("merge-base", "HEAD", main)
        if fork is not None and fork != head:
            return fork
    # HEAD is main: what is not committed is compared with it, or else its last commit with the one before.
    if _git("status", "--porcelain", "--", "protos"):
        return head
    return _git("rev-parse", "--verify", "--quiet", "HEAD~1")


def _has_protos(commit: str) -> bool:
    return bool(_git("ls-tree", "-r", "--name-only", commit, "protos"))


def _extract_protos(commit: str, target: Path) -> None:
    archive = subprocess.run(
        ["git", "archive", "--format=tar", commit, "protos"], cwd=REPOSITORY, check=True, capture_output=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            content = tar.extractfile(member)
            if content is not None:
                path = target / member.name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.read())


def _complete_workspace(workspace: Path) -> None:
    """Add the configuration and the borrowed protos."""
    _copy(REPOSITORY / "buf.yaml", workspace / "buf.yaml")
    # The root of googleapis-common-protos is the namespace package "google".
    google = importlib.resources.files("google.rpc")
    for name in _BORROWED:
        target = workspace / "protos" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(google.joinpath(Path(name).name).read_text())


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(source.read_bytes())


def _buf(workspace: Path, *arguments: str) -> None:
    done = subprocess.run([BUF, *arguments], cwd=workspace, check=False)
    if done.returncode != 0:
        sys.exit(f"buf {arguments[0]} found faults in protos/.")


def _git(*arguments: str) -> str | None:
    """Return what git says, or None when it says no."""
    done = subprocess.run(["git", *arguments], cwd=REPOSITORY, check=False, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


if __name__ == "__main__":
    main()
