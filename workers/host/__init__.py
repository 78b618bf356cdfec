"""The side of the host process: it starts workers, gives them batches, and watches them."""
