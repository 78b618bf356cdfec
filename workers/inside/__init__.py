"""The side of the worker process: it loads the model and computes batches."""
