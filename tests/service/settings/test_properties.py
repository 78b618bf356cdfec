"""TorchServe's config.properties as settings."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferpool.service.settings.loader import LoadedSettings, load, load_arguments
from inferpool.service.settings.names import SettingsError
from inferpool.service.settings.properties import (
    Address,
    address_of,
    key_of_model,
    model_of_store,
    read_properties,
    settings_of,
    store_of,
)
from tests.models.torchserve.archives import make_folder, make_mar, make_tar

CONFIG = {"configFile": "model-config.yaml"}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    folder.mkdir()
    return folder


def write(folder: Path, text: str) -> Path:
    path = folder / "config.properties"
    path.write_text(text)
    return path


def loaded(
    folder: Path, text: str, environ: Mapping[str, str] | None = None, **flags: str
) -> LoadedSettings:
    write(folder, text)
    return load({"torchserve": "config.properties", **flags}, environ or {}, folder)


def problems(folder: Path, text: str, environ: Mapping[str, str] | None = None) -> str:
    with pytest.raises(SettingsError) as caught:
        loaded(folder, text, environ)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a=1", {"a": "1"}),
        ("a:1", {"a": "1"}),
        ("a 1", {"a": "1"}),
        ("  a \t= 1 ", {"a": "1 "}),
        ("a", {"a": ""}),
        ("a=b=c", {"a": "b=c"}),
        ("# a=1\n! b=2\n\nc=3", {"c": "3"}),
        ("a=1,\\\n   2,\\\r\n\t3\nb=4", {"a": "1,2,3", "b": "4"}),
        ("a=x\\\\\nb=1", {"a": "x\\", "b": "1"}),
        ("a\\ b\\=c=\\u00e9\\t\\q", {"a b=c": "é\tq"}),
        ("a=1\na=2", {"a": "2"}),
        ("a=1\\", {"a": "1"}),
        ("a=é", {"a": "é"}),
        ("a=1\rb=2", {"a": "1", "b": "2"}),
        ("#x\\\na=1", {"a": "1"}),
        ("\\\n# b\n\\\n\na=1", {"a": "1"}),
    ],
)
def test_the_syntax_is_that_of_java(tmp_path: Path, text: str, found: dict[str, str]) -> None:
    assert read_properties(write(tmp_path, text), {}) == found


@settings(max_examples=200, deadline=None)
@given(
    lines=st.lists(
        st.tuples(
            st.sampled_from(["inference_address", "models", "load_models", "job_queue_size", "x"]),
            st.text(st.characters(codec="utf-8"), max_size=30),
        )
    )
)
def test_any_file_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, lines: list[tuple[str, str]]
) -> None:
    folder = tmp_path_factory.mktemp("any")
    make_mar(folder / "a.mar", name="a")
    text = "model_store=.\nload_models=all\n" + "".join(f"{key}={value}\n" for key, value in lines)
    path = folder / "config.properties"
    path.write_text(text, "utf-8")
    problems: tuple[str, ...] = ()
    try:
        settings_of(path, {}, {}, folder)
    except SettingsError as error:
        problems = error.problems
    assert all(str(path) in each for each in problems)


def test_latin_1_is_read_and_lines_are_named(tmp_path: Path) -> None:
    path = tmp_path / "config.properties"
    path.write_bytes("# ü\n\na=\\\n 1\nb=é\n".encode("latin-1"))
    properties = read_properties(path, {})
    assert properties["b"] == "é"
    assert (properties.place("a"), properties.place("b")) == (f"{path}:3: a", f"{path}:5: b")


def test_variables_are_put_in_and_win_only_if_the_file_says_so(tmp_path: Path) -> None:
    text = "model_store=$$HOME$$/x\njob_queue_size=5\nallowed_urls=a\n"
    environ = {"HOME": "/h", "TS_JOB_QUEUE_SIZE": "7", "TS_ALLOWED_URLS": "b"}
    properties = read_properties(write(tmp_path, text), environ)
    assert (properties["model_store"], properties["job_queue_size"]) == ("/h/x", "5")
    text += "enable_envvars_config=true\n"
    properties = read_properties(write(tmp_path, text), environ)
    assert (properties["job_queue_size"], properties["allowed_urls"]) == ("7", "a")
    assert "HOME is not set" in problems(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("", Address(is_tls=False, host="127.0.0.1", port=8081)),
        ("management_address=http://0.0.0.0", Address(is_tls=False, host="0.0.0.0", port=8081)),
        ("management_address=HTTPS://h", Address(is_tls=True, host="h", port=8444)),
        ("management_address=http://[::1]:9/", Address(is_tls=False, host="::1", port=9)),
    ],
)
def test_addresses_have_the_ports_of_torchserve(
    tmp_path: Path, text: str, address: Address
) -> None:
    assert address_of(read_properties(write(tmp_path, text), {}), "management_address") == address


def test_a_whole_file_is_read_as_settings(tmp_path: Path, store: Path) -> None:
    make_mar(store / "a.mar", name="Aa")
    yaml = "batchSize: 4\nmaxBatchDelay: 20\nminWorkers: 1\nmaxWorkers: 2\nresponseTimeout: 200\n"
    make_mar(store / "b.mar", {"model-config.yaml": yaml}, name="b", **CONFIG)
    make_mar(store / "b2.mar", name="b", modelVersion="2.0")
    make_folder(store / "c", modelName="c", handler="image_classifier")
    make_tar(store / "d.tar.gz", modelName="d")
    (store / "notes.txt").touch()
    (store / ".hidden.mar").touch()
    found = loaded(
        tmp_path,
        "inference_address=http://0.0.0.0:9090\nmodel_store=store\nload_models=ALL\n"
        "default_workers_per_model=2\ndefault_startup_timeout=33\njob_queue_size=17\n"
        "max_request_size=8000000\ncors_allowed_origin=https://a.example\n"
        'models={"b": {"2.0": {"batchSize": 8, "minWorkers": 0}, "1.0": {"batchSize": 9}}}\n',
    )
    settings = found.settings
    assert (settings.host, settings.port) == ("0.0.0.0", 9090)
    assert (settings.max_queue_length, settings.max_body_bytes) == (17, 8_000_000)
    assert settings.cors_origins == ("https://a.example",)
    assert (settings.default_timeout_s, settings.max_timeout_s) == (400, 400)
    assert settings.default_model == "aa"
    shown = {
        name: (
            model.source,
            model.max_batch_size,
            model.batch_wait_ms,
            model.replicas,
            model.batch_timeout_s,
            model.load_timeout_s,
        )
        for name, model in settings.models.items()
    }
    assert shown == {
        "aa": ("store/a.mar", 1, 0, 2, 120, 33),
        "b": ("store/b.mar", 4, 20, 1, 200, 33),
        "b-2.0": ("store/b2.mar", 8, 0, 2, 120, 33),
        "c": ("torchserve:store/c", "auto", 0, 2, 120, 33),
        "d": ("torchserve:store/d.tar.gz", 1, 0, 2, 120, 33),
    }
    assert found.origins["models.b.max_batch_size"] == "file config.properties"
    assert found.warnings == []


def test_the_address_of_a_platform_holds_where_the_file_names_none(
    tmp_path: Path, store: Path
) -> None:
    text = "model_store=store\n"
    settings = loaded(tmp_path, text, {"PORT": "9", "K_SERVICE": "a"}).settings
    assert (settings.host, settings.port) == ("0.0.0.0", 9)
    assert loaded(tmp_path, text, {"PORT": "9"}).settings.host == "127.0.0.1"
    text += "inference_address=http://127.0.0.1:8085\n"
    settings = loaded(tmp_path, text, {"PORT": "9", "K_SERVICE": "a"}).settings
    assert (settings.host, settings.port) == ("127.0.0.1", 8085)


def test_our_variables_and_flags_win(tmp_path: Path, store: Path) -> None:
    make_mar(store / "a.mar", name="a")
    text = "model_store=store\nload_models=a.mar\n"
    environ = {"INFERPOOL_MODELS__A__MAX_BATCH_SIZE": "6"}
    settings = loaded(tmp_path, text, environ, port="1234").settings
    assert (settings.port, settings.models["a"].max_batch_size) == (1234, 6)
    by_variable = load({}, {"INFERPOOL_TORCHSERVE": "config.properties"}, tmp_path).settings
    (tmp_path / "inferpool.toml").write_text('torchserve = "config.properties"\n')
    by_file = load({}, {}, tmp_path).settings
    assert by_variable.port == by_file.port == 8080
    assert list(by_variable.models) == list(by_file.models) == ["a"]


def test_a_program_may_name_the_file_too(tmp_path: Path, store: Path) -> None:
    make_mar(store / "a.mar", name="a")
    write(tmp_path, "model_store=store\nload_models=a.mar\n")
    found = load_arguments({"torchserve": "config.properties", "port": 9}, {}, tmp_path)
    assert (found.settings.port, list(found.settings.models)) == (9, ["a"])
    assert load_arguments({}, {"INFERPOOL_TORCHSERVE": "lost"}, tmp_path).settings.port != 8080


def test_a_file_that_is_not_there_is_named_with_its_setting(tmp_path: Path) -> None:
    for flags, environ, place in (
        ({"torchserve": "lost"}, {}, "--torchserve"),
        ({}, {"INFERPOOL_TORCHSERVE": "lost"}, "INFERPOOL_TORCHSERVE"),
    ):
        with pytest.raises(SettingsError, match=rf"^{place}: .*lost cannot be read: No such file"):
            load(flags, environ, tmp_path)
    with pytest.raises(SettingsError, match=r"^torchserve: .*cannot be read"):
        load_arguments({"torchserve": "a\0b"}, {}, tmp_path)
    (tmp_path / "large").write_bytes(bytes(1 << 21))
    with pytest.raises(SettingsError, match=r"^--torchserve: .*it has more than 1,048,576 bytes"):
        load({"torchserve": "large"}, {}, tmp_path)


def test_our_file_wins_against_defaults_and_for_its_models(tmp_path: Path, store: Path) -> None:
    make_mar(store / "a.mar", name="a")
    (tmp_path / "inferpool.toml").write_text(
        "port = 7000\ndefault_timeout_s = 5.0\nmax_queue_length = 3\n"
        "[models.a]\nmax_batch_size = 9\n"
    )
    text = "model_store=store\nload_models=a.mar\njob_queue_size=4\n"
    settings = loaded(tmp_path, text).settings
    assert (settings.port, settings.default_timeout_s, settings.max_queue_length) == (7000, 5, 4)
    assert (settings.models["a"].max_batch_size, settings.models["a"].batch_timeout_s) == (9, 120)
    settings = loaded(tmp_path, f"{text}inference_address=http://127.0.0.1:7001\n").settings
    assert settings.port == 7001


def test_models_are_named_by_load_models(tmp_path: Path, store: Path) -> None:
    make_mar(store / "a.mar", name="a")
    settings = loaded(tmp_path, "model_store=store\nload_models=Foo_1=a.mar, a.mar").settings
    assert list(settings.models) == ["foo_1", "a"]
    assert settings.models["foo_1"].options == {"name": "Foo_1"}
    assert key_of_model("_Ünder ") == "nder-"


def test_without_load_models_nothing_is_loaded(tmp_path: Path) -> None:
    assert loaded(tmp_path, "").settings.models == {}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("load_models=a.mar", "model_store is not set"),
        (
            "model_store=lost\nload_models=all",
            ":1: model_store: there is no folder lost .looked for from /",
        ),
        ("model_store=store\nload_models=lost.mar", ":2: load_models: lost.mar .* no file"),
        ("model_store=store\nload_models=https://h/a.mar", "nothing is loaded from a URL"),
        ("model_store=store\nload_models=../a.mar", "without a path"),
        ("model_store=store\nload_models=/a.mar", "without a path"),
        ("model_store=store\nload_models=a.mar,a.mar", "both version 1.0 of a"),
        ("inference_address=unix:/tmp/x", ":1: inference_address: unix sockets are not served"),
        ("inference_address=ftp://h", "'ftp://h' is no address; write http://HOST:PORT"),
        ("inference_address=http://h:99999", "is no address"),
        ("inference_address=https://h", "https needs certificate_file and private_key_file"),
        ("keystore=x.p12", "keystores of Java are not read.*openssl pkcs12"),
        ("job_queue_size=many", ":1: job_queue_size: 'many' must be a whole number from 1"),
        ("model_store=store\nload_models=a.mar\nmodels=[", ":3: models: is not JSON"),
        ("model_store=store\nload_models=a.mar\nmodels=[]", ':3: models: write {"NAME"'),
        ("model_store=store\nload_models=a.mar\ndefault_workers_per_model=-1", "a whole number"),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, store: Path, text: str, why: str) -> None:
    make_mar(store / "a.mar", name="a")
    found = problems(tmp_path, text)
    assert re.search(why, found), found
    assert found.startswith("config.properties") or str(tmp_path) in found


def test_what_is_ignored_is_named(tmp_path: Path, store: Path) -> None:
    make_mar(store / "a.mar", {"model-config.yaml": "{batchSize: 4}"}, name="a", **CONFIG)
    (store / "broken.mar").write_text("broken")
    found = loaded(
        tmp_path,
        "model_store=store\nload_models=all\ninstall_py_dep_per_model=true\n"
        "prefer_direct_buffer=true\nasync_logging=true\ndefault_worker_per_model=2\n"
        "decode_input_request=true\nenable_envvars_config=true\n",
        {"TS_NUMBER_OF_NETTY_THREADS": "4"},
    )
    texts = "\n".join(found.warnings)
    assert list(found.settings.models) == ["a"]
    for text in (
        "broken.mar is not served",
        "a.mar: model-config.yaml: batchSize has no effect",
        "config.properties:3: install_py_dep_per_model: has no effect: nothing is installed",
        "no effect here: number_of_netty_threads, async_logging, prefer_direct_buffer",
        "default_worker_per_model: there is no such key in TorchServe 0.12; did you mean "
        "default_workers_per_model?",
    ):
        assert text in texts
    assert "decode_input_request" not in texts
    assert len(found.warnings) == 5


@pytest.mark.parametrize(
    ("num", "visible", "expected"),
    [("0", None, ("cpu", None)), ("2", None, ("auto", "0,1")), ("1", "3,5", ("cuda:0", "3,5"))],
)
def test_gpus_are_bounded(
    tmp_path: Path, store: Path, num: str, visible: str | None, expected: tuple[str, str | None]
) -> None:
    make_mar(store / "a.mar", name="a")
    text = f"model_store=store\nload_models=a.mar\nnumber_of_gpu={num}\n"
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    settings = loaded(tmp_path, text, environ).settings
    assert (settings.models["a"].devices, settings.cuda_visible_devices) == expected


def test_https_names_its_files(tmp_path: Path) -> None:
    text = "inference_address=https://h:1\ncertificate_file=c.pem\nprivate_key_file=k.pem\n"
    settings = loaded(tmp_path, text).settings
    assert (settings.tls_certificate, settings.tls_key) == ("c.pem", "k.pem")


def test_one_archive_of_the_store_is_registered_as_at_the_start(
    tmp_path: Path, store: Path
) -> None:
    path = make_mar(store / "a.mar", name="a")
    properties = read_properties(write(tmp_path, f"model_store={store}\nservice_envelope=json\n"))
    assert store_of(properties, tmp_path) == store
    assert model_of_store(path, properties, name="b") == {
        "source": str(path),
        "max_batch_size": 1,
        "batch_timeout_s": 120.0,
        "options": {"name": "b", "envelope": "json"},
    }
