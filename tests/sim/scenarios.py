"""The scripts behind the golden transcripts: one function each, its docstring says what there is to see."""

from __future__ import annotations

from collections.abc import Callable

from libs.errors import WorkerLost
from services.engine.core.scheduler_config import Admission, Batching, Layout, SpeculationConfig
from tests.fakes.kv_worker import step_times
from tests.sim.transcript import Stage

Script = Callable[[], Stage]


def one_request() -> Stage:
    """A request alone: the whole prompt in one step, then one token a step."""
    stage = _stage(one_request)
    stage.add("a", "x40")
    stage.run()
    return stage


def budget_of_64() -> Stage:
    """A prompt of 150 tokens is computed in chunks of 64; only the last one is sampled."""
    stage = _stage(budget_of_64)
    stage.add("a", "x150", out=2)
    stage.run()
    return stage


def chunks_beside_decodes() -> Stage:
    """Running sequences get their token in each step; a long prompt takes what is left of the budget."""
    stage = _stage(chunks_beside_decodes)
    stage.add("a", "x20", out=6)
    stage.add("b", "y20", out=6)
    stage.step(2)
    stage.add("c", "z140", out=2)
    stage.run()
    return stage


def prefix_hit() -> Stage:
    """The second request takes two blocks from the first, which still runs, and computes only what differs."""
    stage = _stage(prefix_hit)
    stage.add("a", "x40", out=4)
    stage.step(2)
    stage.add("b", "x32 y8", out=3)
    stage.run()
    return stage


def full_hit_computes_the_last_block() -> Stage:
    """Something of a prompt that is cached in full is computed, or there were no logits: 16, 32, 33 tokens."""
    stage = _stage(full_hit_computes_the_last_block)
    for name, prompt in (("a", "x16"), ("b", "y32"), ("c", "z33")):
        stage.add(f"{name}1", prompt, out=2)
        stage.run()
        stage.add(f"{name}2", prompt, out=2)
        stage.run()
    return stage


def next_turn() -> Stage:
    """A conversation goes on: the next prompt is the last one with its answer and hits all full blocks of both."""
    stage = _stage(next_turn)
    stage.add("a", "x30", out=20)
    stage.run()
    stage.add("b", "x30 o20 y10", out=2)
    stage.run()
    return stage


def same_prompt_at_once() -> Stage:
    """The second of two equal prompts sleeps until the first has computed their common block, then goes on."""
    stage = _stage(same_prompt_at_once)
    stage.add("a", "x24", out=2)
    stage.add("b", "x24", out=2)
    stage.run()
    return stage


def preemption_and_resume() -> Stage:
    """Two sequences outgrow the pool: the younger gives up its blocks and comes back when there is room."""
    stage = _stage(preemption_and_resume, num_blocks=6)
    stage.add("a", "x30", out=24)
    stage.add("b", "y30", out=24)
    stage.run()
    return stage


def preempted_keeps_its_place() -> Stage:
    """A preempted sequence goes before those that came later, although they are shorter and would fit."""
    stage = _stage(preempted_keeps_its_place, num_blocks=5)
    stage.add("a", "x30", out=6)
    stage.add("b", "y30", out=6)
    stage.step(2)
    stage.add("c", "z10", out=2)
    stage.run()
    return stage


def preemption_during_prefill() -> Stage:
    """a and c take the blocks that the prompt of b still needs, then those it has: b goes, and finds most again."""
    stage = _stage(preemption_during_prefill, num_blocks=10, max_num_batched_tokens=34)
    stage.add("a", "x30", out=20)
    stage.add("c", "z30", out=20)
    stage.step(2)
    stage.add("b", "y85", out=2, priority=-1)
    stage.run()
    return stage


def prompt_waits_for_blocks() -> Stage:
    """Growing a takes a block that b needs for its last chunk: b keeps what it has and waits for the end of a."""
    stage = _stage(prompt_waits_for_blocks, num_blocks=11, max_num_batched_tokens=33)
    stage.add("a", "x15", out=12)
    stage.step()
    stage.add("b", "y150", out=2)
    stage.run()
    return stage


def least_work_lost() -> Stage:
    """b has computed less than c when blocks run out, so it goes, although c came later; a is first and stays."""
    stage = _stage(least_work_lost, num_blocks=6)
    stage.add("a", "x15", out=20)
    stage.add("b", "y14", out=10)
    stage.add("c", "z33", out=10)
    stage.run()
    return stage


def preempted_with_a_step_in_flight() -> Stage:
    """b is preempted while a token is sampled for it: the answer is dropped, the same draw gives it again later."""
    stage = _stage(preempted_with_a_step_in_flight, num_blocks=5, max_steps_in_flight=2)
    stage.add("a", "x30", out=8)
    stage.add("b", "y30", out=5)
    stage.run()
    return stage


def two_steps_in_flight() -> Stage:
    """The end of a by its end token is known a step late: one token is discarded. The limit of b costs none."""
    stage = _stage(two_steps_in_flight, max_steps_in_flight=2, eos_token_ids=(102,))
    stage.add("a", "x20", out=9)
    stage.add("b", "y20", out=4, ignore_eos=True)
    stage.run()
    return stage


def abort_with_two_steps_in_flight() -> Stage:
    """An abort discards what two steps sample for a; its blocks are given to b at once, for the step after them."""
    stage = _stage(abort_with_two_steps_in_flight, num_blocks=3, max_num_seqs=1, max_steps_in_flight=2)
    stage.add("a", "x40", out=8)
    stage.step()
    stage.fill()
    stage.add("b", "y40", out=2)
    stage.abort("a")
    stage.run()
    return stage


def fork_with_copy() -> Stage:
    """Three choices compute their prompt once: whole blocks are shared, the last one is copied for each."""
    stage = _stage(fork_with_copy)
    stage.add("a", "x40", out=3, prior=("", "", ""))
    stage.run()
    return stage


def fork_at_a_block_border() -> Stage:
    """The prompt ends with its block: that block is copied too, since its last token is computed again."""
    stage = _stage(fork_at_a_block_border)
    stage.add("a", "x32", out=2, prior=("", ""))
    stage.run()
    return stage


def fork_of_a_preempted_parent() -> Stage:
    """The first choice is preempted before the second has a slot; the second forks once it runs again."""
    stage = _stage(fork_of_a_preempted_parent, num_blocks=5, max_num_seqs=2, max_num_batched_tokens=16)
    stage.add("p", "y15", out=20)
    stage.add("a", "x40", out=10, prior=("", ""))
    stage.run()
    return stage


def parent_ends_before_its_choices_fork() -> Stage:
    """The first choice ends with its first token: the second starts from its blocks in the cache."""
    stage = _stage(parent_ends_before_its_choices_fork)
    stage.add("a", "x40", out=1, prior=("", ""))
    stage.run()
    return stage


def sleeps_while_another_computes_the_prefix() -> Stage:
    """b sleeps while a computes their common prefix, and holds up nobody: c goes ahead."""
    stage = _stage(sleeps_while_another_computes_the_prefix, max_prefill_share=0.5)
    stage.add("a", "x100", out=2)
    stage.step()
    stage.add("b", "x80 y8", out=2)
    stage.add("c", "z10", out=2)
    stage.run()
    return stage


def wakes_when_the_other_gives_up() -> Stage:
    """a is aborted in the middle of its prompt: b wakes, takes what was computed and computes the rest."""
    stage = _stage(wakes_when_the_other_gives_up, max_prefill_share=0.5)
    stage.add("a", "x100", out=2)
    stage.add("b", "x80 y8", out=2)
    stage.step()
    stage.abort("a")
    stage.run()
    return stage


def watermark_admits_what_will_be_preempted() -> Stage:
    """Three prompts fit, their outputs do not: see ``predicted_peak_waits`` for the same with the default."""
    return _growing_requests(_stage(watermark_admits_what_will_be_preempted, num_blocks=8))


def predicted_peak_waits() -> Stage:
    """c waits until the peak of all fits: nobody is preempted, and nothing is computed twice."""
    return _growing_requests(_stage(predicted_peak_waits, num_blocks=8, admission=Admission.PREDICTED_PEAK))


def _growing_requests(stage: Stage) -> Stage:
    for name, prompt in (("a", "x30"), ("b", "y30"), ("c", "z30")):
        stage.add(name, prompt, out=20)
    stage.run()
    return stage


def predicted_peak_learns() -> Stage:
    """The outputs of red end after two tokens: after four of them a limit of 90 does not hold up the next."""
    stage = _stage(predicted_peak_learns, num_blocks=9, admission=Admission.PREDICTED_PEAK, eos_token_ids=(101,))
    for number in range(4):
        stage.add(f"r{number}", "x10", out=90, tenant="red")
    stage.run()
    stage.note("now two at once")
    stage.add("a", "y10", out=90, tenant="red")
    stage.add("b", "z10", out=90, tenant="red")
    stage.run()
    return stage


def aging() -> Stage:
    """A level of priority is worth three seconds: c, a second after b, passes it; d, four after, does not."""
    stage = _stage(aging, max_num_seqs=1, aging_seconds=3)
    stage.add("a", "v20", out=6)
    stage.step()
    stage.add("b", "w20", out=1)
    stage.step()
    stage.add("c", "x20", out=1, priority=1)
    stage.step(3)
    stage.add("d", "y20", out=1, priority=1)
    stage.run()
    return stage


def prefill_share() -> Stage:
    """While others run or wait, prompts take half a step, and a leaves half of that to b; alone a takes all."""
    stage = _stage(prefill_share, max_prefill_share=0.5)
    stage.add("a", "x200", out=2)
    stage.add("b", "y20", out=2)
    stage.run()
    return stage


def equal_prompts_one_after_the_other() -> Stage:
    """a and b come at once: a has its first token before b begins, and b no later than if they had shared."""
    stage = _stage(equal_prompts_one_after_the_other, max_prefill_share=0.5)
    stage.add("a", "x96", out=3)
    stage.add("b", "y95", out=3)
    stage.run()
    return stage


def a_prompt_that_is_mostly_cached_counts_as_short() -> Stage:
    """Of b only 16 tokens are not cached, so that a, who came before it, leaves it room."""
    stage = _stage(a_prompt_that_is_mostly_cached_counts_as_short, max_prefill_share=0.5)
    stage.add("c", "y96", out=1)
    stage.run()
    stage.add("a", "x100", out=2)
    stage.add("b", "y96 z16", out=2)
    stage.run()
    return stage


def target_itl() -> Stage:
    """Steps cost 1 ms and 0.1 ms a token: once that is learned, prompts beside a decode take what 4 ms leave."""
    stage = _stage(target_itl, target_itl_seconds=0.004, seconds_of=step_times(0.001, 0.0001, 0, 0, (0,)))
    stage.add("a", "x60", out=20)
    stage.step(9)
    stage.add("b", "y100", out=2)
    stage.run()
    return stage


def static_batch() -> Stage:
    """c comes while a and b run, and has room, but waits until the last of them has ended."""
    stage = _stage(static_batch, batching=Batching.STATIC)
    stage.add("a", "x20", out=2)
    stage.add("b", "y20", out=5)
    stage.step()
    stage.add("c", "z20", out=2)
    stage.run()
    return stage


def contiguous() -> Stage:
    """Each takes the blocks of the longest sequence at once: two run, c waits although its prompt would fit."""
    stage = _stage(contiguous, layout=Layout.CONTIGUOUS, max_model_len=96)
    stage.add("a", "x20", out=2)
    stage.add("b", "y20", out=3)
    stage.add("c", "z20", out=2)
    stage.run()
    return stage


def short_output_is_served_beside_a_long_prompt() -> Stage:
    """b comes while the prompt of a is computed: it shares the step once a leaves budget, not before."""
    stage = _stage(short_output_is_served_beside_a_long_prompt)
    stage.add("a", "x150", out=3)
    stage.step()
    stage.add("b", "y10", out=2)
    stage.run()
    return stage


def abort_in_flight() -> Stage:
    """An abort between a step and its result: the token is dropped, the end comes at once, the rest goes on."""
    stage = _stage(abort_in_flight)
    stage.add("a", "x40", out=4)
    stage.add("b", "y20", out=4)
    stage.step(2)
    stage.schedule()
    stage.abort("a")
    stage.apply()
    stage.run()
    return stage


def abort_during_prefill() -> Stage:
    """A client leaves during a long prefill: its full blocks stay findable, the next one starts from them."""
    stage = _stage(abort_during_prefill)
    stage.add("a", "x150", out=4)
    stage.step()
    stage.schedule()
    stage.abort("a")
    stage.apply()
    stage.add("b", "x150", out=1)
    stage.run()
    return stage


def abort_while_waiting() -> Stage:
    """The one in the middle of the line leaves; those behind it move up."""
    stage = _stage(abort_while_waiting, max_num_seqs=1)
    stage.add("a", "x20", out=2)
    stage.add("b", "y20", out=2)
    stage.add("c", "z20", out=1)
    stage.step()
    stage.abort("b")
    stage.run()
    return stage


def end_token() -> Stage:
    """The model's end token stops a; b ignores it."""
    stage = _stage(end_token, eos_token_ids=(102,))
    stage.add("a", "x20", out=5)
    stage.add("b", "y20", out=5, ignore_eos=True)
    stage.run()
    return stage


def stop_token_id() -> Stage:
    """A stop token id of one request does not stop another."""
    stage = _stage(stop_token_id)
    stage.add("a", "x20", out=5, stop=(101, 103))
    stage.add("b", "y20", out=5)
    stage.run()
    return stage


def length_and_stop_in_the_last_place() -> Stage:
    """The output limit ends a; a stop token in the last place is a stop."""
    stage = _stage(length_and_stop_in_the_last_place)
    stage.add("a", "x20", out=2)
    stage.add("b", "y20", out=2, stop=(101,))
    stage.run()
    return stage


def priority() -> Stage:
    """Higher priority first, then arrival; nobody who runs is pushed out by priority."""
    stage = _stage(priority, max_num_seqs=1)
    stage.add("a", "v20", out=2)
    stage.step()
    stage.add("b", "w20", out=1)
    stage.add("c", "x20", out=1, priority=1)
    stage.add("d", "y20", out=1, priority=-1)
    stage.add("e", "z20", out=1, priority=1)
    stage.run()
    return stage


def priority_decides_who_is_preempted() -> Stage:
    """When blocks run out the last in line goes, even if it came first."""
    stage = _stage(priority_decides_who_is_preempted, num_blocks=4)
    stage.add("a", "x30", out=4)
    stage.add("b", "y30", out=4, priority=1)
    stage.run()
    return stage


def deadlines() -> Stage:
    """One deadline passes while running, one while waiting; a third is met."""
    stage = _stage(deadlines, max_num_seqs=2)
    stage.add("a", "x20", out=9, deadline=3)
    stage.add("b", "y20", out=4, deadline=30)
    stage.add("c", "z20", out=2, deadline=2)
    for _ in range(4):
        stage.step()
        stage.expire()
    stage.run()
    return stage


def watermark() -> Stage:
    """Three blocks are free, b needs two: with a watermark of two it waits, because a will grow."""
    stage = _stage(watermark, num_blocks=6, watermark_fraction=0.34)
    stage.add("a", "x40", out=12)
    stage.step()
    stage.add("b", "y30", out=2)
    stage.run()
    return stage


def the_first_in_line_is_not_overtaken() -> Stage:
    """b does not fit; c would, but waits behind it, so that big requests are not starved by small ones."""
    stage = _stage(the_first_in_line_is_not_overtaken, num_blocks=8)
    stage.add("a", "x60", out=4)
    stage.step()
    stage.add("b", "y70", out=2)
    stage.add("c", "z10", out=2)
    stage.run()
    return stage


def waits_for_room_beside_a_long_prompt() -> Stage:
    """b needs three blocks: two are left once the prompt of a is computed, so b waits for the end of a."""
    stage = _stage(waits_for_room_beside_a_long_prompt, num_blocks=12)
    stage.add("a", "x150", out=2)
    stage.step()
    stage.add("b", "y40", out=2)
    stage.run()
    return stage


def salts() -> Stage:
    """The same prompt under another salt finds nothing; under the same one it does."""
    stage = _stage(salts)
    stage.add("a", "x40", out=1, salt="red")
    stage.run()
    stage.add("b", "x40", out=1, salt="blue")
    stage.run()
    stage.add("c", "x40", out=1)
    stage.run()
    stage.add("d", "x40", out=1, salt="red")
    stage.run()
    return stage


def eviction_takes_tails_first() -> Stage:
    """c needs three blocks when one is free: the tail of a, used longest ago, goes before its head and before b."""
    stage = _stage(eviction_takes_tails_first, num_blocks=7)
    stage.add("a", "x49", out=1)
    stage.run()
    stage.add("b", "y49", out=1)
    stage.run()
    stage.add("c", "z40", out=1)
    stage.run()
    stage.note("what is left of a and b")
    stage.add("a2", "x49", out=1)
    stage.run()
    stage.add("b2", "y49", out=1)
    stage.run()
    return stage


def resume_after_another_engine() -> Stage:
    """A request comes with 10 tokens emitted elsewhere: they count as output, and are computed like a prompt."""
    stage = _stage(resume_after_another_engine)
    stage.add("a", "x30", out=12, prior=("o10",))
    stage.run()
    stage.note("again, now with prompt and output cached")
    stage.add("b", "x30", out=12, prior=("o10",))
    stage.run()
    return stage


def worker_loss() -> Stage:
    """Everything ends with an error, running or waiting, while a step is in flight; no block stays held."""
    stage = _stage(worker_loss, max_num_seqs=2)
    stage.add("a", "x40", out=4)
    stage.add("b", "y40", out=4)
    stage.add("c", "z40", out=4)
    stage.step(2)
    stage.schedule()
    stage.fail_all(WorkerLost("A worker was lost.", retry_after_seconds=1.0))
    return stage


def two_choices() -> Stage:
    """Two choices of one request: the second, which waits for the prompt of the first, is aborted alone."""
    stage = _stage(two_choices)
    stage.add("a", "x40", out=3, prior=("", ""))
    stage.step()
    stage.abort("a", choice=1)
    stage.run()
    return stage


def invalid_logits() -> Stage:
    """Logits of a are not numbers: only a ends, and nothing that it has computed is found by others."""
    stage = _stage(invalid_logits)
    stage.add("a", "x100", out=4)
    stage.step()
    stage.add("b", "y20", out=4)
    stage.step(failing="a")
    stage.run()
    stage.add("c", "x100", out=1)
    stage.run()
    return stage


def failure_in_a_prompt_chunk() -> Stage:
    """A chunk of a fails before anything is sampled: its blocks are forgotten, b wakes and computes them."""
    stage = _stage(failure_in_a_prompt_chunk, max_prefill_share=0.5)
    stage.add("a", "x100", out=2)
    stage.add("b", "x80 y8", out=2)
    stage.step()
    stage.step(failing="a")
    stage.run()
    return stage


def decodes_fill_the_budget() -> Stage:
    """No more sequences run than a step has tokens, so none that runs is left out of a step; c waits."""
    stage = _stage(decodes_fill_the_budget, max_num_batched_tokens=2)
    stage.add("a", "x2", out=6)
    stage.add("b", "y1", out=6)
    stage.add("c", "z1", out=2)
    stage.run()
    return stage


def drafts() -> Stage:
    """a says what its prompt says: four drafts a step are right until it ends; one step is in flight meanwhile."""
    stage = _stage(drafts, max_steps_in_flight=2, speculation=SpeculationConfig())
    stage.add("a", "x6 o12 x8", out=20)
    stage.add("b", "y20", out=8)
    stage.run()
    return stage


def drafts_give_way() -> Stage:
    """The prompt of b leaves a no budget for drafts: a goes on without for a token, then drafts in what is left."""
    stage = _stage(drafts_give_way, num_blocks=5, max_num_batched_tokens=24, speculation=SpeculationConfig())
    stage.add("a", "o14", out=10)
    stage.step(2)
    stage.add("b", "y40", out=6)
    stage.run()
    return stage


def refusals() -> Stage:
    """What can never be served is refused at once, and so is one too many in line."""
    stage = _stage(refusals, num_blocks=4, max_model_len=100, max_waiting_sequences=2)
    stage.add("a", "x90", out=20)
    stage.add("b", "x60", out=20)
    stage.add("c", "x10", out=2, prior=("o2",))
    stage.add("d", "x10", out=1)
    stage.add("d", "x10", out=1)
    stage.add("e", "x10", out=1)
    stage.add("f", "x10", out=1)
    stage.run()
    return stage


SCENARIOS: dict[str, Script] = {
    script.__name__: script
    for script in (
        one_request,
        budget_of_64,
        chunks_beside_decodes,
        prefix_hit,
        full_hit_computes_the_last_block,
        next_turn,
        same_prompt_at_once,
        preemption_and_resume,
        preempted_keeps_its_place,
        preemption_during_prefill,
        prompt_waits_for_blocks,
        least_work_lost,
        preempted_with_a_step_in_flight,
        two_steps_in_flight,
        abort_with_two_steps_in_flight,
        fork_with_copy,
        fork_at_a_block_border,
        fork_of_a_preempted_parent,
        parent_ends_before_its_choices_fork,
        sleeps_while_another_computes_the_prefix,
        wakes_when_the_other_gives_up,
        watermark_admits_what_will_be_preempted,
        predicted_peak_waits,
        predicted_peak_learns,
        aging,
        prefill_share,
        equal_prompts_one_after_the_other,
        a_prompt_that_is_mostly_cached_counts_as_short,
        target_itl,
        static_batch,
        contiguous,
        short_output_is_served_beside_a_long_prompt,
        abort_in_flight,
        abort_during_prefill,
        abort_while_waiting,
        end_token,
        stop_token_id,
        length_and_stop_in_the_last_place,
        priority,
        priority_decides_who_is_preempted,
        deadlines,
        watermark,
        the_first_in_line_is_not_overtaken,
        waits_for_room_beside_a_long_prompt,
        salts,
        eviction_takes_tails_first,
        resume_after_another_engine,
        worker_loss,
        two_choices,
        invalid_logits,
        failure_in_a_prompt_chunk,
        decodes_fill_the_budget,
        drafts,
        drafts_give_way,
        refusals,
    )
}


def _stage(script: Script, **limits: object) -> Stage:
    return Stage(script.__doc__ or "", **limits)  # type: ignore[arg-type]  # Each script passes what Stage takes.
