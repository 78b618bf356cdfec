"""The routes of jobs: bodies in, states and results out."""
