"""One module per protocol; `errors` is the one table from exceptions to statuses."""
