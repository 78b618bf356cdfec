"""`inferpool chaos`: a service under load while its workers are killed, stopped and poisoned.

All of it is the client's side: it starts a service as a user does, knows it by HTTP and by its
processes alone, and nothing of the service imports it.
"""
