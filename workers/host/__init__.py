"""The side of the host process: it starts workers, sends them batches, and watches them."""
