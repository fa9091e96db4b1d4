"""``octavo up``: every tier as a process of its own on this machine, supervised.

Owns which processes there are, their addresses, their order, restarts, logs and end. It must not know what a tier
does: it meets tiers only through their command line, their health and their exit codes.
"""
