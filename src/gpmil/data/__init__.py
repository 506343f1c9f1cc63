"""The cohort: bags of instances, checked; positions, neighbours, frames, classes."""
