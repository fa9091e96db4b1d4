"""The registries in Redis: which nodes exist and which prefixes they hold, by the documented names.

Owns key names, field names, leases and pipelined writes. It must not know what a router or an engine does with
them. Tables: ``gpu_cluster_nodes``, ``prompt_cache_manifest``, ``prompt_prefix_cache``.
"""

from libs.registry.client import make_redis
from libs.registry.nodes import NodeRecord, NodeRegistry
from libs.registry.prefixes import ManifestEntry, PrefixCacheEntry, PrefixRegistry

__all__ = ["ManifestEntry", "NodeRecord", "NodeRegistry", "PrefixCacheEntry", "PrefixRegistry", "make_redis"]
