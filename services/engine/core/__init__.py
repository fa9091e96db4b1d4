"""The engine's core: requests, blocks and the decisions of each step. Pure: no I/O, clock or randomness.

``scheduler.py`` holds the main line; the other modules are the objects it works with.
"""
