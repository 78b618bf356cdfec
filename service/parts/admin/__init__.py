"""Actions of an operator on a running service."""
