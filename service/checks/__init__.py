"""Quick checks of this machine and the settings, made whenever the service starts.

`facts` looks at the machine once; each check takes the facts and yields findings. All checks
together take milliseconds and start no process. `inferpool doctor` adds slower ones.
"""
