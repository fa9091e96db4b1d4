"""The hash chain over full blocks of token ids; the same code in gateway, router and engine.

A block's hash is ``sha256(parent ‖ tagged salt in the first block ‖ token ids as little-endian u32)``, so equal
hashes mean equal prefixes under the same salt (the scheme of automatic prefix caching in vLLM, with a salt as in
its RFC on cache isolation).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

import numpy as np
import numpy.typing as npt

PrefixHash = NewType("PrefixHash", bytes)

HASH_ALGORITHM = "sha256-u32le"
HASH_BYTES = 32

_ROOT = PrefixHash(bytes(HASH_BYTES))
_SALT_TAG = b"octavo.cache_salt\x00"


@dataclass(frozen=True, slots=True)
class HashContract:
    """What two parties must agree on before prefix hashes mean the same to both."""

    block_size: int
    algorithm: str
    tokenizer_digest: bytes


@dataclass(frozen=True, slots=True)
class PrefixHasher:
    """Hashes blocks of one size under one salt."""

    block_size: int
    cache_salt: bytes = b""

    def block_hash(self, parent: PrefixHash | None, block_token_ids: npt.NDArray[np.uint32]) -> PrefixHash:
        """Hash one full block of ``[block_size]`` ids after ``parent``; None stands for the first block."""
        digest = hashlib.sha256(_ROOT if parent is None else parent)
        if parent is None and self.cache_salt:
            # The length makes the encoding unambiguous.
            digest.update(_SALT_TAG + len(self.cache_salt).to_bytes(4, "little") + self.cache_salt)
        digest.update(block_token_ids.astype("<u4", copy=False).tobytes())
        return PrefixHash(digest.digest())

    def extend(self, chain: list[PrefixHash], token_ids: npt.NDArray[np.uint32], num_tokens: int) -> None:
        """Append to ``chain`` the hashes of the full blocks among the first ``num_tokens`` ids that it lacks."""
        for index in range(len(chain), num_tokens // self.block_size):
            parent = chain[index - 1] if index else None
            start = index * self.block_size
            chain.append(self.block_hash(parent, token_ids[start : start + self.block_size]))


def prefix_hashes(
    token_ids: Sequence[int] | npt.NDArray[np.uint32], block_size: int, cache_salt: bytes = b""
) -> list[PrefixHash]:
    """Return the hash chain of all full blocks of ``token_ids``."""
    ids = np.asarray(token_ids, dtype=np.uint32)
    chain: list[PrefixHash] = []
    PrefixHasher(block_size, cache_salt).extend(chain, ids, len(ids))
    return chain
