"""The page and the feed that show what the service does, second by second."""
