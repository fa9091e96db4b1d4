"""Files of a model that were never fetched.

Owns how Git LFS leaves a large file that was cloned without it. It must not know what the file should hold.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from libs.errors import ModelLoadFailed

# The first line of the specification, https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md.
_POINTER_START: Final = b"version https://git-lfs"


def refuse_pointer(path: Path) -> None:
    """Refuse a file that says where to fetch it instead of being it.

    Raises:
        ModelLoadFailed: it is one.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        is_pointer = file.read(len(_POINTER_START)) == _POINTER_START
    if is_pointer:
        raise ModelLoadFailed(
            f"{path} is a pointer of Git LFS and not the file itself; run `git lfs pull` in its folder, or fetch "
            "the model anew."
        )
