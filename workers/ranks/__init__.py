"""Workers of several processes: a lead and the ranks that follow it."""
