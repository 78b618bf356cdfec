"""TorchServe as a peer: python -m tests.bench.servers.torchserve_server PORT. It needs Java 17.

Packs its handler into an archive, and runs TorchServe on it until SIGTERM.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from tests.bench.servers.work import HOST, peer_setting

_ROOT = Path(__file__).resolve().parents[3]
_HANDLER = Path(__file__).with_name("torchserve_handler.py")

# The queue has room for all connections; its log would have a line for each request.
_CONFIG = """\
inference_address=http://{host}:{port}
management_address=http://{host}:{others[0]}
metrics_address=http://{host}:{others[1]}
grpc_inference_address={host}
grpc_inference_port={others[2]}
grpc_management_address={host}
grpc_management_port={others[3]}
disable_token_authorization=true
job_queue_size=1000
disable_system_metrics=true
vmargs=-Xmx512m
"""
_MODEL = """\
minWorkers: {setting.num_workers}
maxWorkers: {setting.num_workers}
batchSize: {setting.max_batch_size}
maxBatchDelay: {wait_ms}
responseTimeout: 60
"""
_LOG = """\
<Configuration status="error">
  <Appenders><Console name="console"/></Appenders>
  <Loggers><Root level="error"><AppenderRef ref="console"/></Root></Loggers>
</Configuration>
"""


def main(port: int) -> int:
    """Run it; returns its exit status."""
    setting, folder = peer_setting(), Path(tempfile.gettempdir())
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server((HOST, 0))) for _ in range(4)]
        others = [listener.getsockname()[1] for listener in listeners]
    wait_ms = max(1, round(setting.wait_ms))
    (folder / "config.properties").write_text(_CONFIG.format(host=HOST, port=port, others=others))
    (folder / "log4j2.xml").write_text(_LOG)
    (folder / "model.yaml").write_text(_MODEL.format(setting=setting, wait_ms=wait_ms))
    archiver = f"model_archiver.model_packaging --model-name work --version 1 --handler {_HANDLER}"
    archiver += f" --config-file {folder}/model.yaml --export-path {folder}"
    subprocess.run([sys.executable, "-m", *archiver.split()], check=True)
    serve = (
        f"ts.model_server --start --foreground --ncs --disable-token-auth --model-store {folder}"
    )
    serve += f" --models work=work.mar --ts-config {folder}/config.properties"
    serve += f" --log-config {folder}/log4j2.xml"
    environment = {
        **os.environ,
        "PYTHONPATH": str(_ROOT),  # for the handler
        "TEMP": str(folder),  # for the sockets to its workers
        "LOG_LOCATION": str(folder),
        "METRICS_LOCATION": str(folder),
    }
    argv = [sys.executable, "-m", *serve.split()]
    server = subprocess.Popen(argv, cwd=folder, env=environment, process_group=0)
    # The launcher only waits for the JVM, which ends the workers: all of them must hear of it.
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(server.pid, signal.SIGTERM))
    return server.wait()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
