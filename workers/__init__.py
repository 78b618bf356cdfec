"""Batches: which process computes one, on which devices, and who is alive. Knows no HTTP."""
