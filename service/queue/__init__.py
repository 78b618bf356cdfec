"""From requests to batches and back: admission, schedule, ledger, and the pool of workers."""
