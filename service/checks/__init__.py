"""Quick checks of this machine and the settings, made whenever the service starts.

`facts` reads the machine once; each check yields findings from these facts. All checks together
last milliseconds and start no process. `inferpool doctor` adds slower ones.
"""
