"""What operators see: structured logs, metrics and spans.

Owns log format, how spans are sent, metric names, units and buckets. It must not know what the numbers decide.
"""

from libs.obs.logs import configure_logging, get_logger

__all__ = ["configure_logging", "get_logger"]
