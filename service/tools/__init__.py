"""Commands that serve nobody's request: they know a service from outside."""
