"""The forward pass on a CPU in one native call.

Owns the C++ sources, their build, and the calls into them. It must not know sampling or the wire.
"""
