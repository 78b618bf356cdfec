"""How OpenMP's threads wait for each other. Worker processes."""

import os

_NUM_SPINS = 3_000
"""Some 0.05 ms. Of 1,000, 3,000 and 10,000, this lost least both where each thread has a core
(nothing to the default) and where two share one."""


def spin_briefly() -> None:
    """Have the threads of an operation, where they wait for each other, sleep soon.

    To be called before torch is imported. GNU's OpenMP, which torch brings along on Linux, spins
    for 300,000 rounds by default, which is as long as the kernel lets a thread run: where it has
    put two threads on one core, as it does beside others' work, and leaves them for seconds, each
    wait costs such a while. 300 additions by two threads on one core took 2.4 s, and take 0.06 s.

    GOMP_SPINCOUNT and OMP_WAIT_POLICY of the environment stay in force
    (https://gcc.gnu.org/onlinedocs/libgomp/GOMP_005fSPINCOUNT.html).
    """
    if not os.environ.get("OMP_WAIT_POLICY"):
        os.environ.setdefault("GOMP_SPINCOUNT", str(_NUM_SPINS))
