"""m given its signs: truncated, by EP, orthants, large slides."""
