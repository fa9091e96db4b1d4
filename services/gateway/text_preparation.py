"""From prompts to token ids, away from the event loop but for short requests.

Owns the threads that check long requests, render templates, tokenize and hash, and the rules how much of a prompt
is kept and how much output fits beside it. It must not know HTTP or engines.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import orjson

from libs.errors import ContextLengthExceeded, InvalidRequest, UnsupportedField
from libs.grammar import Grammar, GrammarCompiler, GrammarForm
from libs.kv import HASH_ALGORITHM, HashContract, PrefixHash, SharedPrefix, prefix_hashes
from libs.text import IncrementalDetokenizer, ModelText
from services.gateway.client_call import LONG_BODY_BYTES
from services.gateway.generation_options import TRUNCATE_TO_FIT, GenerationOptions
from services.gateway.latency_receipt import Marks, NoMarks, Segment
from services.gateway.model_formats.model_format import ModelFormat
from services.gateway.model_formats.reasoning import ReasoningState
from services.gateway.prompts import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from services.gateway.shared_prefixes import SharedPrefixes
from services.gateway.tool_grammar import with_reasoning
from services.gateway.tool_prompt import phrased
from services.gateway.tools import Tool

Result = TypeVar("Result")

_NO_MARKS = NoMarks()
# The text of a body of so much takes 0.1 to 0.3 ms, and 1 ms where every digit is a token. To hand it to a thread,
# and to wait there for the interpreter, takes longer and costs more.
_SHORT_BODY_BYTES = 1024
_LONG_TEXT_CHARACTERS = 256 * 1024
# A character of a grammar costs as much as so many of a text; only decides which threads do the work.
_CHARACTERS_PER_GRAMMAR_CHARACTER = 16
# In these lies the marker of reasoning that a template writes at the end of a prompt, and white space after it.
_ENDING_TOKENS = 16


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt as engines and routers know it."""

    token_ids: list[int]
    prefix_hashes: list[PrefixHash]
    shared_prefix: SharedPrefix | None = None
    # What the answer begins with where the client wants to see it.
    echoed_text: str = ""
    # Whether the answer goes on with a text, so that a space at its beginning counts.
    is_continued: bool = False
    # Where the answer begins: the prompt may have opened reasoning.
    reasoning_state: ReasoningState = ReasoningState.OVER
    # For each token, how much of the echoed text is certain before it; only where log-probabilities are shown.
    echoed_offsets: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class PreparedText:
    """All the text of a request as token ids."""

    prompts: list[PreparedPrompt]
    # Sequences of tokens that must not be completed.
    bad_words: tuple[tuple[int, ...], ...]
    # What holds the answers, reasoning included.
    grammar: Grammar | None = None


class TextPreparation:
    """Renders and tokenizes for one model.

    Its queue is bounded by the number of requests that the gateway admits.
    """

    def __init__(
        self,
        model_text: ModelText,
        shared_prefixes: SharedPrefixes,
        *,
        block_size: int,
        num_threads: int,
        model_format: ModelFormat | None = None,
    ) -> None:
        """Prepare; without a ``model_format`` it is what the model's template has."""
        self.model_text = model_text
        self.model_format = model_format or ModelFormat.of(model_text)
        self._shared_prefixes = shared_prefixes
        self.hash_contract = HashContract(block_size, HASH_ALGORITHM, model_text.tokenizer_digest)
        eos_token_ids = model_text.eos_token_ids
        self._grammars = GrammarCompiler(model_text.tokenizer, eos_token_ids) if eos_token_ids else None
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="text")
        # Long texts queue among themselves, so that they cannot hold up everybody else.
        self._long_text_thread = ThreadPoolExecutor(1, thread_name_prefix="long-text")
        # A long request that is wrong is told so while long texts of others are tokenized.
        self._long_body_thread = ThreadPoolExecutor(1, thread_name_prefix="long-body")

    async def prepare(
        self,
        prompts: Sequence[Prompt],
        options: GenerationOptions,
        *,
        cache_salt: bytes,
        max_model_len: int,
        num_body_bytes: int,
        prompt_field: str = "prompt",
        marks: Marks = _NO_MARKS,
    ) -> PreparedText:
        """Render, tokenize, cut and hash a request's prompts, tokenize its bad words and try its grammar.

        That is done in a thread, or at once where the request's body is short. ``marks`` are set where it is done;
        ``prompt_field`` names the prompt in errors.

        A prompt beyond ``max_model_len`` comes back as its tokens alone: it will not be served.

        Raises:
            TemplateRefused: the model's template does not take these messages.
            InvalidRequest: a prompt without any token, or a form of the answer that cannot be enforced.
            ContextLengthExceeded: a prompt so long that it need not be tokenized to see that it does not fit.
        """
        self._refuse_hopeless(prompts, options, max_model_len, prompt_field)

        def prepare() -> PreparedText:
            marks.lap(Segment.TEXT_QUEUE)
            prepared = [self._prepare(prompt, options, cache_salt, max_model_len, marks) for prompt in prompts]
            grammar = self._grammar(options, prepared[0].reasoning_state)
            marks.lap(Segment.CONSTRAINT)
            bad_words = self._bad_words(options.bad_words)
            marks.lap(Segment.TOKENIZE)
            return PreparedText(prepared, bad_words, grammar)

        has_grammar = options.constraint is not None or options.max_reasoning_tokens is not None
        if num_body_bytes <= _SHORT_BODY_BYTES and len(prompts) == 1 and not has_grammar:
            return prepare()
        num_characters = sum(prompt.num_characters for prompt in prompts)
        if options.constraint is not None:
            num_characters += _CHARACTERS_PER_GRAMMAR_CHARACTER * options.constraint.grammar.num_characters
        text = await self.run(prepare, num_characters=num_characters)
        marks.lap(Segment.EVENT_LOOP)
        return text

    async def check(self, work: Callable[[], Result], *, num_bytes: int) -> Result:
        """Do work that checks a request of so many bytes: at once, or in a thread where that may take long."""
        if num_bytes <= LONG_BODY_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._long_body_thread, work)

    async def run(self, work: Callable[[], Result], *, num_characters: int) -> Result:
        """Do work on so much text in a thread."""
        threads = self._threads if num_characters <= _LONG_TEXT_CHARACTERS else self._long_text_thread
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    def token_ids_of(self, prompt: Prompt, marks: Marks = _NO_MARKS) -> list[int]:
        """Render and tokenize one prompt, in the calling thread."""
        tokenizer = self.model_text.tokenizer
        match prompt:
            case ChatPrompt():
                spoken = phrased(prompt, self.model_format)
                return self.model_text.chat_template.render_token_ids(
                    spoken.messages,
                    tokenizer,
                    add_generation_prompt=spoken.add_generation_prompt,
                    continue_final_message=spoken.continue_final_message,
                    tools=spoken.tools,
                    variables=spoken.variables,
                    on_rendered=lambda: marks.lap(Segment.TEMPLATE),
                )
            case TextPrompt():
                prefix = tokenizer.definition.prompt_prefix_token_ids if prompt.add_special_tokens else ()
                return [*prefix, *tokenizer.encode(prompt.text, allow_special=True)]
            case TokenPrompt():
                return list(prompt.token_ids)

    def _refuse_hopeless(
        self, prompts: Sequence[Prompt], options: GenerationOptions, max_model_len: int, prompt_field: str
    ) -> None:
        """Refuse what cannot fit even if all its tokens are the longest: megabytes take seconds to tokenize."""
        if options.truncate_prompt_tokens is not None:
            return
        for prompt in prompts:
            if prompt.num_characters <= max_model_len:
                continue
            texts = prompt.certain_texts
            # A token may reach over the border of two texts.
            num_tokens = sum(map(self.model_text.tokenizer.min_num_tokens, texts)) - len(texts)
            if num_tokens >= max_model_len:
                raise ContextLengthExceeded.of_at_least(
                    num_prompt_tokens=num_tokens,
                    max_output_tokens=_least_output(options),
                    max_model_len=max_model_len,
                    param=prompt_field,
                )

    def close(self) -> None:
        """Stop the threads; work that has not begun is dropped."""
        for threads in (self._threads, self._long_text_thread, self._long_body_thread):
            threads.shutdown(wait=False, cancel_futures=True)

    def _prepare(
        self,
        prompt: Prompt,
        options: GenerationOptions,
        cache_salt: bytes,
        max_model_len: int,
        marks: Marks,
    ) -> PreparedPrompt:
        all_token_ids = self.token_ids_of(prompt, marks)
        if not all_token_ids:
            raise InvalidRequest("The prompt has no tokens; send at least one.", param="prompt")
        token_ids = all_token_ids[-_prompt_limit(options, max_model_len) :]
        if len(token_ids) >= max_model_len:
            return PreparedPrompt(token_ids, [])
        is_cut = len(token_ids) < len(all_token_ids)
        echoed_text = self._shown_text(prompt, token_ids, options, is_cut=is_cut) if options.echoes_prompt else ""
        offsets = self._shown_offsets(prompt, token_ids, options, is_cut=is_cut)
        marks.lap(Segment.TOKENIZE)
        is_continued = not isinstance(prompt, ChatPrompt) or prompt.continue_final_message
        shared_prefix = self._shared_prefixes.find(token_ids)
        hashes = prefix_hashes(token_ids, self.hash_contract.block_size, cache_salt, shared_prefix)
        marks.lap(Segment.HASH)
        state = self._reasoning_state(prompt, token_ids) if options.reads_reasoning else ReasoningState.OVER
        return PreparedPrompt(token_ids, hashes, shared_prefix, echoed_text, is_continued, state, offsets)

    def _reasoning_state(self, prompt: Prompt, token_ids: Sequence[int]) -> ReasoningState:
        """Tell where an answer begins, by the end of its prompt."""
        reasoning = self.model_format.reasoning
        if reasoning is None or not isinstance(prompt, ChatPrompt):
            return ReasoningState.OVER
        ending = b"".join(map(self.model_text.tokenizer.token_bytes, token_ids[-_ENDING_TOKENS:]))
        # A message that is continued and empty is an answer from its beginning.
        continued = (prompt.messages[-1].content or None) if prompt.continue_final_message else None
        return reasoning.state_after(ending.decode(errors="replace"), continued)

    def _grammar(self, options: GenerationOptions, state: ReasoningState) -> Grammar | None:
        """Return what holds the answer, compiled as a worker will: what cannot be enforced is refused here."""
        constraint, reasoning = options.constraint, self.model_format.reasoning
        grammar = None if constraint is None else constraint.grammar
        is_held = grammar is not None or options.max_reasoning_tokens is not None
        if reasoning is not None and state is not ReasoningState.OVER and is_held:
            grammar = with_reasoning(
                grammar,
                reasoning,
                state,
                vocabulary=self.model_format.vocabulary,
                max_tokens=options.max_reasoning_tokens,
            )
        if grammar is None:
            return None
        param = None if constraint is None else constraint.param
        if self._grammars is None:
            raise UnsupportedField("A model without an end token cannot follow a form.", param=param)
        try:
            self._grammars.compile(grammar)
        except InvalidRequest as error:
            for tool in () if options.tools is None else options.tools.callable_tools:
                self._check_schema(tool)
            if constraint is not None and constraint.form is not None:
                self._check_alone(constraint.form.grammar, constraint.form.param)
            if constraint is not None and constraint.grammar is not grammar:
                self._check_alone(constraint.grammar, param)
            raise InvalidRequest(error.message, param=param) from error
        return grammar

    def _check_schema(self, tool: Tool) -> None:
        """Refuse a tool whose parameters cannot be enforced, by its own place."""
        schema = orjson.dumps(dict(tool.parameters)).decode()
        self._check_alone(Grammar(GrammarForm.JSON_SCHEMA, (schema,)), tool.parameters_path)

    def _check_alone(self, grammar: Grammar, param: str | None) -> None:
        assert self._grammars is not None, "something was compiled"
        try:
            self._grammars.compile(grammar)
        except InvalidRequest as error:
            raise InvalidRequest(error.message, param=param) from error

    def _shown_text(
        self, prompt: Prompt, token_ids: Sequence[int], options: GenerationOptions, *, is_cut: bool
    ) -> str:
        """Return the text of a prompt as it was given, or of its tokens where it was not or is cut."""
        match prompt:
            case ChatPrompt():
                # An answer is the assistant's, so only the assistant's message can be its beginning.
                last = prompt.messages[-1]
                return last.content if last.role == "assistant" else ""
            case TextPrompt() if not is_cut:
                return prompt.text
            case _:
                detokenizer = IncrementalDetokenizer(self.model_text.tokenizer, options.skips_special_tokens)
                return detokenizer.add(token_ids) + detokenizer.flush()

    def _shown_offsets(
        self, prompt: Prompt, token_ids: Sequence[int], options: GenerationOptions, *, is_cut: bool
    ) -> Sequence[int]:
        """Return how many characters of the shown text are certain before each token."""
        if options.num_echoed_logprobs is None:
            return ()
        tokenizer = self.model_text.tokenizer
        if not isinstance(prompt, TextPrompt) or is_cut:
            return offsets_in_text(token_ids, IncrementalDetokenizer(tokenizer, options.skips_special_tokens))
        # A text that is shown as it was given has the text of control tokens, and nothing of those put before it.
        prefix = tokenizer.definition.prompt_prefix_token_ids if prompt.add_special_tokens else ()
        shown = offsets_in_text(token_ids[len(prefix) :], IncrementalDetokenizer(tokenizer, False))
        return [0] * len(prefix) + shown

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return each word's tokens at the start of a text and after a space, which vocabularies tell apart."""
        tokenizer = self.model_text.tokenizer
        spellings = [spelling for word in words for spelling in (word, f" {word}")]
        spelled = (tuple(tokenizer.encode(spelling, allow_special=False)) for spelling in spellings)
        return tuple(dict.fromkeys(token_ids for token_ids in spelled if token_ids))


def offsets_in_text(token_ids: Sequence[int], detokenizer: IncrementalDetokenizer) -> list[int]:
    """Return, for each token, how many characters of the tokens' text are certain before it."""
    offsets, num_characters = [], 0
    for token_id in token_ids:
        offsets.append(num_characters)
        num_characters += len(detokenizer.add([token_id]))
    return offsets


def _prompt_limit(options: GenerationOptions, max_model_len: int) -> int:
    """Return how many tokens of a prompt are kept, from its end; at least one."""
    if options.truncate_prompt_tokens is None:
        return sys.maxsize
    if options.truncate_prompt_tokens == TRUNCATE_TO_FIT:
        return max(1, max_model_len - _least_output(options))
    return options.truncate_prompt_tokens


def _least_output(options: GenerationOptions) -> int:
    """Return the output that a request must have room for; an engine computes at least one token."""
    return max(options.max_output_tokens or 1, options.min_output_tokens)


def fit_output(
    options: GenerationOptions,
    *,
    num_prompt_tokens: int,
    max_model_len: int,
    default_max_tokens: int | None,
    prompt_field: str,
) -> int:
    """Return the output limit of a request in tokens; ``prompt_field`` names the prompt in errors.

    A limit that the client gave must fit beside the prompt. Without one it is the room that is left, at most
    ``default_max_tokens``.

    Raises:
        ContextLengthExceeded: prompt and output do not fit together.
    """
    room = max_model_len - num_prompt_tokens
    wanted = _least_output(options)
    if wanted > room:
        raise ContextLengthExceeded.of(
            num_prompt_tokens=num_prompt_tokens,
            max_output_tokens=wanted,
            max_model_len=max_model_len,
            param=prompt_field,
        )
    if options.max_output_tokens is not None:
        return wanted
    limit = room if default_max_tokens is None else min(room, default_max_tokens)
    if options.min_output_tokens > limit:
        raise InvalidRequest(
            f"'min_tokens' is greater than this server's default limit of {limit}; give 'max_tokens' too.",
            param="min_tokens",
        )
    return limit
