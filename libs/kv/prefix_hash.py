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

_ID_BYTES = 4
_ROOT = PrefixHash(bytes(HASH_BYTES))
_SALT_TAG = b"octavo.cache_salt\x00"


@dataclass(frozen=True, slots=True)
class HashContract:
    """What two parties must agree on before prefix hashes mean the same to both."""

    block_size: int
    algorithm: str
    tokenizer_digest: bytes


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The leading blocks that all tenants share, because the operator has declared their text."""

    salt: bytes
    num_blocks: int


@dataclass(frozen=True, slots=True)
class PrefixHasher:
    """Hashes blocks of one size under one salt.

    Blocks of a shared prefix chain from the operator's salt; the tenant's enters at the first block after it, so
    that all that follows is the tenant's own.
    """

    block_size: int
    cache_salt: bytes = b""
    shared_prefix: SharedPrefix | None = None

    def extend(self, chain: list[PrefixHash], token_ids: npt.NDArray[np.uint32], num_tokens: int) -> None:
        """Append to ``chain`` the hashes of the full blocks among the first ``num_tokens`` ids that it lacks."""
        first, last = len(chain), num_tokens // self.block_size
        parent = chain[-1] if chain else _ROOT
        raw = _little_endian(token_ids[first * self.block_size : last * self.block_size])
        num_bytes = self.block_size * _ID_BYTES
        for index in range(first, last):
            start = (index - first) * num_bytes
            parent = self._block_hash(index, parent, raw[start : start + num_bytes])
            chain.append(parent)

    def _block_hash(self, index: int, parent: PrefixHash, raw_token_ids: bytes) -> PrefixHash:
        salt = self._salt_entering_at(index)
        # The length makes the encoding unambiguous.
        tagged = _SALT_TAG + len(salt).to_bytes(4, "little") + salt if salt else b""
        return PrefixHash(hashlib.sha256(parent + tagged + raw_token_ids).digest())

    def _salt_entering_at(self, index: int) -> bytes:
        num_shared = self.shared_prefix.num_blocks if self.shared_prefix else 0
        if index == num_shared:
            return self.cache_salt
        return self.shared_prefix.salt if self.shared_prefix and index == 0 else b""


def _little_endian(token_ids: npt.NDArray[np.uint32]) -> bytes:
    return token_ids.astype("<u4", copy=False).tobytes()


def prefix_hashes(
    token_ids: Sequence[int] | npt.NDArray[np.uint32],
    block_size: int,
    cache_salt: bytes = b"",
    shared_prefix: SharedPrefix | None = None,
) -> list[PrefixHash]:
    """Return the hash chain of all full blocks of ``token_ids``."""
    ids = np.asarray(token_ids, dtype=np.uint32)
    chain: list[PrefixHash] = []
    PrefixHasher(block_size, cache_salt, shared_prefix).extend(chain, ids, len(ids))
    return chain
