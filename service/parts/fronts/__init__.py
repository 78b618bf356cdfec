"""Several processes that serve calls on one port, in front of one dispatcher.

A *front* does the work that costs processor time for each call: TLS, HTTP, keys, decoding, the copy
into the arena, the answer. The main process does the rest: admission, batches, the ledger,
quarantine, supervision, metrics. A front copies payloads into its own part of the arena and sends
their places to the main process: one message for each turn of its event loop, and one back.
"""
