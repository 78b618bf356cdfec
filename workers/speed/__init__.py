"""Choice of a speed preset: measured by a worker at its start, or by a search beside it."""
