"""Metrics, logs, and what a person sees on the terminal."""
