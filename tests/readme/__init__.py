"""Runs the examples of a README as its reader would; see `tests/test_readme.py`."""
