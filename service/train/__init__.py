"""The command `inferpool train`: its settings, its plan for these images, and its report."""
