"""Tensors: what a model is, where it comes from, how inputs become batches. Knows no process."""
