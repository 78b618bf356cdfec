"""Runs the examples of the docs as a reader would; see `tests/test_docs.py`."""
