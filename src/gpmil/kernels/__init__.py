"""Loops that Numba compiles; compiled.py says when they are used and what they replace."""
