"""The jobs of a service, for the clients."""
