"""A service's life as an orchestrator sees it, by the probes of docker/kubernetes."""

import asyncio
import os
import signal
import threading
from pathlib import Path

import httpx

from tests.e2e.kubelet import Kubelet
from tests.e2e.running import running, until
from tests.e2e.test_deployment import free_ports


async def flood(url: str, num: int) -> list[int]:
    async with httpx.AsyncClient(base_url=url, timeout=30, verify=False) as client:
        body = {"instances": [{"n": 1}]}
        posts = [client.post("/predict", json=body) for _ in range(num)]
        return [answer.status_code for answer in await asyncio.gather(*posts)]


def test_a_pod_is_never_killed_and_sent_requests_only_while_it_can_answer(tmp_path: Path):
    config, gate = tmp_path / "inferpool.toml", tmp_path / "gate"
    gate.touch()
    config.write_text(
        f"""
        max_queue_length = 8
        shutdown_delay_s = 2
        [models.m]
        source = "tests.fault_model:FaultModel"
        replicas = 1
        max_batch_size = 1
        batch_timeout_s = 1
        [models.m.options]
        forward_s = 0.05
        once = "{tmp_path / "once"}"
        gate = "{gate}"
        """
    )

    def ask(do: str = "ok") -> int:
        body = {"instances": [{"n": 21, "do": do}]}
        return httpx.post(f"{service.url}/predict", json=body, timeout=30).status_code

    (port,) = free_ports(1)
    with (
        Kubelet(f"http://127.0.0.1:{port}") as kubelet,
        running("--config", str(config), port=port, ready=False) as service,
    ):
        service.url = kubelet.url
        until(lambda: kubelet.is_started)
        assert not kubelet.is_ready  # it loads
        assert ask() == 503
        gate.unlink()
        until(lambda: kubelet.is_ready)
        assert ask() == 200

        gate.touch()
        os.kill(service.worker_pids()[0], signal.SIGKILL)  # all there are
        until(lambda: not kubelet.is_ready)
        gate.unlink()
        until(lambda: kubelet.is_ready)

        gate.touch()
        asking = threading.Thread(target=ask, args=("hang",))
        asking.start()
        until(lambda: not kubelet.is_ready)
        gate.unlink()
        asking.join()
        until(lambda: kubelet.is_ready)

        before = kubelet.num_refused
        statuses = asyncio.run(flood(service.url, 60))  # seven times what may wait
        assert set(statuses) == {200, 429}
        assert kubelet.num_refused == before  # others are as busy, and none would be left
        until(lambda: kubelet.is_ready)

        kubelet.is_terminating = True
        service.signal(signal.SIGTERM)
        until(lambda: not kubelet.is_ready)
        assert ask() == 200  # for those who have not heard of it yet
        assert service.wait() == 0
    assert kubelet.reasons_to_kill == []
