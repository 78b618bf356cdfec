"""Connections: how they are accepted, bounded, timed and read."""
