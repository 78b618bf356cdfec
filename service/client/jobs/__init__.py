"""Jobs of a service as the clients see them."""
