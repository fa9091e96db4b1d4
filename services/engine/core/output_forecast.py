"""How long outputs tend to be, learned from those that ended."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

_MIN_SAMPLES = 4
_NEWEST_WEIGHT = 0.1
_MAX_TENANTS = 10_000


@dataclass(slots=True)
class _Lengths:
    num_samples: int = 0
    mean: float = 0.0
    deviation: float = 0.0

    def note(self, length: int) -> None:
        self.num_samples += 1
        weight = max(_NEWEST_WEIGHT, 1 / self.num_samples)
        self.deviation += weight * (abs(length - self.mean) - self.deviation) if self.num_samples > 1 else 0.0
        self.mean += weight * (length - self.mean)


class OutputForecast:
    """Expected output lengths by tenant: a moving mean plus one mean deviation, bounded by the request's limit.

    A tenant that is not known well yet is taken for an average one, and before anything is known the limit itself
    is expected.
    """

    def __init__(self) -> None:
        self._all = _Lengths()
        self._by_tenant: OrderedDict[str, _Lengths] = OrderedDict()

    def note(self, tenant_id: str, num_output_tokens: int) -> None:
        """Learn from an output that ended by itself."""
        self._all.note(num_output_tokens)
        lengths = self._by_tenant.setdefault(tenant_id, _Lengths())
        lengths.note(num_output_tokens)
        self._by_tenant.move_to_end(tenant_id)
        if len(self._by_tenant) > _MAX_TENANTS:
            self._by_tenant.popitem(last=False)

    def expected_tokens(self, tenant_id: str, max_output_tokens: int) -> int:
        """Return how many output tokens to expect of a new request, at least one."""
        lengths = self._by_tenant.get(tenant_id, self._all)
        if lengths.num_samples < _MIN_SAMPLES:
            lengths = self._all
        if lengths.num_samples < _MIN_SAMPLES:
            return max_output_tokens
        return max(1, min(max_output_tokens, round(lengths.mean + lengths.deviation)))
