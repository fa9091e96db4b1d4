"""Log-probabilities of tokens as arrays, the form in which they travel from the worker to the gateway.

Owns that one structure. It must not know sampling, requests or the wire.
"""

from libs.logprobs.token_logprobs import TokenLogprobs

__all__ = ["TokenLogprobs"]
