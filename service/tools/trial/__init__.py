"""The kit for trying services: a service on trial, a load generator, and a report kit.

`inferpool chaos`, `inferpool tune`, `tests/load` and `tests/bench` share it. It is a client: it
starts a service as a user does, and knows it by HTTP and by its processes alone.
"""
