"""Connections: listened for, accepted, bounded, timed, and read."""
