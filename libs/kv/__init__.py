"""The KV cache's vocabulary: prefix hashes and the block pool. Pure: no I/O, clock or randomness."""

from libs.kv.prefix_hash import (
    HASH_ALGORITHM,
    HashContract,
    PrefixHash,
    PrefixHasher,
    SharedPrefix,
    prefix_hashes,
)

__all__ = ["HASH_ALGORITHM", "HashContract", "PrefixHash", "PrefixHasher", "SharedPrefix", "prefix_hashes"]
