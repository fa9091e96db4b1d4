"""Building blocks of models on torch tensors.

Owns linear maps, normalisation, rotary positions and attention over the paged cache. It must not know any
model's shape or how a step came about.
"""
