"""Naive twins of every fast path, by what they compute; slow, and as the paper has it."""
