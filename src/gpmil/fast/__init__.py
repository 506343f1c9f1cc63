"""The same sums, compiled or side by side; every one the twin of a plain path."""
