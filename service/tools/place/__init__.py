"""The command `inferpool place`: has Ray place, start and restart agents on the hosts of a cluster.

It runs beside the front end, which never imports Ray: nothing of Ray's can end it.
"""
