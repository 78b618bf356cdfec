"""Loads a service with httpx: requests leave at random moments, whatever becomes of the others.

Usage: python load_test.py URL BODY CONTENT_TYPE REQUESTS_PER_SECOND SECONDS
"""

import asyncio
import random
import sys
import time
from collections import Counter
from pathlib import Path

import httpx


async def main(url: str, body: bytes, content_type: str, rate: float, seconds: float) -> None:
    """Send at a rate, then print how many succeeded and how long they took."""
    latencies_ms: list[float] = []
    statuses: Counter[str] = Counter()
    chance = random.Random(1)

    async def ask(client: httpx.AsyncClient) -> None:
        due = time.perf_counter()
        try:
            answer = await client.post(url, content=body, headers={"Content-Type": content_type})
        except httpx.HTTPError as error:
            statuses[type(error).__name__] += 1
            return
        statuses[str(answer.status_code)] += 1
        if answer.is_success:
            latencies_ms.append((time.perf_counter() - due) * 1000)

    limits = httpx.Limits(max_connections=64, max_keepalive_connections=64)
    async with httpx.AsyncClient(limits=limits, timeout=30) as client, asyncio.TaskGroup() as group:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            group.create_task(ask(client))
            await asyncio.sleep(chance.expovariate(rate))

    print(", ".join(f"{status}: {count}" for status, count in sorted(statuses.items())))
    ordered = sorted(latencies_ms)
    for percent in (50, 90, 99) if ordered else ():
        print(f"p{percent}: {ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]:.1f} ms")


if __name__ == "__main__":
    _, to, file, kind, per_second, duration = sys.argv
    asyncio.run(main(to, Path(file).read_bytes(), kind, float(per_second), float(duration)))
