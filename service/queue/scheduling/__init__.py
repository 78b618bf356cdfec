"""The choice of the instances that a worker gets next."""
