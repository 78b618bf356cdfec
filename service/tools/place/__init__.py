"""The command `inferpool place`: has Ray place, start and restart agents on the hosts of a cluster.

It runs beside the front end. That never imports Ray, so Ray cannot end it.
"""
