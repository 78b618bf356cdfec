"""What is looked at when the service starts: what of this machine or these settings would go wrong.

`facts` looks, once; each check takes what was found and yields findings. All of it costs
milliseconds and starts no process. `inferpool doctor` makes these checks too, and slower ones.
"""
