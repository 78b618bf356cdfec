"""Sets how OpenMP's threads wait for each other. Worker processes."""

import os

_NUM_SPINS = 3_000
"""Rounds to spin, some 0.05 ms. Of 1,000, 3,000 and 10,000 this lost least, both where each thread
has a core of its own (nothing against the default) and where two share one."""


def spin_briefly() -> None:
    """Limit how long threads that wait for each other spin before they sleep.

    Call it before torch is imported. GNU's OpenMP, which torch uses on Linux, spins 300,000 rounds
    by default, about as long as the kernel's time slice. If the kernel puts two threads on one core
    for seconds, as it does beside other work, each wait costs a whole slice: 300 additions by two
    threads on one core took 2.4 s; with this they take 0.06 s.

    GOMP_SPINCOUNT and OMP_WAIT_POLICY in the environment take precedence
    (https://gcc.gnu.org/onlinedocs/libgomp/GOMP_005fSPINCOUNT.html).
    """
    if not os.environ.get("OMP_WAIT_POLICY"):
        os.environ.setdefault("GOMP_SPINCOUNT", str(_NUM_SPINS))
