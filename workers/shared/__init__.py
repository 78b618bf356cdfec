"""Code that both sides of a worker's process know."""
