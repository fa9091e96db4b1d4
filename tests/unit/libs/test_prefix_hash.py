"""The prefix hash against its definition, computed here by hand."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.kv import HASH_ALGORITHM, PrefixHash, PrefixHasher, SharedPrefix, prefix_hashes

_ROOT = bytes(32)
_VECTOR = [
    "c340a87ada76c963c8ccc1ca9be2f72a7b8f215d940036ad07c137e246d5b035",
    "e917e7e1ce611a785731787640ef1ff7780628c9b6a0247af6799e6763cc1290",
]


def _sha256(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def test_the_first_block_hashes_the_root_and_its_ids() -> None:
    assert prefix_hashes([1, 2, 3, 4], 4) == [_sha256(_ROOT, struct.pack("<4I", 1, 2, 3, 4))]


def test_a_block_hashes_its_parent_and_its_ids() -> None:
    first = _sha256(_ROOT, struct.pack("<2I", 258, 4_294_967_295))
    second = _sha256(first, struct.pack("<2I", 0, 7))

    assert prefix_hashes([258, 4_294_967_295, 0, 7], 2) == [first, second]


def test_the_salt_enters_the_first_block_with_its_tag_and_its_length() -> None:
    salted = _sha256(_ROOT, b"octavo.cache_salt\x00", struct.pack("<I", 3), b"abc", struct.pack("<2I", 5, 6))
    second = _sha256(salted, struct.pack("<2I", 7, 8))

    assert prefix_hashes([5, 6, 7, 8], 2, b"abc") == [salted, second]


def test_a_shared_prefix_chains_from_its_own_salt_and_the_tenant_enters_after_it() -> None:
    tag = b"octavo.cache_salt\x00"
    first = _sha256(_ROOT, tag, struct.pack("<I", 2), b"op", struct.pack("<2I", 1, 2))
    second = _sha256(first, struct.pack("<2I", 3, 4))
    third = _sha256(second, tag, struct.pack("<I", 3), b"abc", struct.pack("<2I", 5, 6))
    fourth = _sha256(third, struct.pack("<2I", 7, 8))

    chain = prefix_hashes(range(1, 9), 2, b"abc", SharedPrefix(b"op", 2))

    assert chain == [first, second, third, fourth]


def test_tenants_share_the_shared_prefix_and_nothing_after_it() -> None:
    shared = SharedPrefix(b"op", 3)

    one, other = (prefix_hashes(range(20), 2, tenant, shared) for tenant in (b"one", b"other"))

    assert one[:3] == other[:3]
    assert not set(one[3:]) & set(other[3:])


def test_a_known_vector_never_changes() -> None:
    # Hashes are kept in Redis and compared between versions: a change needs a new HASH_ALGORITHM.
    chain = prefix_hashes(range(32), 16, b"tenant")

    assert HASH_ALGORITHM == "sha256-u32le"
    assert [link.hex() for link in chain] == _VECTOR


def test_only_full_blocks_are_hashed() -> None:
    assert prefix_hashes([], 4) == []
    assert prefix_hashes([1, 2, 3], 4) == []
    assert len(prefix_hashes(range(11), 4)) == 2


_IDS = st.lists(st.integers(0, 2**32 - 1), max_size=64)


@given(_IDS, st.integers(1, 9), st.binary(max_size=8), st.data())
def test_a_chain_extended_in_pieces_is_the_chain_of_the_whole(
    token_ids: list[int], block_size: int, salt: bytes, data: st.DataObject
) -> None:
    hasher, chain = PrefixHasher(block_size, salt), list[PrefixHash]()
    known = 0

    while known < len(token_ids):
        known = data.draw(st.integers(known + 1, len(token_ids)))
        hasher.extend(chain, np.array(token_ids, dtype=np.uint32), known)

    assert chain == prefix_hashes(token_ids, block_size, salt)


@given(_IDS, _IDS, st.integers(1, 9))
def test_chains_agree_exactly_as_far_as_the_blocks_do(left: list[int], right: list[int], block_size: int) -> None:
    chains = zip(prefix_hashes(left, block_size), prefix_hashes(right, block_size), strict=False)

    for index, (one, other) in enumerate(chains, 1):
        end = index * block_size
        assert (one == other) == (left[:end] == right[:end])


@given(st.binary(max_size=8), st.binary(max_size=8))
def test_salts_never_share_a_hash(one: bytes, other: bytes) -> None:
    token_ids = list(range(8))

    shared = set(prefix_hashes(token_ids, 4, one)) & set(prefix_hashes(token_ids, 4, other))

    assert bool(shared) == (one == other)


def test_ids_of_another_width_hash_the_same() -> None:
    assert prefix_hashes(np.arange(8, dtype=np.uint32), 4) == prefix_hashes(list(range(8)), 4)


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_an_id_that_does_not_fit_is_refused(token_id: int) -> None:
    with pytest.raises(OverflowError):
        prefix_hashes([token_id], 1)
