"""Tools for trying services: a service on trial, a load generator, and reports.

`inferpool chaos`, `inferpool tune`, `tests/load` and `tests/bench` share them. They start a service
as a user does, and use it only over HTTP and as processes.
"""
