"""Turns: the models that share a device use it in turn, each for its share of the time."""
