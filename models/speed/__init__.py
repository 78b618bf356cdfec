"""Presets that make a network faster, and the comparison that proves its answers unchanged."""
