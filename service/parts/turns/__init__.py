"""Turns: how the models that share a device take turns at it, each for its share of the time."""
