"""Runs a scripted scenario on a virtual clock and writes down, line by line, what the scheduler did.

A transcript reads like this; positions count from zero, a step takes one second::

    t=0  add a: x40 (40 tokens), at most 3 out
    t=0  step 1, 40 of 64 tokens: a 0-39 new 0 1 2 > 100
    t=1  step 2, 1 of 64 tokens: a 40 > 101
    …
    t=3  end a: length; output 3, cached 0, computed 42

``hit 0 1`` are shared blocks, ``copy 3 to 5`` is a block that is copied before it is written, ``new 2`` are
allocated ones, ``drafts 101 102`` are computed behind the known tokens, ``> 100`` is what was accepted of them and
the sampled token, once it is answered. ``asleep`` are those who wait for another one's
work. A line about blocks follows each answer since which their states changed.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable

import numpy as np

from libs.errors import OctavoError
from libs.kv.block_pool import BlockCounts
from services.engine.core.request import SequenceEnd
from services.engine.core.scheduler_config import Admission, Batching, Layout, SchedulerConfig, SpeculationConfig
from tests.fakes.kv_worker import Clock, counting, drafts_by_slot
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
        aging_seconds: float = 30.0,
        max_prefill_share: float = 1.0,
        target_itl_seconds: float | None = None,
        max_steps_in_flight: int = 1,
        admission: Admission = Admission.WATERMARK,
        batching: Batching = Batching.CONTINUOUS,
        layout: Layout = Layout.PAGED,
        speculation: SpeculationConfig | None = None,
        seconds_of: Clock | None = None,
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
                aging_seconds=aging_seconds,
                max_prefill_share=max_prefill_share,
                target_itl_seconds=target_itl_seconds,
                max_steps_in_flight=max_steps_in_flight,
                admission=admission,
                batching=batching,
                layout=layout,
                speculation=speculation,
            ),
            counting(_FIRST_OUTPUT_ID),
            seconds_of=seconds_of,
        )
        self._step_lines: deque[int] = deque()
        self._names: dict[int, str] = {}
        self._counts = BlockCounts(num_free=num_blocks, num_evictable=0, num_held=0)
        watermark = int(num_blocks * watermark_fraction)
        policies = [
            "admission by predicted peak" if admission is Admission.PREDICTED_PEAK else "",
            "static batches" if batching is Batching.STATIC else "",
            f"contiguous for {max_model_len} tokens" if layout is Layout.CONTIGUOUS else "",
            f"{max_steps_in_flight} steps in flight" if max_steps_in_flight > 1 else "",
            f"a prompt takes {max_prefill_share:g} of a step" if max_prefill_share < 1 else "",
            f"target {target_itl_seconds:g} s a step" if target_itl_seconds is not None else "",
            f"{speculation.num_draft_tokens} drafts" if speculation is not None else "",
        ]
        self._say(
            f"{num_blocks} blocks of 16, watermark {watermark}, {max_num_batched_tokens} tokens a step, "
            f"{max_num_seqs} sequences" + "".join(f", {policy}" for policy in policies if policy),
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
        tenant: str = "",
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
            tenant_id=tenant,
            deadline=deadline,
            stop_token_ids=frozenset(stop),
            ignore_eos=ignore_eos,
        )
        extras = [
            f"{len(outputs)} choices" if len(outputs) > 1 else "",
            f"emitted before: {', '.join(prior)}" if any(outputs) else "",
            f"priority {priority}" if priority else "",
            f"salt {salt}" if salt else "",
            f"tenant {tenant}" if tenant else "",
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
        """Run steps, as many in flight as may be; ``failing`` names a sequence whose logits are not numbers."""
        for _ in range(count):
            self.fill()
            if not self._watched.num_in_flight:
                return
            self.apply(failing=failing)

    def run(self) -> None:
        """Run until nothing is left."""
        for _ in range(_MAX_STEPS):
            self.fill()
            if not self._watched.num_in_flight:
                self._say("idle")
                self._watched.check_idle()
                return
            self.apply()
        raise AssertionError(f"still busy after {_MAX_STEPS} steps")

    def fill(self) -> None:
        """Send off as many steps as may be in flight."""
        while self._watched.can_schedule and self.schedule():
            pass

    def schedule(self) -> bool:
        """Send off a step and leave it in flight; returns whether there was one."""
        step = self._watched.schedule()
        if step is None:
            return False
        for handle in step.preempted:
            self._say(
                f"preempt {self._names[handle]}: waits with {len(self._watched.lives[handle].token_ids)} tokens"
            )
        self._step_lines.append(len(self.lines))
        self._say(self._describe(step))
        self._watched.check()
        return True

    def apply(self, *, failing: str = "") -> None:
        """Take the answer to the oldest step in flight."""
        events = self._watched.apply(lambda handle: self._names[handle] == failing)
        self._watched.check()
        parts = np.split(events.token_ids, np.cumsum(events.num_tokens)[:-1])
        tokens_of = {
            handle: " ".join(map(str, part.tolist()))
            for handle, part in zip(events.handles.tolist(), parts, strict=False)
        }
        number = self._step_lines.popleft()
        self.lines[number] = re.sub(
            r"\{(\d+)\}", lambda match: f" > {tokens_of.get(int(match[1]), 'nothing')}", self.lines[number]
        )
        self._say_ends(events.ends)
        self._say_blocks()

    def abort(self, name: str, *, choice: int | None = None) -> None:
        """End a request, or one of its choices, from outside."""
        handles = tuple(h for h, full_name in self._names.items() if full_name == f"{name}.{choice}")
        in_flight = " while a step is in flight" if self._watched.num_in_flight else ""
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
        blocks_of = {new.slot: new.block_ids for new in output.new_sequences}
        source_of = {copy.target_block_id: copy.source_block_id for copy in output.block_copies}
        drafts_of = drafts_by_slot(output)
        parts = []
        position = 0
        for slot, handle, num_tokens, after, num_new_blocks, is_sampled in zip(
            output.slots.tolist(),
            output.handles.tolist(),
            output.num_scheduled_tokens.tolist(),
            output.num_computed_tokens.tolist(),
            output.num_new_blocks.tolist(),
            output.is_sampled.tolist(),
            strict=True,
        ):
            blocks = output.new_block_ids[position : position + num_new_blocks].tolist()
            position += num_new_blocks
            first_blocks = blocks_of.get(slot, ())
            hit = [str(block) for block in first_blocks if block not in source_of]
            copies = [f"copy {source_of[block]} to {block}" for block in first_blocks if block in source_of]
            drafts = drafts_of[slot]
            num_known = num_tokens - len(drafts)
            parts.append(
                f"{self._names[handle]} {after - num_known}"
                + (f"-{after - 1}" if num_known > 1 else "")
                + (f" drafts {' '.join(map(str, drafts))}" if drafts else "")
                + (f" hit {' '.join(hit)}" if hit else "")
                + (f" {' '.join(copies)}" if copies else "")
                + (f" new {' '.join(map(str, blocks))}" if blocks else "")
                + (f"{{{handle}}}" if is_sampled else "")
            )
        line = sorted(self._watched.waiting().values(), key=lambda life: life.order)
        asleep = self._watched.referee.asleep
        return (
            f"step {output.step_id}, {output.num_tokens} of {self._watched.config.max_num_batched_tokens} tokens: "
            + " | ".join(parts)
            + self._list("waiting", [life.handle for life in line if life.handle not in asleep])
            + self._list("asleep", [life.handle for life in line if life.handle in asleep])
        )

    def _list(self, what: str, handles: list[int]) -> str:
        return f" | {what}: {' '.join(self._names[handle] for handle in handles)}" if handles else ""

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
