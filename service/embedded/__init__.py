"""A service from Python code: for a script, a notebook, a test, or an application around it."""
