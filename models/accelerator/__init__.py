"""The accelerators that replicas run on: their kinds, and all that is said to them."""
