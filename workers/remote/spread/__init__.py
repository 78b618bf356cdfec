"""One replica over several hosts: the front end's side, and where the agents let its ranks meet."""
