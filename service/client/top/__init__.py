"""`inferpool top`: a live view of a service in a terminal.

It reads only the service's feed `/events`, so it works from any host.
"""
