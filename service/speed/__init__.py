"""The search for faster speed presets, beside the workers that serve."""
