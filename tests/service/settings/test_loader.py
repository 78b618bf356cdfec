import base64
import io
import os
import threading
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from inferpool.service.settings.draft import read_keys
from inferpool.service.settings.loader import (
    LoadedSettings,
    load,
    load_arguments,
    secret_variables,
    write_json,
    write_table,
    write_toml,
)
from inferpool.service.settings.names import SettingsError
from inferpool.service.settings.tls import TlsError, server_context


@pytest.fixture
def loading(tmp_path):
    """Return a function that loads settings, of which a text stands in `inferpool.toml`."""

    def load_text(toml: str = "", flags=None, environ=None) -> LoadedSettings:
        if toml:
            (tmp_path / "inferpool.toml").write_text(toml)
        return load(flags or {}, environ or {}, tmp_path)

    return load_text


@pytest.fixture
def problems(loading):
    """Return a function that loads settings, and returns the problems found."""

    def find(toml: str = "", flags=None, environ=None) -> list[str]:
        with pytest.raises(SettingsError) as caught:
            loading(toml, flags, environ)
        return list(caught.value.problems)

    return find


TWO_MODELS = '[models.a]\nsource = "echo"\n[models.b]\nsource = "echo"\ncredit = 3\n'


def origin_of(loaded: LoadedSettings, key: str) -> str:
    return loaded.origins.get(key, "default")


def test_without_any_settings_the_packaged_model_is_served(tmp_path):
    settings = load({}, {}, tmp_path).settings
    assert list(settings.models) == ["efficientnet_lite0"]
    assert settings.models["efficientnet_lite0"].source == "efficientnet_lite0"
    assert settings.default_model == "efficientnet_lite0"
    assert (settings.host, settings.port) == ("127.0.0.1", 8000)


def test_flags_override_the_environment_which_overrides_the_file(loading):
    toml = 'host = "::"\nport = 1\nlog_level = "error"\n[models.a]\nsource = "echo"\nreplicas = 2\n'
    environ = {"INFERPOOL_PORT": "2", "INFERPOOL_LOG_LEVEL": "debug"}
    loaded = loading(toml, {"port": "3"}, environ)
    settings = loaded.settings
    assert (settings.host, settings.log_level, settings.port) == ("::", "debug", 3)
    assert settings.models["a"].replicas == 2
    for key, origin in {
        "host": "file inferpool.toml",
        "log_level": "environment INFERPOOL_LOG_LEVEL",
        "port": "flag --port",
        "models.a.replicas": "file inferpool.toml",
        "models.a.credit": "default",
    }.items():
        assert origin_of(loaded, key) == origin


def test_a_file_named_by_a_flag_overrides_the_variable_and_the_folder(tmp_path):
    for name, port in (("inferpool.toml", 1), ("b.toml", 2), ("c.toml", 3)):
        (tmp_path / name).write_text(f"port = {port}\n")
    environ = {"INFERPOOL_CONFIG": "b.toml"}
    assert load({}, {}, tmp_path).settings.port == 1
    assert load({}, environ, tmp_path).settings.port == 2
    assert load({"config": str(tmp_path / "c.toml")}, environ, tmp_path).settings.port == 3


def test_a_variable_finds_the_model_whose_name_no_variable_can_spell(loading):
    prefix = "INFERPOOL_MODELS__MY_NET_V2__"
    settings = loading(
        '[models."my-net.v2"]\nsource = "a:B"\noptions = {numClasses = 3}\n',
        environ={prefix + "CREDIT": "4", prefix + "OPTIONS__NUMCLASSES": "5"},
    ).settings
    assert list(settings.models) == ["my-net.v2"]
    assert settings.models["my-net.v2"].credit == 4
    assert settings.models["my-net.v2"].options == {"numClasses": 5}


@pytest.mark.parametrize(
    "environ",
    [
        {
            "INFERPOOL_SERVICE_HOST": "10.0.0.1",
            "INFERPOOL_SERVICE_PORT": "80",
            "INFERPOOL_SERVICE_PORT_HTTP": "80",
            "INFERPOOL_PORT": "tcp://10.0.0.1:80",
            "INFERPOOL_PORT_80_TCP": "tcp://10.0.0.1:80",
            "INFERPOOL_PORT_80_TCP_PROTO": "tcp",
            "INFERPOOL_PORT_80_TCP_PORT": "80",
            "INFERPOOL_PORT_80_TCP_ADDR": "10.0.0.1",
            "INFERPOOL_GPU_SERVICE_HOST": "10.0.0.2",
            "INFERPOOL_GPU_PORT": "tcp://10.0.0.2:80",
        },
        {"INFERPOOL_PORT": "", "INFERPOOL_CONFIG": ""},
    ],
    ids=["Kubernetes, for a service called inferpool", "empty"],
)
def test_variables_that_set_nothing_are_ignored(loading, environ):
    assert loading(environ=environ).settings.port == 8000


def test_common_variables_such_as_no_color_are_honoured(tmp_path):
    loaded = load({}, {"NO_COLOR": "1", "CUDA_VISIBLE_DEVICES": ""}, tmp_path)
    assert loaded.settings.color == "never"
    assert loaded.settings.cuda_visible_devices == ""
    ordered = load({}, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, tmp_path)
    assert ordered.settings.cuda_device_order == "PCI_BUS_ID"
    assert ordered.origins["cuda_device_order"] == "environment CUDA_DEVICE_ORDER"
    assert origin_of(loaded, "color") == "environment NO_COLOR"
    assert load({}, {}, tmp_path).settings.cuda_visible_devices is None
    moved = load({}, {"XDG_CACHE_HOME": "/var/cache"}, tmp_path).settings
    assert moved.cache_folder() == "/var/cache/inferpool"


def test_a_source_as_argument_becomes_the_only_model(loading):
    flags = {"model": "torchvision:resnet18", "replicas": "2"}
    loaded = loading('default_model = "a"\n' + TWO_MODELS, flags)
    assert list(loaded.settings.models) == ["resnet18"]
    assert loaded.settings.models["resnet18"].source == "torchvision:resnet18"
    assert loaded.settings.models["resnet18"].replicas == 2
    assert loaded.settings.default_model == "resnet18"
    assert origin_of(loaded, "models.resnet18.source") == "argument MODEL"
    assert not [key for key in loaded.origins if key.startswith("models.a")]


def test_a_name_as_argument_serves_that_model_of_the_file_alone(loading):
    settings = loading(TWO_MODELS, {"model": "b"}).settings
    assert list(settings.models) == ["b"]
    assert settings.models["b"].credit == 3
    assert settings.default_model == "b"


def test_flags_for_models_apply_to_each(loading):
    flags = {"replicas": "auto", "devices": "cuda:0,1", "max_batch_size": "4"}
    models = loading(TWO_MODELS, flags).settings.models.values()
    assert [(model.devices, model.max_batch_size) for model in models] == [("cuda:0,1", 4)] * 2


def test_a_model_named_like_a_built_in_source_needs_no_source(loading):
    loaded = loading(environ={"INFERPOOL_MODELS__EFFICIENTNET_LITE0__REPLICAS": "2"})
    assert loaded.settings.models["efficientnet_lite0"].replicas == 2


@pytest.mark.parametrize(
    ("toml", "problem"),
    [
        ("prot = 1", "prot: there is no such setting; did you mean port?"),
        (
            '[models.a]\nsource = "echo"\nreplcas = 1',
            "models.a.replcas: there is no such setting; did you mean replicas?",
        ),
        (
            '[models.a]\nsource = "echo"\nspread = false',
            "models.a.spread: it is gone: leave it out; the devices of a replica are those of one "
            "host",
        ),
        ("replicas = 2", "replicas: this setting belongs to a model: [models.NAME]"),
        (
            "[models.echo]\nport = 1",
            "models.echo.port: this setting belongs to the top of the file",
        ),
        ('port = "80"', "port: '80' is not a whole number from 0 to 65535"),
        ("port = true", "port: True is not a whole number from 0 to 65535"),
        ("port = 65536", "port: 65536 is not a whole number from 0 to 65535"),
        ("[port]", "port: {} is not a whole number from 0 to 65535"),
        (
            "default_timeout_s = nan",
            "default_timeout_s: nan is not a number above 0 and up to 86400",
        ),
        ('log_format = "xml"', 'log_format: \'xml\' is not "auto" or "human" or "json"'),
        (
            "[models.echo]\nreplicas = 0",
            'models.echo.replicas: 0 is not "auto" or a whole number from 1 to 1024',
        ),
        (
            '[models.echo]\nprepare_threads = "many"',
            "models.echo.prepare_threads: 'many' is not \"auto\" or a whole number from 1 to 256",
        ),
        (
            "[models.echo]\noptions = 3",
            "models.echo.options: 3 is not a table of up to 256 entries",
        ),
        (
            '[models.echo]\ndevices = "gpu"',
            'models.echo.devices: \'gpu\' is not "auto", "cpu", "cuda", GPUs such as '
            '"cuda:0,1", UUIDs as `nvidia-smi -L` prints them ("GPU-...", "MIG-..."), or several '
            "of these with commas between",
        ),
        (
            '[models.minilm_l6]\nplacement = "pipeline"\ndevices_per_replica = 1',
            "models.minilm_l6.devices_per_replica: 1 is too few to split a model over: set 2 or "
            'more, or placement = "replicate" instead of "pipeline"',
        ),
        (
            '[models.echo]\nplacement = "tensor"',
            "models.echo.placement: 'tensor' is not for echo, which has no network: set "
            '"replicate", or serve a network from its class or from torchvision',
        ),
        (
            "[models.echo]\ndevices_per_replica = 2",
            'models.echo.devices_per_replica: 2 needs a split model: set placement = "pipeline" or '
            '"tensor" too; for several whole copies, set replicas and devices instead',
        ),
        (
            '[models.minilm_l6]\nplacement = "tensor"\nspeed = "bf16"',
            "models.minilm_l6.speed: 'bf16' changes a whole network, but with placement = "
            '"tensor" no process has one: leave it at auto, which then means exact',
        ),
        ('models = ["echo"]', "models: write a table for each, such as [models.resnet]"),
        (
            '[models]\nresnet = "torchvision:resnet18"',
            "models.resnet: 'torchvision:resnet18' is not a table; write [models.NAME], with its "
            "settings under it",
        ),
        (
            '[models.ResNet]\nsource = "echo"',
            "models.ResNet: 'ResNet' is not a model's name: up to 64 of a-z, 0-9, '.', '_' and "
            "'-', the first a letter or digit",
        ),
        (
            'default_model = "ech"\n[models.echo]',
            "default_model: 'ech' is not one of the models; did you mean echo? there are echo",
        ),
        (
            "max_body_bytes = 1048576\narena_bytes = 1048576",
            "arena_bytes: 1048576 is less than twice max_body_bytes (INFERPOOL_MAX_BODY_BYTES), "
            "which makes 2097152",
        ),
    ],
)
def test_a_mistake_in_the_file_is_named_with_its_place(problems, toml, problem):
    assert problems(toml) == [f"inferpool.toml: {problem}"]


@pytest.mark.parametrize(
    ("variable", "text", "problem"),
    [
        ("INFERPOOL_CONFIG", "y.toml", "there is no file y.toml"),
        ("INFERPOOL_PREDICT_KEYS", "", "is empty; to do without these keys, unset it"),
        ("INFERPOOL_ADMIN_KEYS", "", "is empty; to do without these keys, unset it"),
        ("INFERPOOL_METRICS_KEYS_FILE", "", "is empty; to do without these keys, unset it"),
        ("INFERPOOL_PROT", "1", "there is no such setting; did you mean INFERPOOL_PORT?"),
        ("INFERPOOL_PORT", "http", "'http' is not a whole number from 0 to 65535"),
        (
            "INFERPOOL_MODELS__ECHO__REPLCAS",
            "1",
            "there is no such setting; did you mean INFERPOOL_MODELS__ECHO__REPLICAS?",
        ),
        (
            "INFERPOOL_MODELS__ECHO__OPTIONS",
            "{a = 1}",
            "give each option by its own variable, INFERPOOL_MODELS__ECHO__OPTIONS__KEY",
        ),
        (
            "INFERPOOL_MODELS__ECHO__SPREAD",
            "true",
            "it is gone: leave it out; the devices of a replica are those of one host",
        ),
        (
            "INFERPOOL_MODELS_ECHO_REPLICAS",
            "1",
            "there is no such setting; those of a model are written like "
            "INFERPOOL_MODELS__RESNET__REPLICAS",
        ),
        (
            "INFERPOOL_DECODE",
            "fast",
            "this setting belongs to a model: INFERPOOL_MODELS__NAME__DECODE",
        ),
        (
            "INFERPOOL_MODELS__ECHO__SPEED_SEARCH",
            "false",
            "this setting belongs to no model: INFERPOOL_SPEED_SEARCH",
        ),
    ],
)
def test_a_mistake_in_the_environment_is_named_with_its_variable(problems, variable, text, problem):
    assert problems(environ={variable: text}) == [f"{variable}: {problem}"]


WEIGHTS_HINT = "give the network as the source, and this file as --weights"


@pytest.mark.parametrize(
    ("toml", "flags", "environ", "begin", "end"),
    [
        ("", {"config": "x.toml"}, {}, "--config: there is no file x.toml", ""),
        (
            TWO_MODELS,
            {"weights": "none"},
            {},
            "--weights: say whose weights: inferpool serve MODEL --weights ...",
            "",
        ),
        (
            "default_timeout_s = 400",
            {},
            {},
            "max_timeout_s (INFERPOOL_MAX_TIMEOUT_S): 300.0 is less than default_timeout_s "
            "(INFERPOOL_DEFAULT_TIMEOUT_S), which is 400",
            "",
        ),
        (
            '[models.resnet]\nsource = "a:B"',
            {},
            {"INFERPOOL_MODELS__RESENT__CREDIT": "1"},
            "INFERPOOL_MODELS__RESENT__CREDIT: the model 'resent' has no source; "
            "did you mean resnet?",
            "",
        ),
        ('[models.a]\nsource = "net.safetensors"', {}, {}, "", WEIGHTS_HINT),
        ('trace_endpoint = "localhost:4318"', {}, {}, "", "is not a URL such as"),
        ('trace_resource = "a"', {}, {}, "", "name=value"),
    ],
)
def test_a_mistake_says_where_it_is_and_what_to_do(problems, toml, flags, environ, begin, end):
    (found,) = problems(toml, flags, environ)
    assert found.startswith(begin)
    assert end in found


@pytest.mark.parametrize(
    ("model", "hint"),
    [
        ("efficientnet_lite", "did you mean efficientnet_lite0?"),
        ("net.pth", WEIGHTS_HINT),
        ("resnet50", "nor a source; did you mean torchvision:resnet50?"),
        ("ViT_B_16", "nor a source; did you mean torchvision:vit_b_16?"),
        ("efficientnet_b0", "did you mean torchvision:efficientnet_b0 or efficientnet_lite0?"),
        ("many.toml", "nor a source; this is a file of settings: use --config many.toml"),
    ],
)
def test_an_argument_that_is_no_source_gets_what_was_meant(problems, model, hint):
    (found,) = problems(flags={"model": model})
    assert found.startswith(f"MODEL: '{model}'")
    assert hint in found


def test_every_mistake_is_named_at_once(problems):
    found = problems('prot = 1\nhost = ""', {"port": "x"}, {"INFERPOOL_HOTS": "1"})
    places = [line.split(": ")[0] for line in found]
    assert places == ["inferpool.toml", "INFERPOOL_HOTS", "inferpool.toml", "--port"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"port = 1\nhost =\n", "inferpool.toml, line 2, column 7: Invalid value"),
        (b"port = [1", "inferpool.toml, end of document: Unclosed array"),
        (b"host = '\xff'", "inferpool.toml: byte 8 is not UTF-8, as TOML must be"),
    ],
)
def test_a_broken_file_is_named_with_its_line(tmp_path, content, problem):
    (tmp_path / "inferpool.toml").write_bytes(content)
    with pytest.raises(SettingsError) as caught:
        load({}, {}, tmp_path)
    assert caught.value.problems == (problem,)


def test_printed_toml_can_be_loaded_again(tmp_path):
    (tmp_path / "inferpool.toml").write_text(
        'host = "a\\"b\\u007f"\n[models."v1.2"]\nsource = "m:C"\nweights = "none"\n'
        '[models."v1.2".options]\na = [1, 2.5, true]\nb = {c = "d e"}\nwhen = 2020-01-01\n'
        '"odd key" = 1e-9\n'
    )
    first = load({"port": "9"}, {"INFERPOOL_ARENA_BYTES": "1000000000"}, tmp_path)
    saved = tmp_path / "saved.toml"
    with saved.open("w") as stream:
        write_toml(first.rows(), stream)
    assert "port = 9  # flag --port" in saved.read_text()
    assert load({"config": str(saved)}, {}, tmp_path).settings == first.settings
    assert tomllib.loads(saved.read_text())["models"]["v1.2"]["options"]["a"] == [1, 2.5, True]


KEY, OTHER_KEY = "k" * 20, "o" * 20


def test_keys_come_from_the_environment_and_from_files(tmp_path):
    (tmp_path / "keys").write_text(f"# rotated in May\n{OTHER_KEY}\n")
    (tmp_path / "marked").write_text(KEY, encoding="utf-8-sig")  # it begins with a byte order mark
    environ = {"INFERPOOL_PREDICT_KEYS": KEY, "INFERPOOL_PREDICT_KEYS_FILE": "keys"}
    loaded = load({"metrics_keys_file": "marked"}, environ, tmp_path)
    assert loaded.settings.predict_keys == read_keys(f"{KEY},{OTHER_KEY}")
    assert loaded.settings.metrics_keys == read_keys(KEY)
    assert not loaded.settings.admin_keys
    origin = "environment INFERPOOL_PREDICT_KEYS, file keys"
    assert origin_of(loaded, "predict_keys") == origin


def test_an_unreadable_file_of_keys_is_not_called_missing(problems, tmp_path):
    (tmp_path / "keys").write_text(KEY, encoding="utf-16")
    for path, reason in {"keys": "it is not UTF-8", ".": "it is a folder, not a file"}.items():
        (problem,) = problems(environ={"INFERPOOL_PREDICT_KEYS_FILE": path})
        assert problem.endswith(f"the file of keys cannot be read: {reason}")


def test_no_form_of_the_settings_shows_a_secret(loading):
    environ = {"INFERPOOL_ADMIN_KEYS": KEY, "INFERPOOL_TRACE_HEADERS": "x-key=secret-value"}
    loaded = loading(environ=environ)
    for write in (write_table, write_toml, write_json):
        stream = io.StringIO()
        write(loaded.rows(), stream)
        shown = stream.getvalue()
        assert KEY not in shown + repr(loaded)
        assert "secret-value" not in shown + repr(loaded)
        assert shown.count("1 hidden") == (0 if write is write_toml else 2)


@pytest.mark.parametrize(
    ("toml", "environ", "message"),
    [
        ('predict_keys = "SECRET"', {}, "keys do not belong in this file"),
        ('predict_key = "SECRET"', {}, "there is no such setting; did you mean"),
        ('predict_keys_file = "SECRET"', {}, "there is no file of keys to read: No such file"),
        ("", {"INFERPOOL_ADMIN_KEYS_FILE": "SECRET"}, "INFERPOOL_ADMIN_KEYS_FILE: there is no"),
        ("", {"INFERPOOL_ADMIN_KEYS": "SECRET"}, "key 1 has fewer than 16 characters"),
        ("", {"INFERPOOL_ADMIN_KEYS": ","}, "there is no key in it"),
        ("", {"INFERPOOL_ADMIN_KEY": "SECRET"}, "did you mean INFERPOOL_ADMIN_KEYS"),
        ("", {"INFERPOOL_ADMIN_KEYS": "SECRETé-0123456789"}, "not visible ASCII"),
        ('tls_key = "x.pem"', {}, "of no use alone; set tls_certificate too"),
        ("docs = 1", {}, "true or false"),
    ],
)
def test_errors_about_a_wrong_key_do_not_show_it(problems, toml, environ, message):
    (problem,) = problems(toml, environ=environ)
    assert message in problem
    assert "SECRET" not in problem


def test_the_variables_of_opentelemetry_are_settings(loading):
    environ = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318/otel/",
        "OTEL_EXPORTER_OTLP_HEADERS": "Authorization=Bearer%20abc",
        "OTEL_SERVICE_NAME": "pictures",
        "OTEL_TRACES_SAMPLER": "traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": "0.25",
    }
    loaded = loading(environ=environ)
    settings = loaded.settings
    assert settings.trace_endpoint == "http://collector:4318/otel/v1/traces"
    assert settings.trace_headers.pairs == (("authorization", "Bearer abc"),)
    assert settings.trace_service_name == "pictures"
    assert (settings.trace_sample_ratio, settings.trace_parent_based) == (0.25, False)
    assert origin_of(loaded, "trace_endpoint") == "environment OTEL_EXPORTER_OTLP_ENDPOINT"
    environ |= {"INFERPOOL_TRACE_ENDPOINT": "https://other", "INFERPOOL_TRACE_SAMPLE_RATIO": "1"}
    settings = loading(environ=environ).settings
    assert settings.trace_endpoint == "https://other/v1/traces"
    assert settings.trace_sample_ratio == 1
    environ |= {"OTEL_SDK_DISABLED": "true"}
    assert loading(environ=environ).settings.trace_endpoint is None


def test_headers_of_the_collector_are_kept_from_errors_and_from_workers(problems):
    environ = {"INFERPOOL_TRACE_HEADERS": "x-key=secret-value"}
    assert secret_variables(environ) == list(environ)
    (said,) = problems(environ={"INFERPOOL_TRACE_HEADERS": "secret-value"})
    assert said == "INFERPOOL_TRACE_HEADERS: is not of the form name=value,name=value"
    (said,) = problems('trace_headers = "x=secret-value"')
    assert "secret-value" not in said


@pytest.mark.parametrize(
    "variable", ["INFERPOOL_TRACE_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"]
)
def test_a_password_in_the_collectors_url_becomes_a_hidden_header(variable, tmp_path, problems):
    environ = {variable: "https://me:xy%40zzy@host:4318/x", "INFERPOOL_TRACE_HEADERS": "a=b"}
    loaded = load({}, environ, tmp_path)
    assert loaded.settings.trace_endpoint == "https://host:4318/x"
    told = base64.b64encode(b"me:xy@zzy").decode()
    wanted = (("a", "b"), ("authorization", f"Basic {told}"))
    assert loaded.settings.trace_headers.pairs == wanted
    assert "zzy" not in str(loaded.rows())
    assert secret_variables(environ) == list(environ)
    own = {"INFERPOOL_TRACE_HEADERS": "Authorization=Bearer%20abc", variable: environ[variable]}
    assert load({}, own, tmp_path).settings.trace_headers.pairs[0][1] == "Bearer abc"
    for toml, environ in (
        ('trace_endpoint = "http://me:secret@host"', {}),
        ('trace_endpoint = "ftp://me:sec/ret@host"', {}),
        ('trace_endpoint = "http://h"', {"OTEL_EXPORTER_OTLP_ENDPOINT": "ftp://me:secret@host"}),
        ("", {"INFERPOOL_TRACE_ENDPOINT": "me:secret@host:4317"}),
        ("", {"INFERPOOL_TRACE_ENDPOINT": "http://me:secret@\N{SNOWMAN}.example"}),
        ("", {"INFERPOOL_TRACE_ENDPOINT": "ftp://me:sec ret@host"}),
    ):
        said = problems(toml, environ=environ)
        assert said
        assert "ret" not in str(said)


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4317", "is not a URL such as"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "a", "is not of the form"),
        ("OTEL_RESOURCE_ATTRIBUTES", "a", "is not of the form"),
        ("OTEL_TRACES_SAMPLER", "sometimes", "is not one of always_on"),
        ("OTEL_TRACES_SAMPLER_ARG", "x", "is not a number"),
        ("OTEL_TRACES_SAMPLER_ARG", "2", "is not from 0 to 1"),
    ],
)
def test_invalid_opentelemetry_variables_end_tracing(variable, text, message, tmp_path, problems):
    environ = {"OTEL_TRACES_SAMPLER": "traceidratio", variable: text}
    if variable != "OTEL_EXPORTER_OTLP_ENDPOINT":
        assert load({}, environ, tmp_path).warnings == []  # nobody asks for traces
        environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = "http://h"
    loaded = load({}, environ, tmp_path)
    (said,) = loaded.warnings
    assert said.startswith(f"calls are not traced: {variable}: ")
    assert message in said
    assert loaded.settings.trace_endpoint is None
    (refused,) = problems('trace_endpoint = "http://h"', environ=environ)
    assert message in refused


ODD_FILES: dict[Callable[[Path], None], str] = {
    Path.mkdir: "it is a folder, not a file",
    lambda path: path.symlink_to("not_mounted/inferpool.toml"): (
        "it is a link to not_mounted/inferpool.toml, which is not there"
    ),
    os.mkfifo: "pipe|no regular file",
}
ODD_IDS = ["folder", "dangling link", "silent pipe"]


@pytest.mark.parametrize("put", ODD_FILES, ids=ODD_IDS)
@pytest.mark.parametrize("by", ["name alone", "--config", "INFERPOOL_CONFIG"])
def test_an_unreadable_file_of_settings_is_never_ignored(
    tmp_path: Path, put: Callable[[Path], None], by: str
):
    put(tmp_path / "inferpool.toml")
    flags = {"config": "inferpool.toml"} if by == "--config" else {}
    environ = {"INFERPOOL_CONFIG": "inferpool.toml"} if by == "INFERPOOL_CONFIG" else {}
    with pytest.raises(SettingsError, match=ODD_FILES[put]) as caught:
        load(flags, environ, tmp_path, pipe_wait_s=0.05)
    assert "inferpool.toml" in str(caught.value)
    assert by in (*str(caught.value).split(":"), "name alone")


@pytest.mark.parametrize("put", ODD_FILES, ids=ODD_IDS)
def test_unreadable_files_of_keys_and_tls_are_reported(tmp_path: Path, put: Callable[[Path], None]):
    put(tmp_path / "odd")
    with pytest.raises(SettingsError, match=r"the file of keys cannot be read|no file of keys"):
        load({"admin_keys_file": "odd"}, {}, tmp_path, pipe_wait_s=0.05)
    with pytest.raises(TlsError, match=r"tls_certificate: .*/odd: it is "):
        server_context(str(tmp_path / "odd"), None)


def test_keys_and_settings_may_come_through_a_pipe(tmp_path: Path):
    key = "a-key-of-enough-characters"
    for name, text in {"config": "port = 1234", "keys": key}.items():
        os.mkfifo(tmp_path / name)
        writer = threading.Thread(target=(tmp_path / name).write_text, args=(text,))
        writer.start()
    flags = {"config": "config", "admin_keys_file": "keys"}
    loaded = load(flags, {}, tmp_path, pipe_wait_s=100)
    assert (loaded.settings.port, len(loaded.settings.admin_keys)) == (1234, 1)


def test_python_code_gives_settings_without_the_environment_but_over_a_file(tmp_path: Path):
    (tmp_path / "own.toml").write_text("port = 9\nlog_level = 'error'\n[models.echo]\nreplicas = 3")
    arguments = {
        "port": 7,
        "replicas": 2,
        "options": {"a": 1},
        "models": {"mine": {"source": "nets:Net", "replicas": 1}},
        "admin_keys": ["0123456789abcdef"],
    }
    environ = {"INFERPOOL_PORT": "8", "CUDA_VISIBLE_DEVICES": "2"}
    settings = load_arguments(arguments, environ, tmp_path, file="own.toml").settings
    assert (settings.port, settings.log_level, settings.cuda_visible_devices) == (7, "error", "2")
    assert len(settings.admin_keys) == 1
    assert {name: model.replicas for name, model in settings.models.items()} == {
        "echo": 2,
        "mine": 1,
    }
    assert settings.models["mine"].options == {"a": 1}
    alone = load_arguments({}, {}, tmp_path, model="mine:Net", file="own.toml").settings
    assert list(alone.models) == ["net"]


def test_each_service_has_a_place_for_its_jobs_which_is_the_same_at_each_start(loading, tmp_path):
    environ = {"XDG_STATE_HOME": str(tmp_path / "state")}

    def place(toml: str = "", environ=environ, **flags: str) -> str:
        return loading(toml, flags, environ).settings.job_store

    def told(place: str) -> str:
        return loading(environ={"INFERPOOL_JOB_STORE": place}).settings.job_store

    by_port = place(port="9")
    assert Path(by_port).parent == tmp_path / "state" / "inferpool" / "jobs"
    assert not Path(by_port).exists()
    assert place(port="9") == by_port
    assert len({by_port, place(port="10"), place(port="9", model="echo")}) == 3
    assert place(port="0") == "none"
    assert told("none") == told("None") == "none"
    assert told("mine") == str(tmp_path / "mine")
    assert told("postgresql://me@host/jobs") == "postgresql://me@host/jobs"
    by_file = place(TWO_MODELS, port="0")
    assert Path(by_file).name.startswith("inferpool-")
    assert place(TWO_MODELS, port="9") == by_file
    at_home = place(environ={}, port="9", model="echo")
    assert Path(at_home) == Path.home() / ".local/state/inferpool/jobs" / Path(at_home).name


def test_python_code_has_a_place_for_jobs_only_with_a_file_or_a_port_of_its_own(tmp_path: Path):
    (tmp_path / "own.toml").write_text(TWO_MODELS)

    def place(file: str | None = None, **arguments: object) -> str:
        loaded = load_arguments(arguments, {"XDG_STATE_HOME": "state"}, tmp_path, file=file)
        assert "job_store" in loaded.origins  # so that a service in another process is told
        return loaded.settings.job_store

    assert place() == place(port=0) == place("own.toml", models={"a": {"source": "echo"}}) == "none"
    folder = f"{tmp_path}/state/inferpool/jobs"
    assert place("own.toml").startswith(f"{folder}/own-")
    assert place(port=9).startswith(f"{folder}/port-9-")
    assert place(job_store="mine") == f"{tmp_path}/mine"
