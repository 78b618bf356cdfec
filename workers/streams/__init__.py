"""Models that answer in parts: a worker's loop, its check at the start. Worker processes only."""
