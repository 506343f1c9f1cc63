"""Neighbours coupled: Sigma_b = (I + lambda C_b)^-1 as an operator."""
