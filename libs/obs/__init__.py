"""What operators see: structured logs and metrics.

Owns log format, metric names, units and buckets. It must not know what the numbers decide.
"""

from libs.obs.logs import configure_logging, get_logger

__all__ = ["configure_logging", "get_logger"]
