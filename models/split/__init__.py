"""Networks that are split over several processes, each with a device of its own."""
