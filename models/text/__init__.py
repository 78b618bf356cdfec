"""Encoders of texts: tokens, networks, and folders that hold them."""
