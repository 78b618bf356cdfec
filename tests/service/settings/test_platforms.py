"""Settings from the variables of platforms."""

from pathlib import Path

import pytest

from inferpool.service.settings.loader import LoadedSettings, load
from inferpool.service.settings.names import SettingsError
from inferpool.service.settings.settings import shows_errors

CLOSED = {"host": "0.0.0.0", "only_predictions": True, "show_errors": False}
IMAGE = {"CONTAINER_IMAGE": "inferpool"}


def loaded(
    folder: Path, toml: str = "", flags: dict[str, str] | None = None, **variables: str
) -> LoadedSettings:
    if toml:
        (folder / "inferpool.toml").write_text(toml)
    return load(flags or {}, variables, folder)


def problems(folder: Path, toml: str = "", **variables: str) -> str:
    with pytest.raises(SettingsError) as caught:
        loaded(folder, toml, **variables)
    return "\n".join(caught.value.problems)


def test_the_variable_port_changes_the_port_and_nothing_else(tmp_path):
    found = loaded(tmp_path, "port = 1", PORT="8123")
    assert (found.settings.port, found.origins["port"]) == (8123, "environment PORT")
    assert found.settings.host == "127.0.0.1"
    assert not found.settings.only_predictions
    assert not found.warnings


def test_our_variables_and_flags_win_over_those_of_platforms(tmp_path):
    variables = {"PORT": "1", "AIP_HTTP_PORT": "2", "K_SERVICE": "a", "INFERPOOL_PORT": "3"}
    variables |= {"INFERPOOL_HOST": "::1", "INFERPOOL_ONLY_PREDICTIONS": "false"}
    variables["INFERPOOL_DRAIN_TIMEOUT_S"] = "60"
    found = loaded(tmp_path, **variables)
    settings = found.settings
    assert (settings.port, settings.host, settings.only_predictions) == (3, "::1", False)
    assert settings.drain_timeout_s == 60
    assert not found.warnings
    assert loaded(tmp_path, flags={"port": "4"}, **variables).settings.port == 4


def test_a_port_that_is_no_number_is_refused_unless_ours_wins(tmp_path):
    text = "PORT: 'tcp://10.0.0.1:80' is not a whole number from 0 to 65535"
    assert problems(tmp_path, PORT="tcp://10.0.0.1:80") == text
    assert loaded(tmp_path, PORT="tcp://10.0.0.1:80", INFERPOOL_PORT="7").settings.port == 7


@pytest.mark.parametrize(
    ("variables", "port", "name"),
    [
        ({"K_SERVICE": "a", "PORT": "9"}, 9, "K_SERVICE"),
        ({"DYNO": "web.1", "PORT": "9"}, 9, "DYNO"),
        ({"AIP_HTTP_PORT": "9", "PORT": "8"}, 9, "AIP_HTTP_PORT"),
        ({"SAGEMAKER_BIND_TO_PORT": "9", "PORT": "8"}, 9, "SAGEMAKER_BIND_TO_PORT"),
    ],
)
def test_a_platform_has_it_listen_everywhere_closed_and_the_log_names_its_variable(
    variables, port, name, tmp_path
):
    found = loaded(tmp_path, 'show_errors = true\nhost = "127.0.0.1"', **variables)
    settings = found.settings
    assert {key: getattr(settings, key) for key in CLOSED} == CLOSED
    assert {found.origins[key] for key in CLOSED} == {f"environment {name}"}
    assert settings.port == port
    assert not shows_errors(settings, at_terminal=True)
    assert [each.partition(":")[0] for each in found.warnings] == [name]
    assert "/admin" in found.warnings[0]
    assert "listens on every interface" in found.warnings[0]
    here = loaded(tmp_path, flags={"host": "127.0.0.1"}, **variables)
    assert "listens" not in here.warnings[0]


def test_texts_of_exceptions_stay_closed_whatever_a_variable_says(tmp_path):
    settings = loaded(tmp_path, DYNO="web.1", INFERPOOL_SHOW_ERRORS="true").settings
    assert not shows_errors(settings, at_terminal=True)


def test_cloud_run_gets_a_drain_that_ends_before_it_kills(tmp_path):
    assert loaded(tmp_path, K_SERVICE="a").settings.drain_timeout_s == 7
    assert loaded(tmp_path, "drain_timeout_s = 3", K_SERVICE="a").settings.drain_timeout_s == 3
    assert loaded(tmp_path, "\n", DYNO="web.1").settings.drain_timeout_s == 20


def test_the_image_listens_everywhere_and_closes_nothing(tmp_path):
    found = loaded(tmp_path, 'host = "127.0.0.1"\nport = 1', **IMAGE)
    assert (found.settings.host, found.settings.port) == ("0.0.0.0", 8000)
    assert not found.settings.only_predictions
    assert loaded(tmp_path, **IMAGE, PORT="9").settings.port == 9
    assert loaded(tmp_path, CONTAINER_IMAGE="other").settings.host == "127.0.0.1"


def with_model(folder: Path) -> Path:
    model = folder / "opt" / "model"
    model.mkdir(parents=True)
    (model / "resnet.onnx").write_bytes(b"")
    return model


def test_the_image_serves_as_sagemaker_asks_where_there_is_its_folder(tmp_path):
    model = with_model(tmp_path)
    base = {"SAGEMAKER_BASE_DIR": str(tmp_path / "opt")}
    found = loaded(tmp_path, **IMAGE, **base)
    settings = found.settings
    assert (settings.sagemaker, settings.port, settings.only_predictions) == (True, 8080, True)
    assert found.origins["only_predictions"] == "argument serve"
    assert [each.partition(":")[0] for each in found.warnings] == ["serve"]
    assert {name: each.source for name, each in settings.models.items()} == {
        "resnet": f"{model}/resnet.onnx"
    }
    other = loaded(tmp_path, flags={"model": "echo"}, **IMAGE, **base).settings
    assert (other.sagemaker, list(other.models)) == (False, ["echo"])
    assert not loaded(tmp_path, **base).settings.sagemaker


def test_an_empty_folder_of_sagemakers_is_told_with_what_reads_it(tmp_path):
    (tmp_path / "model").mkdir()
    base = {"SAGEMAKER_BASE_DIR": str(tmp_path)}
    bound = {"SAGEMAKER_BIND_TO_PORT": "1"}
    for name, variables in (("serve", IMAGE), ("SAGEMAKER_BIND_TO_PORT", bound)):
        text = problems(tmp_path, **base, **variables)
        assert text.startswith(f"{name}: {tmp_path}/model is empty; put there")


def test_sagemakers_bodies_may_be_as_long_as_it_allows(tmp_path):
    settings = loaded(tmp_path, SAGEMAKER_BIND_TO_PORT="1").settings
    assert settings.max_body_bytes == settings.max_json_bytes == 25 * 2**20
    assert settings.default_timeout_s == 60
    variables = {"SAGEMAKER_BIND_TO_PORT": "1", "SAGEMAKER_MAX_PAYLOAD_IN_MB": "30"}
    assert loaded(tmp_path, **variables).settings.max_body_bytes == 30 * 2**20
    ours = loaded(tmp_path, "max_body_bytes = 4096", **variables).settings
    assert (ours.max_body_bytes, ours.max_json_bytes) == (4096, 30 * 2**20)
    (tmp_path / "inferpool.toml").unlink()
    text = problems(tmp_path, SAGEMAKER_BIND_TO_PORT="1", SAGEMAKER_MAX_PAYLOAD_IN_MB="x")
    assert text == "SAGEMAKER_MAX_PAYLOAD_IN_MB: 'x' is no number from 1 to 65536"


def test_a_default_for_accept_that_is_not_used_is_told(tmp_path):
    variables = {"SAGEMAKER_BIND_TO_PORT": "1", "SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT": "text/csv"}
    texts = loaded(tmp_path, **variables).warnings
    assert any("INVOCATIONS_ACCEPT: 'text/csv' is not used" in each for each in texts)
    variables["SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT"] = "application/json"
    assert len(loaded(tmp_path, **variables).warnings) == 1


def test_the_setting_alone_changes_neither_address_nor_what_is_open(tmp_path):
    found = loaded(tmp_path, INFERPOOL_SAGEMAKER="true")
    settings = found.settings
    assert found.origins["max_body_bytes"] == "setting sagemaker"
    assert (settings.host, settings.port) == ("127.0.0.1", 8000)
    assert (settings.only_predictions, settings.max_body_bytes) == (False, 25 * 2**20)


def test_sagemaker_and_torchserve_exclude_each_other(tmp_path):
    (tmp_path / "c.properties").touch()
    text = problems(tmp_path, 'torchserve = "c.properties"\nsagemaker = true')
    assert "sagemaker: gives /ping and /models another meaning than torchserve: leave one" in text


def test_a_multi_model_endpoint_starts_without_models(tmp_path):
    variables = {"SAGEMAKER_BIND_TO_PORT": "1", "SAGEMAKER_MULTI_MODEL": "true"}
    found = loaded(tmp_path, **variables, SAGEMAKER_BASE_DIR="/data")
    assert (found.settings.models, found.settings.default_model) == ({}, "")
    assert found.settings.sagemaker_models == "/data/models"
    assert found.origins["sagemaker_models"] == "environment SAGEMAKER_MULTI_MODEL"
    settings = loaded(tmp_path, SAGEMAKER_MULTI_MODEL="true", **IMAGE).settings
    assert (settings.port, settings.only_predictions, settings.models) == (8080, True, {})
    assert not loaded(tmp_path, SAGEMAKER_MULTI_MODEL="true").settings.sagemaker


ROUTES = {"AIP_HEALTH_ROUTE": "/v1/e/1", "AIP_PREDICT_ROUTE": "/v1/e/1:predict"}


def routes_of(found: LoadedSettings) -> tuple[str | None, str | None]:
    return found.settings.vertex_health_route, found.settings.vertex_predict_route


def test_vertex_ais_routes_come_from_its_variables(tmp_path):
    assert routes_of(loaded(tmp_path, AIP_HTTP_PORT="1", **ROUTES)) == tuple(ROUTES.values())
    assert routes_of(loaded(tmp_path, AIP_HTTP_PORT="1")) == (None, None)
    ids = {"AIP_ENDPOINT_ID": "5", "AIP_DEPLOYED_MODEL_ID": "6"}
    path = "/v1/endpoints/5/deployedModels/6"
    found = loaded(tmp_path, AIP_HTTP_PORT="1", **ids)
    assert routes_of(found) == (path, f"{path}:predict")
    assert routes_of(loaded(tmp_path, AIP_HTTP_PORT="1", **ids, **ROUTES))[0] == "/v1/e/1"


def test_one_path_cannot_be_both_of_vertex_ais_routes(tmp_path):
    text = problems(tmp_path, AIP_HEALTH_ROUTE="/a", AIP_PREDICT_ROUTE="a/")
    assert text.startswith("AIP_HEALTH_ROUTE: '/a' is the path of predictions too")


def test_vertex_ais_model_is_a_folder_here_and_never_downloaded(tmp_path):
    model = with_model(tmp_path)
    for place in (str(model), model.as_uri()):
        found = loaded(tmp_path, AIP_STORAGE_URI=place)
        assert found.origins["models.resnet.source"] == "environment AIP_STORAGE_URI"
    text = problems(tmp_path, AIP_STORAGE_URI="gs://bucket/model")
    assert text.startswith("AIP_STORAGE_URI: gs://bucket/model is not on this machine")
    assert "there is no folder" in problems(tmp_path, AIP_STORAGE_URI=str(tmp_path / "none"))
    assert loaded(tmp_path, flags={"model": "echo"}, AIP_STORAGE_URI="gs://a").settings.models


@pytest.mark.parametrize(
    "variables",
    [
        {"INFERPOOL_MODELS__A__SOURCE": "echo"},
        {"INFERPOOL_WATCH": "."},
        {"INFERPOOL_TORCHSERVE": "config.properties"},
    ],
)
def test_models_of_our_own_settings_come_instead_of_a_platforms_folder(variables, tmp_path):
    model = with_model(tmp_path)
    (tmp_path / "config.properties").touch()
    settings = loaded(tmp_path, AIP_STORAGE_URI=str(model), **variables).settings
    assert "resnet" not in settings.models
    policy = {"INFERPOOL_WATCH_POLICY": "force"}
    assert "resnet" in loaded(tmp_path, AIP_STORAGE_URI=str(model), **policy).settings.models
