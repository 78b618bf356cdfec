"""The hosts of a cluster, as the front end uses and shows them."""
