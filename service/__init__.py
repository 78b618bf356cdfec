"""Requests: who gets in, how long they wait, which batch they join, and what the caller is told."""
