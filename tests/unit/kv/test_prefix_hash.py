"""Prefix hashes: equal means an equal prefix under the same salt, in every tier and for good."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from libs.kv import PrefixHasher, prefix_hashes

_TOKENS = list(range(100, 148))


def test_hash_is_sha256_of_parent_and_little_endian_ids() -> None:
    first = hashlib.sha256(bytes(32) + np.arange(4, dtype="<u4").tobytes()).digest()
    second = hashlib.sha256(first + np.arange(4, 8, dtype="<u4").tobytes()).digest()

    assert prefix_hashes(range(8), 4) == [first, second]


def test_salt_enters_the_first_block_with_its_tag_and_length() -> None:
    salted = b"octavo.cache_salt\x00" + (6).to_bytes(4, "little") + b"tenant"
    first = hashlib.sha256(bytes(32) + salted + np.arange(4, dtype="<u4").tobytes()).digest()
    second = hashlib.sha256(first + np.arange(4, 8, dtype="<u4").tobytes()).digest()

    assert prefix_hashes(range(8), 4, b"tenant") == [first, second]


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"), [(0, 0), (15, 0), (16, 1), (17, 1), (31, 1), (32, 2), (33, 2)]
)
def test_only_full_blocks_are_hashed(num_tokens: int, num_blocks: int) -> None:
    assert len(prefix_hashes(_TOKENS[:num_tokens], 16)) == num_blocks


def test_a_prefix_has_a_prefix_of_the_hashes() -> None:
    assert prefix_hashes(_TOKENS[:40], 16) == prefix_hashes(_TOKENS, 16)[:2]


def test_a_changed_token_changes_its_block_and_all_after_it() -> None:
    changed = [*_TOKENS[:20], 0, *_TOKENS[21:]]

    ours, theirs = prefix_hashes(_TOKENS, 16), prefix_hashes(changed, 16)

    assert ours[0] == theirs[0]
    assert not set(ours[1:]) & set(theirs[1:])


def test_the_same_block_at_another_place_has_another_hash() -> None:
    assert len(set(prefix_hashes([7] * 64, 16))) == 4


@pytest.mark.parametrize("other", [b"", b"a", b"ab", b"tenan", b"tenant2", b"tenant\x00"])
def test_salts_share_no_block(other: bytes) -> None:
    assert not set(prefix_hashes(_TOKENS, 16, b"tenant")) & set(prefix_hashes(_TOKENS, 16, other))


def test_an_extended_chain_equals_one_made_at_once() -> None:
    hasher = PrefixHasher(16, b"tenant")
    token_ids = np.array(_TOKENS, np.uint32)
    chain = prefix_hashes(_TOKENS[:17], 16, b"tenant")

    hasher.extend(chain, token_ids, 33)
    hasher.extend(chain, token_ids, 20)
    hasher.extend(chain, token_ids, 48)

    assert chain == prefix_hashes(_TOKENS, 16, b"tenant")


def test_the_type_of_the_ids_does_not_matter() -> None:
    expected = prefix_hashes(_TOKENS, 16)

    assert prefix_hashes(np.array(_TOKENS, np.uint32), 16) == expected
    assert prefix_hashes(np.array(_TOKENS, np.int64), 16) == expected
    assert prefix_hashes(tuple(_TOKENS), 16) == expected
