"""Damaged files: mutators, targets and the campaign that runs them, `make fuzz`."""
