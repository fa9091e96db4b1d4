"""POST /v1/chat/completions: parse, admit, spool, prepare, place, submit, answer, account.

Owns the order of these and which end is written down. It must not know how any of them is done.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from aiohttp import web

from libs.errors import OctavoError
from libs.obs import get_logger
from services.gateway.accounting import Ledger, RequestAccount, RequestIdentity
from services.gateway.admission import Admission
from services.gateway.answers import AnswerSettings, AnswerSource, send_stream, send_whole
from services.gateway.failover import Generation, Generations
from services.gateway.generation import SamplingParams, Submission
from services.gateway.http_body import BodyLimits, read_json_body
from services.gateway.http_errors import internal_error, known_error
from services.gateway.identity import Tenant
from services.gateway.openai_answers import AnswerHead, ChatChunks
from services.gateway.openai_schema import (
    ModelFacts,
    ValidChatCompletion,
    parse_chat_completion,
    parse_json,
    read_head,
)
from services.gateway.output_text import OutputText
from services.gateway.peers import PlacementAsk
from services.gateway.sse import SseWriter
from services.gateway.text_preparation import PreparedPrompt, TextPreparation, fit_output

log = get_logger("completions")

_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass(frozen=True, slots=True)
class CompletionSettings:
    """What an operator may set."""

    body_limits: BodyLimits
    request_timeout_seconds: float
    default_max_tokens: int | None
    answers: AnswerSettings


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request, and what its headers say."""

    tenant: Tenant
    request_id: str
    client_request_id: str | None


@dataclass(slots=True)
class _Exchange:
    """One request while it is served."""

    http_request: web.Request
    caller: Caller
    account: RequestAccount
    writer: SseWriter
    # The request's last moment on the event loop's clock.
    deadline: float
    generation: Generation | None = None


class ChatCompletions:
    """Serves chat completions."""

    def __init__(
        self,
        *,
        model: ModelFacts,
        text: TextPreparation,
        admission: Admission,
        generations: Generations,
        ledger: Ledger,
        settings: CompletionSettings,
        max_model_len: Callable[[], int],
        draw_seed: Callable[[], int],
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._model = model
        self._text = text
        self._admission = admission
        self._generations = generations
        self._ledger = ledger
        self._settings = settings
        self._max_model_len = max_model_len
        self._draw_seed = draw_seed
        self._tasks = tasks

    async def post(self, http_request: web.Request, caller: Caller) -> web.StreamResponse:
        """Serve one request; however it ends, its account is closed with that end.

        Raises:
            OctavoError: an error before the first byte of the answer.
        """
        identity = RequestIdentity(
            request_id=caller.request_id,
            client_request_id=caller.client_request_id,
            tenant_id=caller.tenant.tenant_id,
            endpoint=http_request.path,
        )
        account = self._ledger.open(identity)
        deadline = asyncio.get_running_loop().time() + self._settings.request_timeout_seconds
        writer = SseWriter(http_request, deadline=deadline)
        exchange = _Exchange(http_request, caller, account, writer, deadline)
        try:
            with self._admission.admit() as slot, slot.interruptible():
                return await self._serve(exchange)
        except (asyncio.CancelledError, ConnectionError) as left:
            account.abort(is_head_sent=writer.is_open)
            # aiohttp would answer a ConnectionError, to nobody.
            raise asyncio.CancelledError from left
        except OctavoError as error:
            return await _fail(exchange, known_error(error))
        except Exception:
            log.exception("request failed", request_id=caller.request_id)
            return await _fail(exchange, internal_error(caller.request_id))
        finally:
            self._close(account, exchange.generation)

    async def _serve(self, exchange: _Exchange) -> web.StreamResponse:
        account, caller = exchange.account, exchange.caller
        body = parse_json(await read_json_body(exchange.http_request, self._settings.body_limits))
        head = read_head(body)
        account.model_name, account.is_streaming = head.model_name, head.is_streaming
        request = parse_chat_completion(body, self._model)
        account.user, account.metadata = request.user, request.metadata
        account.accept()

        max_model_len = self._max_model_len()
        prompt = await self._text.prepare(request, cache_salt=caller.tenant.cache_salt, max_model_len=max_model_len)
        account.num_prompt_tokens = len(prompt.token_ids)
        max_output_tokens = fit_output(
            request,
            num_prompt_tokens=len(prompt.token_ids),
            max_model_len=max_model_len,
            default_max_tokens=self._settings.default_max_tokens,
        )
        exchange.generation = self._new_generation(exchange, request, prompt, max_output_tokens)
        return await self._answer(exchange, request, exchange.generation)

    def _new_generation(
        self, exchange: _Exchange, request: ValidChatCompletion, prompt: PreparedPrompt, max_output_tokens: int
    ) -> Generation:
        caller = exchange.caller
        traceparent = _traceparent(exchange.http_request)
        ask = PlacementAsk(
            request_id=caller.request_id,
            tenant_id=caller.tenant.tenant_id,
            traceparent=traceparent,
            model_name=request.model,
            num_prompt_tokens=len(prompt.token_ids),
            max_output_tokens=max_output_tokens,
            prefix_hashes=prompt.prefix_hashes,
            hash_contract=self._text.hash_contract,
        )
        submission = Submission(
            request_id=caller.request_id,
            tenant_id=caller.tenant.tenant_id,
            traceparent=traceparent,
            prompt_token_ids=prompt.token_ids,
            sampling_params=self._sampling_params(request, max_output_tokens),
            cache_salt=caller.tenant.cache_salt,
            shared_prefix=prompt.shared_prefix,
        )
        return self._generations.new(ask, submission, deadline=exchange.deadline)

    def _sampling_params(self, request: ValidChatCompletion, max_output_tokens: int) -> SamplingParams:
        return SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            min_p=request.min_p,
            # Always sent, so that the request can be computed again exactly.
            seed=self._draw_seed() if request.seed is None else request.seed,
            max_output_tokens=max_output_tokens,
            min_output_tokens=request.min_output_tokens,
            stop_token_ids=request.stop_token_ids,
            ignore_eos=request.ignore_eos,
        )

    async def _answer(
        self, exchange: _Exchange, request: ValidChatCompletion, generation: Generation
    ) -> web.StreamResponse:
        output = OutputText(
            self._text.model_text.tokenizer,
            stop_strings=request.stop_strings,
            min_output_tokens=request.min_output_tokens,
        )
        source = AnswerSource(generation, output, exchange.account, self._settings.answers)
        head = AnswerHead(
            completion_id=f"chatcmpl-{exchange.caller.request_id}",
            created=int(exchange.account.accepted_time),
            model=request.model,
        )
        if not request.is_streaming:
            return await send_whole(source, head, exchange.account)
        chunks = ChatChunks(head, includes_usage=request.includes_usage)
        return await send_stream(source, exchange.writer, chunks, exchange.account)

    def _close(self, account: RequestAccount, generation: Generation | None) -> None:
        """Stop what still runs for the request and close its account, once the engine has given its counts."""
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


async def _fail(exchange: _Exchange, error: OctavoError) -> web.StreamResponse:
    """Write an error down and tell the client: as an event when the stream has begun, else by raising it."""
    exchange.account.fail(error, is_head_sent=exchange.writer.is_open)
    if exchange.writer.is_open:
        return await exchange.writer.fail(error)
    raise error


def _close_with(account: RequestAccount, generation: Generation) -> None:
    account.close(
        usage=generation.usage,
        num_received_tokens=generation.num_received_tokens,
        engine_id=generation.engine_id,
        num_retries=generation.num_retries,
    )


def _traceparent(http_request: web.Request) -> str | None:
    value = http_request.headers.get("traceparent", "")
    return value if _TRACEPARENT.fullmatch(value) else None
