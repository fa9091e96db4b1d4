"""How many threads torch uses for which operator.

Owns the division into large operators (products, attention), which all threads share, and small ones, which in a
small step run on one: to wake a second thread takes some 50 µs, longer than the operator itself. It must not know
what is computed. torch's thread count belongs to the calling thread, so all of this happens in the runner's one.
"""

from __future__ import annotations

from types import TracebackType

import torch

# In a step of more tokens the small operators are large enough to share.
_MAX_SMALL_STEP_TOKENS = 256

# Up to here two threads gain less than it costs to wake the second one 180 times in a step (measured at 30 layers:
# 14.6 against 16.6 ms for one token, 24 against 26 ms for eight), and the other core is free for other processes.
_MAX_SERIAL_STEP_TOKENS = 8
_MAX_SERIAL_STEP_CONTEXT = 4_096
_MAX_THREADS_NOT_WORTH_WAKING = 2


class OperatorThreads:
    """The threads of a forward pass; entered around each large operator."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._num_large_threads = num_threads
        self._num_small_threads = num_threads

    def begin_step(self, num_tokens: int, num_context_tokens: int) -> None:
        """Choose for the operators of a step that computes ``num_tokens`` and reads so many from the cache."""
        is_serial = (
            self._num_threads <= _MAX_THREADS_NOT_WORTH_WAKING
            and num_tokens <= _MAX_SERIAL_STEP_TOKENS
            and num_context_tokens <= _MAX_SERIAL_STEP_CONTEXT
        )
        self._num_large_threads = 1 if is_serial else self._num_threads
        self._num_small_threads = 1 if num_tokens <= _MAX_SMALL_STEP_TOKENS else self._num_threads
        torch.set_num_threads(self._num_small_threads)

    def end_step(self) -> None:
        """Let all operators share all threads again, for what follows the forward pass."""
        self._num_large_threads = self._num_small_threads = self._num_threads
        torch.set_num_threads(self._num_threads)

    def __enter__(self) -> None:
        torch.set_num_threads(self._num_large_threads)

    def __exit__(
        self,
        exception_class: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        torch.set_num_threads(self._num_small_threads)
