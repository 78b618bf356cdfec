"""Trains image classifiers: images, networks, steps of an optimizer. It knows no processes."""
