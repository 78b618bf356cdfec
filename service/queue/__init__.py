"""The queue: what happens to a request between the front end and a worker, and back.

For each model there is a pool with one dispatcher. An instance goes through these steps:

1. `admission` admits it, or refuses it at once if it could not be answered in time.
2. `ledger` opens its account, and its payload is copied into the arena.
3. `batcher` queues it by priority and deadline.
4. `scheduler` decides when the next batch goes, and to which worker.
5. The worker answers, or dies. `quarantine` judges the inputs that workers died of.
6. `ledger` settles it exactly once, with a result or an error.

`replacer` swaps workers while they serve. Everything here runs in the event loop of the main
process.
"""
