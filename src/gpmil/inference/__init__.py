"""From the process to q(u): the problem in pieces, solvers, leave-one-out, tuning."""
