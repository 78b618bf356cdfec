"""Presets that make a network faster, and the proof that its answers stay what they were."""
