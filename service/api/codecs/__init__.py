"""Bodies of requests and answers, by content type."""
