"""`inferpool chaos`: a service under load while its workers are killed, stopped and poisoned."""
