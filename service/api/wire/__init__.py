"""ConnectionLimits: listened for, accepted, bounded, timed, and read."""
