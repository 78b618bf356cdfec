"""Commands that answer no requests: they use a service from outside."""
