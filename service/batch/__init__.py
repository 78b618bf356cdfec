"""`inferpool batch`: predictions for whole folders and files, through a pool or a service."""
