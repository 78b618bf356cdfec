"""Text encoders: tokens, networks, and the folders that hold them."""
