"""How fast the engine has been lately, from measured steps."""

from __future__ import annotations

# Weight of the newest step in the moving means: about the last twenty steps count.
_NEWEST_WEIGHT = 0.1


class Speedometer:
    """Moving means of prefill rate and decode step time. Pure: durations are given."""

    def __init__(self) -> None:
        self.prefill_tokens_per_second: float | None = None
        self.decode_step_seconds: float | None = None

    def note_step(self, *, num_tokens: int, num_sequences: int, step_seconds: float) -> None:
        """Take a step into account: one with more tokens than sequences has prefilled."""
        if step_seconds <= 0:
            return
        if num_tokens > num_sequences:
            self.prefill_tokens_per_second = _mix(self.prefill_tokens_per_second, num_tokens / step_seconds)
        else:
            self.decode_step_seconds = _mix(self.decode_step_seconds, step_seconds)


def _mix(mean: float | None, newest: float) -> float:
    return newest if mean is None else mean + _NEWEST_WEIGHT * (newest - mean)
