"""Computations in native code, one package for each kind of device.

Owns what is compiled and how it is called. It must not know steps of the engine or sampling.
"""
