"""A service on trial: what `inferpool chaos` and `inferpool tune` share.

All of it is the client's side: it starts a service as a user does, knows it by HTTP and by its
processes alone, and nothing of the service imports it.
"""
