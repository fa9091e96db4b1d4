"""A process's life: its event loop, its signals, its parent.

Owns what happens at SIGTERM and SIGINT (drain once, leave at the second) and that a process does not outlive
the supervisor that started it, and its signs of life. It must not know what a tier does while it drains.
"""

from libs.lifecycle.heartbeat import HeartbeatPipe
from libs.lifecycle.process import SUPERVISED_VARIABLE, Lifecycle, max_open_files, run

__all__ = ["SUPERVISED_VARIABLE", "HeartbeatPipe", "Lifecycle", "max_open_files", "run"]
