"""Several processes that take calls on one port, before one dispatcher.

All that costs processor time per call happens in a *front*: TLS, HTTP, keys, decoding, the copy
into the arena, the answer. What is decided once for all stays in the main process: admission,
batches, the ledger, quarantine, supervision, metrics. A front copies payloads into its own part of
the arena, and tells the main process where they lie: one message for each turn of its event loop,
and one back.
"""
