"""The requests that generate: parse, admit, spool, prepare, limit, place, submit, answer, account.

Owns the order of these and which end is written down. It must not know how any of them is done, nor the dialect in
which a request is asked and answered.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from libs.errors import OctavoError
from libs.obs import get_logger
from services.gateway.accounting import Ledger, RequestAccount, RequestIdentity
from services.gateway.admission import Admission, AdmissionSlot
from services.gateway.answer_format import AnswerHead
from services.gateway.answers import AnswerSettings, AnswerSource, PromptAnswer, send_stream, send_whole
from services.gateway.client_call import Answered, AnswerWriter, Caller, ClientCall
from services.gateway.endpoints import Endpoint, Request, ValidRequest
from services.gateway.failover import Generation, Generations
from services.gateway.generation import SamplingParams, Submission, new_choices
from services.gateway.generation_options import GenerationOptions, check_total_logprobs
from services.gateway.http_errors import internal_error, known_error
from services.gateway.latency_receipt import Segment
from services.gateway.limits.limiter import NO_HOLD, Ask, Hold, Limiter
from services.gateway.limits.refusals import refusal_of
from services.gateway.model_access import check_access
from services.gateway.openai_schema import ModelFacts, read_head
from services.gateway.output_text import ChoiceOutput, new_output
from services.gateway.parsed_output import ParsedOutput
from services.gateway.peers import PlacementAsk
from services.gateway.receipt_format import ReceiptFormat
from services.gateway.request_spans import RequestSpans, RequestTrace
from services.gateway.text_preparation import PreparedPrompt, PreparedText, TextPreparation, fit_output
from services.gateway.token_relay import JsonPieces

log = get_logger("completions")


@dataclass(frozen=True, slots=True)
class CompletionSettings:
    """What an operator may set."""

    request_timeout_seconds: float
    default_max_tokens: int | None
    # A gap between two tokens from which on a latency receipt calls it a stall.
    stall_bound_seconds: float
    answers: AnswerSettings


@dataclass(slots=True)
class _Exchange:
    """One request while it is served: an account for each prompt, and its generation as soon as there is one."""

    caller: Caller
    accounts: list[RequestAccount]
    # The request's last moment on the event loop's clock.
    deadline: float
    trace: RequestTrace
    generations: list[Generation] = field(default_factory=list)
    # What it holds of its tenant's limits.
    hold: Hold = NO_HOLD
    # Set when any generation has something to take.
    news: asyncio.Event = field(default_factory=asyncio.Event)


class Completions:
    """Serves requests for text, whatever their dialect."""

    def __init__(
        self,
        *,
        model: ModelFacts,
        text: TextPreparation,
        admission: Admission,
        limiter: Limiter,
        generations: Generations,
        ledger: Ledger,
        settings: CompletionSettings,
        max_model_len: Callable[[], int],
        draw_seed: Callable[[], int],
        tasks: asyncio.TaskGroup,
        spans: RequestSpans,
    ) -> None:
        self._spans = spans
        self._model = model
        self._text = text
        self._admission = admission
        self._limiter = limiter
        self._generations = generations
        self._ledger = ledger
        self._settings = settings
        self._max_model_len = max_model_len
        self._draw_seed = draw_seed
        self._tasks = tasks
        self._json_pieces = JsonPieces(text.model_text.tokenizer)

    async def serve(self, call: ClientCall[Answered], endpoint: Endpoint[Request]) -> Answered:
        """Serve one request; however it ends, its accounts are closed with that end.

        Raises:
            OctavoError: an error before the first byte of the answer.
        """
        caller = call.caller
        account = self._ledger.open(_identity(caller, caller.request_id))
        deadline = asyncio.get_running_loop().time() + self._seconds_for(call)
        writer = call.new_writer(deadline)
        exchange = _Exchange(caller, [account], deadline, self._spans.begin(caller))
        try:
            with self._admission.admit() as slot, slot.interruptible():
                return await self._serve(exchange, call, writer, endpoint, slot)
        except (asyncio.CancelledError, ConnectionError) as left:
            for account in exchange.accounts:
                account.abort(is_head_sent=writer.is_open)
            # aiohttp would answer a ConnectionError, to nobody.
            raise asyncio.CancelledError from left
        except OctavoError as error:
            _forget_origin(error)
            return await _fail(exchange, writer, known_error(error))
        except Exception as error:
            log.exception("request failed", request_id=caller.request_id)
            _forget_origin(error)
            return await _fail(exchange, writer, internal_error(caller.request_id))
        finally:
            # Before the client can have read the end of its answer, and so before it can ask again.
            exchange.hold.close(_num_billed_tokens(exchange))
            for account, generation in itertools.zip_longest(exchange.accounts, exchange.generations):
                self._close(account, generation)
            exchange.trace.end(exchange.accounts)
            _tell_untold_receipt(caller)

    def _seconds_for(self, call: ClientCall[Answered]) -> float:
        """Return the time for a whole request: the server's, or what the client gives if that is less."""
        given = call.remaining_seconds
        own = self._settings.request_timeout_seconds
        return own if given is None else min(own, given)

    async def _serve(
        self,
        exchange: _Exchange,
        call: ClientCall[Answered],
        writer: AnswerWriter[Answered],
        endpoint: Endpoint[Request],
        slot: AdmissionSlot,
    ) -> Answered:
        body = await call.read_body()
        head = read_head(body.fields)
        exchange.accounts[0].model_name = self._model.own_name(head.model_name)
        exchange.accounts[0].is_streaming = head.is_streaming
        request = await self._text.check(lambda: endpoint.parse(body.fields, self._model), num_bytes=body.num_bytes)
        times = exchange.caller.times
        times.lap(Segment.PARSE)
        times.want(request.options, self._settings.stall_bound_seconds)
        check_access(exchange.caller.tenant, self._model, request.model)
        exchange.trace.begin_generation(endpoint.operation, self._model.name)
        slot.grow(len(request.prompts) - 1)
        self._accept(exchange, request)
        times.lap(Segment.RECORD)

        max_model_len = self._max_model_len()
        text = await self._text.prepare(
            request.prompts,
            request.options,
            cache_salt=exchange.caller.tenant.cache_salt,
            max_model_len=max_model_len,
            num_body_bytes=body.num_bytes,
            prompt_field=endpoint.prompt_field,
            marks=times,
        )
        for account, prompt in zip(exchange.accounts, text.prompts, strict=True):
            account.num_prompt_tokens = len(prompt.token_ids)
        limits = self._output_limits(endpoint, request.options, text.prompts, max_model_len)
        await self._take_hold(exchange, request.options, max_output_tokens=sum(limits))
        for account, prompt, limit in zip(exchange.accounts, text.prompts, limits, strict=True):
            params = self._sampling_params(request.options, limit, text)
            exchange.generations.append(self._new_generation(exchange, account, request.options, prompt, params))
        return await self._answer(exchange, writer, endpoint, request, text.prompts)

    def _accept(self, exchange: _Exchange, request: ValidRequest) -> None:
        """Open an account for every prompt, and write all down before any is placed."""
        for index in range(1, len(request.prompts)):
            request_id = _request_id_of_prompt(exchange.caller.request_id, index)
            identity = _identity(exchange.caller, request_id)
            exchange.accounts.append(self._ledger.open(identity))
        for account in exchange.accounts:
            account.model_name, account.is_streaming = self._model.name, request.options.is_streaming
            account.user, account.metadata = request.options.user, request.options.metadata
            account.accept()

    def _output_limits(
        self,
        endpoint: Endpoint[Request],
        options: GenerationOptions,
        prompts: Sequence[PreparedPrompt],
        max_model_len: int,
    ) -> list[int]:
        """Return the output limit beside each prompt, in tokens; raises OctavoError for what cannot be served."""
        limits = [
            fit_output(
                options,
                num_prompt_tokens=len(prompt.token_ids),
                max_model_len=max_model_len,
                default_max_tokens=endpoint.default_max_tokens or self._settings.default_max_tokens,
                prompt_field=endpoint.prompt_field,
            )
            for prompt in prompts
        ]
        num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        check_total_logprobs(options, num_prompt_tokens=num_prompt_tokens, max_output_tokens=sum(limits))
        return limits

    async def _take_hold(self, exchange: _Exchange, options: GenerationOptions, *, max_output_tokens: int) -> None:
        """Take what the request may need of its tenant's limits; raises RateLimited or BudgetExhausted."""
        caller = exchange.caller
        limits = caller.tenant.limits
        if not limits.is_limited:
            return
        num_prompt_tokens = sum(account.num_prompt_tokens for account in exchange.accounts)
        ask = Ask(
            tenant_id=caller.tenant.tenant_id,
            limits=limits,
            request_id=caller.request_id,
            num_tokens=num_prompt_tokens + max_output_tokens * options.num_choices,
        )
        caller.times.skip()
        reservation = await self._limiter.reserve(ask)
        caller.times.lap(Segment.LIMITS)
        exchange.hold = reservation.hold
        caller.limit_report.tell(limits, reservation.decision.standing)
        if (refusal := refusal_of(ask, reservation.decision)) is not None:
            raise refusal

    def _new_generation(
        self,
        exchange: _Exchange,
        account: RequestAccount,
        options: GenerationOptions,
        prompt: PreparedPrompt,
        params: SamplingParams,
    ) -> Generation:
        caller = exchange.caller
        ask = PlacementAsk(
            request_id=account.identity.request_id,
            tenant_id=caller.tenant.tenant_id,
            traceparent=exchange.trace.traceparent,
            model_name=self._model.name,
            num_prompt_tokens=len(prompt.token_ids),
            max_output_tokens=params.max_output_tokens,
            prefix_hashes=prompt.prefix_hashes,
            hash_contract=self._text.hash_contract,
            priority=options.priority,
        )
        submission = Submission(
            request_id=account.identity.request_id,
            tenant_id=caller.tenant.tenant_id,
            traceparent=exchange.trace.traceparent,
            prompt_token_ids=prompt.token_ids,
            sampling_params=params,
            cache_salt=caller.tenant.cache_salt,
            shared_prefix=prompt.shared_prefix,
            choices=new_choices(options.num_choices),
            priority=options.priority,
            stall_bound_seconds=caller.times.wanted_stall_bound_seconds,
        )
        return self._generations.new(ask, submission, deadline=exchange.deadline, news=exchange.news)

    def _sampling_params(
        self, options: GenerationOptions, max_output_tokens: int, text: PreparedText
    ) -> SamplingParams:
        return SamplingParams(
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            min_p=options.min_p,
            # Always sent, so that the request can be computed again exactly.
            seed=self._draw_seed() if options.seed is None else options.seed,
            max_output_tokens=max_output_tokens,
            min_output_tokens=options.min_output_tokens,
            stop_token_ids=options.stop_token_ids,
            ignore_eos=options.ignore_eos,
            presence_penalty=options.presence_penalty,
            frequency_penalty=options.frequency_penalty,
            repetition_penalty=options.repetition_penalty,
            logit_bias=options.logit_bias,
            allowed_token_ids=options.allowed_token_ids,
            bad_words=text.bad_words,
            grammar=text.grammar,
            num_logprobs=options.num_logprobs if options.max_output_tokens != 0 else None,
            num_prompt_logprobs=options.num_measured_prompt_logprobs,
        )

    async def _answer(
        self,
        exchange: _Exchange,
        writer: AnswerWriter[Answered],
        endpoint: Endpoint[Request],
        request: Request,
        prompts: Sequence[PreparedPrompt],
    ) -> Answered:
        served = zip(exchange.accounts, exchange.generations, prompts, strict=True)
        answers = [
            PromptAnswer(generation, self._new_outputs(request.options, prompt), account, prompt_index=index)
            for index, (account, generation, prompt) in enumerate(served)
        ]
        times = exchange.caller.times
        source = AnswerSource(
            answers,
            exchange.news,
            deadline=exchange.deadline,
            settings=self._settings.answers,
            times=times.answer_times(exchange.generations),
        )
        head = AnswerHead(
            answer_id=f"{endpoint.answer_id_prefix}{exchange.caller.request_id}",
            created=int(exchange.accounts[0].accepted_time),
            model=request.model,
        )
        answer_format = endpoint.new_format(request, head, prompts, self._text.model_text.tokenizer)
        if times.is_wanted:
            answer_format = ReceiptFormat(answer_format, times)
        if request.options.is_streaming:
            return await send_stream(source, writer, answer_format, self._json_pieces)
        return await send_whole(source, writer, answer_format)

    def _new_outputs(self, options: GenerationOptions, prompt: PreparedPrompt) -> list[ChoiceOutput]:
        return [self._new_output(options, prompt) for _ in range(options.num_choices)]

    def _new_output(self, options: GenerationOptions, prompt: PreparedPrompt) -> ChoiceOutput:
        tokenizer, model_format = self._text.model_text.tokenizer, self._text.model_format
        parser = None
        if options.reads_reasoning:
            parser = model_format.new_parser(prompt.reasoning_state, options.tool_names)
        if parser is None:
            return new_output(tokenizer, options, is_continued=prompt.is_continued)
        kept = model_format.kept_token_ids(with_tools=bool(options.tool_names))
        output = new_output(tokenizer, options, is_continued=prompt.is_continued, kept_token_ids=kept)
        return ParsedOutput(output, parser, shows_reasoning=options.shows_reasoning)

    def _close(self, account: RequestAccount, generation: Generation | None) -> None:
        """Stop what still runs for a prompt and close its account, once the engine has given its counts."""
        if generation is None:
            account.close(usage=None, num_received_tokens=0, engine_id="", num_retries=0)
            return
        generation.stop()
        if generation.has_ended:
            _close_with(account, generation)
        else:
            self._tasks.create_task(self._settle(account, generation))

    async def _settle(self, account: RequestAccount, generation: Generation) -> None:
        try:
            await generation.settle(self._settings.answers.abort_settle_seconds)
        finally:
            _close_with(account, generation)


def _forget_origin(error: Exception) -> None:
    """Forget where an error comes from, which no client is told.

    The frames there hold the body, and the account holds the error: a body of megabytes would wait for the garbage
    collector, and each of its rounds would look through all that wait.
    """
    error.__traceback__ = error.__cause__ = error.__context__ = None


async def _fail(exchange: _Exchange, writer: AnswerWriter[Answered], error: OctavoError) -> Answered:
    """Write an error down and tell the client: as an event when the stream has begun, else by raising it."""
    for account in exchange.accounts:
        account.fail(error, is_head_sent=writer.is_open)
    if writer.is_open:
        return await writer.fail(error)
    raise error


def _num_billed_tokens(exchange: _Exchange) -> int:
    """Return what counts against the tenant's limits: nothing of a prompt that came to no engine."""
    served = zip(exchange.accounts, exchange.generations, strict=False)
    return sum(account.num_billed_tokens for account, generation in served if generation.engine_id)


def _tell_untold_receipt(caller: Caller) -> None:
    """Log the receipt of an answer that broke off before its client could be told."""
    if caller.times.is_wanted and not caller.times.is_told:
        timings = caller.times.receipt().as_json()
        log.info("request broke off before its receipt", request_id=caller.request_id, timings=timings)


def _close_with(account: RequestAccount, generation: Generation) -> None:
    account.close(
        usage=generation.usage,
        num_received_tokens=generation.num_received_tokens,
        engine_id=generation.engine_id,
        num_retries=generation.num_retries,
    )


def _identity(caller: Caller, request_id: str) -> RequestIdentity:
    return RequestIdentity(
        request_id=request_id,
        client_request_id=caller.client_request_id,
        tenant_id=caller.tenant.tenant_id,
        endpoint=caller.route,
    )


def _request_id_of_prompt(request_id: str, index: int) -> str:
    """Return the id of a further prompt of a request; it follows from the first one's, which is the request's."""
    return str(uuid.uuid5(uuid.UUID(request_id), f"prompt-{index}"))
