"""Tensors: what a model is, where it comes from, and how inputs become batches. Knows no process and no HTTP."""
