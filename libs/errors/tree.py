"""The classes of the error tree. Their codes live in ``libs.errors.table``."""

from __future__ import annotations


class OctavoError(Exception):
    """An error with a clear sentence for the one who can do something about it.

    ``param`` names the field of the request at fault, ``retry_after_seconds`` when to come back.
    """

    def __init__(self, message: str, *, param: str | None = None, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_seconds = retry_after_seconds


class ClientError(OctavoError):
    """The request is wrong; sending it again does not help."""


class InvalidRequest(ClientError):
    """A field has a value that cannot be served; ``param`` names it."""


class UnsupportedField(ClientError):
    """A field that is known but not served yet; ``param`` names it."""


class ContextLengthExceeded(ClientError):
    """Prompt and output do not fit into the model's context."""

    @classmethod
    def of(
        cls, *, num_prompt_tokens: int, max_output_tokens: int, max_model_len: int, param: str = "messages"
    ) -> ContextLengthExceeded:
        """Build the error from its numbers, all in tokens; ``param`` is the field that holds the prompt."""
        return cls._of(str(num_prompt_tokens), max_output_tokens, max_model_len, param)

    @classmethod
    def of_at_least(
        cls, *, num_prompt_tokens: int, max_output_tokens: int, max_model_len: int, param: str
    ) -> ContextLengthExceeded:
        """Build the error of a prompt that has so many tokens or more, and was not worth tokenizing."""
        return cls._of(f"at least {num_prompt_tokens}", max_output_tokens, max_model_len, param)

    @classmethod
    def _of(
        cls, num_prompt_tokens: str, max_output_tokens: int, max_model_len: int, param: str
    ) -> ContextLengthExceeded:
        return cls(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt has "
            f"{num_prompt_tokens} tokens and needs room for at least {max_output_tokens} more. "
            f"Please shorten the {param} or lower the output limit.",
            param=param,
        )


class RequestNeverFits(ClientError):
    """The request needs more KV blocks than the engine has in total."""


class TemplateRefused(ClientError):
    """The model's chat template refused the messages, for the reason that it gave."""


class DuplicateRequest(ClientError):
    """An id that is in use was sent again."""


class ModelNotFound(ClientError):
    """No such model is served here."""


class RouteNotFound(ClientError):
    """No such route."""


class MethodNotAllowed(ClientError):
    """The route exists, the method does not."""


class PayloadTooLarge(ClientError):
    """The body is larger than the limit."""


class UnsupportedMediaType(ClientError):
    """The body is not JSON by its content type."""


class PermissionDenied(ClientError):
    """The server does not answer requests that come this way, whoever sends them."""


class Unauthenticated(ClientError):
    """No API key, or an unknown one."""


class UnavailableError(OctavoError):
    """Not now; the same request may succeed later."""


class Overloaded(UnavailableError):
    """A queue is full."""


class RateLimited(UnavailableError):
    """The tenant uses as much at once, or in a minute, as it may."""


class BudgetExhausted(UnavailableError):
    """What is left of the tenant's budget is too little for the request."""


class NoEngineAvailable(UnavailableError):
    """No engine can take the request now."""


class Draining(UnavailableError):
    """The process is going away and takes no new work."""


class EngineLost(UnavailableError):
    """The engine that held the request died or was replaced."""


class WorkerLost(UnavailableError):
    """A worker of the engine died or was replaced."""


class StoreUnavailable(UnavailableError):
    """A store behind this process cannot be reached."""


class EndedFromOutside(OctavoError):
    """The caller's time or interest ended."""


class DeadlineExceeded(EndedFromOutside):
    """The deadline passed."""


class Cancelled(EndedFromOutside):
    """The caller left."""


class FaultError(OctavoError):
    """A fault of ours."""


class InvalidLogits(FaultError):
    """The model gave logits that are not numbers."""


class HashContractMismatch(FaultError):
    """Two parties disagree on block size, hash algorithm or tokenizer."""


class ModelLoadFailed(FaultError):
    """The model could not be loaded."""


class InternalError(FaultError):
    """A fault that has no better name."""
