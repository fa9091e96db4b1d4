"""The worker tier: one process for one accelerator.

Owns the weights, the KV cache tensors, the forward pass and the sampler. It must not know who owns a request,
what its tokens mean as text, or HTTP.
"""
