"""Runs the ranks of a training run under torchrun's elastic agent."""
