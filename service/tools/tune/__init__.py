"""`inferpool tune`: the settings that serve a model best on this machine, found by measuring."""
