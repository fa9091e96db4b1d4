"""Model architectures: the forward pass over the paged cache.

Owns how each architecture computes. It must not know steps, requests or sampling.
"""
