"""Workers on other hosts: the front end's side, and the agent that runs them there."""
