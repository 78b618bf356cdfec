"""Actions that an operator takes on a running service."""
