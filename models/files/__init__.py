"""Files that models are read from. No torch, but for checkpoints."""
