"""The choice whether spans are kept."""

from __future__ import annotations

from libs.obs.tracing import NO_TRACER, Tracer


def open_tracer(endpoint: str, *, tier: str, instance_id: str, sample_fraction: float = 1.0) -> Tracer:
    """Return what sends spans to an OTLP endpoint over gRPC, or keeps none where ``endpoint`` is empty.

    Args:
        endpoint: for example ``http://127.0.0.1:4317``; ``https`` for TLS.
        tier: name of the tier, for example "router".
        instance_id: which process of the tier.
        sample_fraction: share of the requests that are traced among those whose caller has not decided it.
    """
    if not endpoint:
        return NO_TRACER
    # A third of a second, which only those pay who want spans.
    from libs.obs.otlp import OtlpTracer

    return OtlpTracer(endpoint, tier=tier, instance_id=instance_id, sample_fraction=sample_fraction)
