"""Configures a service by its environment alone, as a container does."""

import json
import os
import subprocess
import sys
from pathlib import Path

from inferpool.service.settings.model import ModelSettings
from inferpool.service.settings.settings import Settings

ROOT = Path(__file__).parents[2]
PREFIX = "INFERPOOL_"
KEY = "k" * 20
HOST = {
    "host": "0.0.0.0",
    "port": 9001,
    "front_ends": 2,
    "default_model": "net",
    "log_format": "json",
    "log_level": "warning",
    "color": "never",
    "trace_endpoint": "http://collector:4318/v1/traces",
    "trace_sample_ratio": 0.5,
    "trace_parent_based": False,
    "trace_service_name": "pictures",
    "trace_resource": "deployment.environment=test",
    "trace_headers": "x-team=vision",
    "trace_certificate": "ca.pem",
    "predict_keys": KEY,
    "predict_keys_file": "keys",
    "metrics_keys": KEY,
    "metrics_keys_file": "keys",
    "admin_keys": KEY,
    "admin_keys_file": "keys",
    "tls_certificate": "cert.pem",
    "tls_key": "key.pem",
    "docs": False,
    "cors_origins": ["https://a.example", "https://b.example"],
    "root_path": "/models",
    "proxy_headers": False,
    "forwarded_allow_ips": ["10.0.0.5", "fd00::/8"],
    "page": False,
    "tei": True,
    "torchserve": "config.properties",
    "sagemaker": False,  # the default, since torchserve excludes it
    "sagemaker_models": "/models",
    "vertex_predict_route": "/v1/endpoints/1/deployedModels/2:predict",
    "vertex_health_route": "/v1/endpoints/1/deployedModels/2",
    "only_predictions": True,
    "max_connections": 99,
    "head_timeout_s": 1.5,
    "body_gap_s": 2.5,
    "write_timeout_s": 3.5,
    "max_body_bytes": 1 << 21,
    "max_json_bytes": 1 << 20,
    "max_unfinished_bytes": 1 << 26,
    "max_unread_bytes": 1 << 27,
    "stream_buffer_parts": 17,
    "stream_buffer_bytes": 1 << 17,
    "show_errors": True,
    "arena_bytes": 1 << 25,
    "max_queue_length": 12,
    "per_key_share": 0.5,
    "quarantine_s": 0.0,
    "max_instances_per_request": 13,
    "max_image_pixels": 14,
    "default_timeout_s": 15.0,
    "max_timeout_s": 16.0,
    "drain_timeout_s": 17.0,
    "shutdown_delay_s": 2.0,
    "keep_alive_s": 18.0,
    "cache_dir": "/var/cache/inferpool",
    "state_file": "/var/lib/inferpool/state.json",
    "job_store": "postgresql://inferpool@database/jobs",
    "job_retention_s": 3600.0,
    "job_share": 0.25,
    "max_jobs": 15,
    "max_job_bytes": 1 << 30,
    "webhook_hosts": ["hooks.example", "*.example"],
    "webhook_secret_file": "/run/secrets/webhook",
    "watch": "models",
    "watch_policy": "force",
    "speed_search": False,
    "cuda_visible_devices": "1",
    "cuda_device_order": "PCI_BUS_ID",
    "cuda_mps_pipe_directory": "/run/mps",
    "cluster_keys": KEY,
    "cluster_keys_file": "keys",
    "cluster_authority": "ca.pem",
    "cluster_certificate": "agents.pem",
    "cluster_key": "agents-key.pem",
    "cluster_insecure": True,
    "cluster_host": "0.0.0.0",
    "cluster_port": 9002,
    "grpc_port": 8001,
    "standby_of": "10.0.0.2:9002",
}
MODEL = {
    "source": "package.module:Net",
    "weights": "net.safetensors",
    "replicas": 3,
    "devices": "cpu",
    "placement": "pipeline",
    "devices_per_replica": 2,
    "gpu_memory_fraction": 0.5,
    "share": 2.0,
    "max_batch_size": 32,
    "max_batch_tokens": 4096,
    "batch_wait_ms": 1.5,
    "objective_p99_ms": 80.0,
    "envelope": False,
    "path": "/classify",
    "form": "instance",
    "accepts": "image",
    "batch_timeout_s": 9.0,
    "stream_gap_s": 8.0,
    "max_stream_s": 30.0,
    "max_stream_parts": 500,
    "load_timeout_s": 90.0,
    "credit": 3,
    "check": "warn",
    "max_restarts": 7,
    "threads_per_replica": 2,
    "speed": "exact",
    "decode": "exact",
    "prepare_threads": 2,
    "decoders": 3,
}
OPTIONS = {"width": 3, "rate": 0.5, "name": "cat or dog", "sizes": [1, 2], "is_on": True}


def text_of(value: object) -> str:
    """Return a value as people write it into a variable."""
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return ",".join(value)
    return value if isinstance(value, str) else json.dumps(value)


def variables() -> dict[str, str]:
    """Return a variable for every setting, each with a value that is not its default."""
    found = {PREFIX + name.upper(): text_of(value) for name, value in HOST.items()}
    stem = f"{PREFIX}MODELS__NET__"
    found |= {stem + name.upper(): text_of(value) for name, value in MODEL.items()}
    found |= {f"{stem}OPTIONS__{name.upper()}": text_of(each) for name, each in OPTIONS.items()}
    return found


def test_every_setting_can_be_set_by_the_environment_alone(tmp_path: Path):
    assert set(HOST) == set(Settings.model_fields) - {"models"}, "name a value for each"
    assert set(MODEL) == set(ModelSettings.model_fields) - {"options"}, "name a value for each"
    (tmp_path / "keys").write_text(f"{KEY}\n{'o' * 20}\n")
    (tmp_path / "config.properties").touch()
    done = subprocess.run(
        [sys.executable, "-m", "inferpool", "config", "--format", "json"],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **variables()},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    expected = {
        **HOST,
        **{f"models.net.{name}": value for name, value in MODEL.items()},
        **{f"models.net.options.{name}": value for name, value in OPTIONS.items()},
        **dict.fromkeys(("predict_keys", "metrics_keys", "admin_keys", "cluster_keys"), "2 hidden"),
    }
    for name, value in expected.items():
        if name != "trace_headers":  # a secret
            assert found[name]["value"] == value, name
        assert found[name]["origin"].startswith(f"environment {PREFIX}"), name
    assert set(found) == set(expected)
