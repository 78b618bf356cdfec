"""The command `inferpool train`: settings, what they become for these images, and the report."""
