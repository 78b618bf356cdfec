"""The models that are served and their versions, which come and go while the service runs."""
