"""Reads the files of models. No torch, but for checkpoints."""
