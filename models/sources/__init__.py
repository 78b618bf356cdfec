"""Models made from what a source names: modules, archives, and the echo."""
