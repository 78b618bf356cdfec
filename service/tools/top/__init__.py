"""`inferpool top`: what a service does, live in a terminal.

A client: it knows the service by its feed `/events` alone, from any host.
"""
