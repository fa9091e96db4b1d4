"""Runs a scripted scenario on a virtual clock and writes down, line by line, what the scheduler did.

A transcript reads like this; positions count from zero, a step takes one second::

    t=0  add a: x40 (40 tokens), at most 3 out
    t=0  step 1, 40 of 64 tokens: a 0-39 new 0 1 2 > 100
    t=1  step 2, 1 of 64 tokens: a 40 > 101
    …
    t=3  end a: length; output 3, cached 0, computed 42

``hit 0 1`` are cached blocks, ``new 2`` allocated ones, ``> 100`` the sampled token. A line about blocks follows
each step in which their states changed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from libs.errors import OctavoError
from libs.kv.block_pool import BlockCounts
from services.engine.core.request import SequenceEnd
from services.engine.core.scheduler import SchedulerConfig
from tests.fakes.kv_worker import counting
from tests.fakes.requests import make_request
from tests.fakes.watched_scheduler import Step, WatchedScheduler

_FIRST_OUTPUT_ID = 100
_MAX_STEPS = 500


def token_ids_of(description: str) -> list[int]:
    """Return ids for a prompt such as ``x32 y8``: 32 ids of document x, then 8 of y; ``o`` is what is sampled."""
    ids: list[int] = []
    for name, count in re.findall(r"([a-z])(\d+)", description):
        first = _FIRST_OUTPUT_ID if name == "o" else 1000 * (ord(name) - ord("a") + 1)
        ids += range(first, first + int(count))
    return ids


class Stage:
    """One scheduler with a worker, both checked at every step, and the transcript so far."""

    def __init__(
        self,
        title: str,
        *,
        num_blocks: int = 16,
        max_model_len: int = 256,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        max_waiting_sequences: int = 16,
        eos_token_ids: tuple[int, ...] = (),
        watermark_fraction: float = 0.0,
    ) -> None:
        self.lines = [title, ""]
        self._watched = WatchedScheduler(
            SchedulerConfig(
                num_blocks=num_blocks,
                block_size=16,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                max_waiting_sequences=max_waiting_sequences,
                eos_token_ids=eos_token_ids,
                watermark_fraction=watermark_fraction,
            ),
            counting(_FIRST_OUTPUT_ID),
        )
        self._step_line = 0
        self._names: dict[int, str] = {}
        self._counts = BlockCounts(num_free=num_blocks, num_evictable=0, num_held=0)
        watermark = int(num_blocks * watermark_fraction)
        self._say(
            f"{num_blocks} blocks of 16, watermark {watermark}, {max_num_batched_tokens} tokens a step, "
            f"{max_num_seqs} sequences",
            is_timed=False,
        )

    # ---- the script's verbs ----

    def add(
        self,
        name: str,
        prompt: str,
        *,
        out: int = 3,
        prior: Iterable[str] = ("",),
        priority: int = 0,
        salt: str = "",
        deadline: float | None = None,
        stop: Iterable[int] = (),
        ignore_eos: bool = False,
    ) -> None:
        """Submit a request; ``prior`` describes what each choice has emitted elsewhere."""
        outputs = [token_ids_of(description) for description in prior]
        request = make_request(
            name,
            token_ids_of(prompt),
            max_output_tokens=out,
            prior_outputs=outputs,
            priority=priority,
            cache_salt=salt.encode(),
            deadline=deadline,
            stop_token_ids=frozenset(stop),
            ignore_eos=ignore_eos,
        )
        extras = [
            f"{len(outputs)} choices" if len(outputs) > 1 else "",
            f"emitted before: {', '.join(prior)}" if any(outputs) else "",
            f"priority {priority}" if priority else "",
            f"salt {salt}" if salt else "",
            f"deadline t={deadline:g}" if deadline is not None else "",
            f"stops at {' '.join(map(str, stop))}" if stop else "",
            "ignores end tokens" if ignore_eos else "",
        ]
        details = "".join(f", {extra}" for extra in extras if extra)
        try:
            handles = self._watched.add(request)
        except OctavoError as error:
            self._say(f"refuse {name}: {prompt}, at most {out} out{details}: {type(error).__name__}: {error}")
            return
        for index, handle in enumerate(handles):
            self._names[handle] = f"{name}.{index}" if len(handles) > 1 else name
        self._say(f"add {name}: {prompt} ({len(request.prompt_token_ids)} tokens), at most {out} out{details}")

    def step(self, count: int = 1, *, failing: str = "") -> None:
        """Run steps; ``failing`` names a sequence whose logits are not numbers."""
        for _ in range(count):
            if not self.schedule():
                return
            self.apply(failing=failing)

    def run(self) -> None:
        """Run until nothing is left."""
        for _ in range(_MAX_STEPS):
            if not self.schedule():
                self._watched.check_idle()
                return
            self.apply()
        raise AssertionError(f"still busy after {_MAX_STEPS} steps")

    def schedule(self) -> bool:
        """Send off a step and leave it in flight; returns whether there was one."""
        step = self._watched.schedule()
        if step is None:
            self._say("idle")
            return False
        for handle in step.preempted:
            self._say(
                f"preempt {self._names[handle]}: waits with {len(self._watched.lives[handle].token_ids)} tokens"
            )
        self._step_line = len(self.lines)
        self._say(self._describe(step))
        self._watched.check()
        return True

    def apply(self, *, failing: str = "") -> None:
        """Take the result of the step in flight."""
        events = self._watched.apply(lambda handle: self._names[handle] == failing)
        self._watched.check()
        token_of = dict(zip(events.handles.tolist(), events.token_ids.tolist(), strict=True))
        line = self.lines[self._step_line]
        self.lines[self._step_line] = re.sub(
            r"\{(\d+)\}", lambda match: f" > {token_of.get(int(match[1]), 'nothing')}", line
        )
        self._say_ends(events.ends)
        self._say_blocks()

    def abort(self, name: str, *, choice: int | None = None) -> None:
        """End a request, or one of its choices, from outside."""
        handles = tuple(h for h, full_name in self._names.items() if full_name == f"{name}.{choice}")
        in_flight = " while a step is in flight" if self._watched.in_flight else ""
        self._say(f"abort {name if choice is None else f'{name}.{choice}'}{in_flight}")
        self._say_ends(self._watched.abort(name, handles))
        self._say_blocks()

    def expire(self) -> None:
        """Look at deadlines."""
        self._say_ends(self._watched.expire())
        self._say_blocks()

    def fail_all(self, error: OctavoError) -> None:
        """End everything with an error."""
        self._say(f"fail everything: {type(error).__name__}")
        self._say_ends(self._watched.fail_all(error))
        self._say_blocks()

    def note(self, text: str) -> None:
        """Write a remark of the script."""
        self._say(f"# {text}", is_timed=False)

    @property
    def text(self) -> str:
        """The transcript; a step that was never answered has no tokens."""
        return re.sub(r"\{\d+\}", " > no answer", "\n".join(self.lines)) + "\n"

    # ---- how it is written ----

    def _say(self, line: str, *, is_timed: bool = True) -> None:
        self.lines.append(f"{f't={self._watched.now:g}':<5} {line}" if is_timed else line)

    def _describe(self, step: Step) -> str:
        output = step.output
        new_of = {new.slot: new for new in output.new_sequences}
        parts = []
        position = 0
        for slot, handle, num_tokens, num_new_blocks, is_sampled in zip(
            output.slots.tolist(),
            output.handles.tolist(),
            output.num_scheduled_tokens.tolist(),
            output.num_new_blocks.tolist(),
            output.is_sampled.tolist(),
            strict=True,
        ):
            first = self._watched.worker.rows[slot].num_computed_tokens
            blocks = output.new_block_ids[position : position + num_new_blocks].tolist()
            position += num_new_blocks
            hit = new_of[slot].block_ids if slot in new_of else ()
            parts.append(
                f"{self._names[handle]} {first}"
                + (f"-{first + num_tokens - 1}" if num_tokens > 1 else "")
                + (f" hit {' '.join(map(str, hit))}" if hit else "")
                + (f" new {' '.join(map(str, blocks))}" if blocks else "")
                + (f"{{{handle}}}" if is_sampled else "")
            )
        waiting = [
            self._names[life.handle] for life in sorted(self._watched.waiting(), key=lambda life: life.order)
        ]
        return (
            f"step {output.step_id}, {output.num_tokens} of {self._watched.config.max_num_batched_tokens} tokens: "
            + " | ".join(parts)
            + (f" | waiting: {' '.join(waiting)}" if waiting else "")
        )

    def _say_ends(self, ends: Iterable[SequenceEnd]) -> None:
        for end in ends:
            usage = end.usage
            how = end.reason.value if end.reason else type(end.error).__name__
            at = f" at {end.stop_token_id}" if end.stop_token_id is not None else ""
            preemptions = f", preempted {usage.num_preemptions}" if usage.num_preemptions else ""
            discarded = f", discarded {usage.num_discarded_tokens}" if usage.num_discarded_tokens else ""
            self._say(
                f"end {self._names[end.handle]}: {how}{at}; output {usage.num_output_tokens}, "
                f"cached {usage.num_cached_tokens}, computed {usage.num_computed_tokens}{discarded}{preemptions}; "
                f"queue {usage.queue_seconds:g} s, prefill {usage.prefill_seconds:g} s, "
                f"decode {usage.decode_seconds:g} s"
            )

    def _say_blocks(self) -> None:
        counts = self._watched.scheduler.kv_cache.block_counts
        if counts != self._counts:
            self._counts = counts
            self._say(
                f"      {counts.num_free} free, {counts.num_evictable} evictable, {counts.num_held} held",
                is_timed=False,
            )
