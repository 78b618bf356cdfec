"""The generator of calls over gRPC for `protocols`: one process, a channel for each connection.

It imports little, since it starts for each cell.
"""

import asyncio
import time
from multiprocessing.synchronize import Barrier

import psutil
from grpc import aio

from tests.bench.senders import BodyLoad, Sent
from tests.grpc_messages import SERVICE

_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),  # else all channels share a connection
    ("grpc.max_send_message_length", -1),
]


def send_messages(begin: Barrier, argument: tuple[BodyLoad, list[int]]) -> Sent:
    """Load a server from this process."""
    load, pids = argument
    begin.wait()
    return asyncio.run(_send(load, pids))


async def _send(load: BodyLoad, pids: list[int]) -> Sent:
    channels = [
        aio.insecure_channel(f"127.0.0.1:{load.port}", options=_OPTIONS)
        for _ in range(load.connections)
    ]

    async def run(secs: float) -> list[float]:
        until = time.perf_counter() + secs
        found = await asyncio.gather(*(_ask_until(each, load.request, until) for each in channels))
        return [latency_s for each in found for latency_s in each]

    await run(load.warm_s)
    processes = [psutil.Process(pid) for pid in pids]
    before = {each.pid: sum(each.cpu_times()[:2]) for each in processes}
    own_s = time.process_time()
    latencies_s = await run(load.secs)
    own_s = time.process_time() - own_s
    after = {each.pid: sum(each.cpu_times()[:2]) for each in processes}
    for each in channels:
        await each.close()
    used = {pid: after[pid] - before[pid] for pid in pids}
    return Sent(num=len(latencies_s), latencies_s=latencies_s, cpu_s=own_s, server_cpu_s=used)


async def _ask_until(channel: aio.Channel, message: bytes, until: float) -> list[float]:
    ask = channel.unary_unary(f"{SERVICE}/ModelInfer")
    latencies_s = []
    while (began := time.perf_counter()) < until:
        await ask(message)
        latencies_s.append(time.perf_counter() - began)
    return latencies_s
