"""Estimators of scikit-learn as models."""

import logging

import numpy as np
import pytest
import torch
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.compose import ColumnTransformer
from sklearn.datasets import load_iris
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.svm import SVC
from threadpoolctl import threadpool_limits

from inferpool.models.errors import InputError, ModelError, SourceError
from inferpool.models.sources.registry import build
from inferpool.models.tables.model import TableModel
from tests.models.items import answers, bytes_item, json_item, loaded, tensor_item

io = pytest.importorskip("skops.io")
# Raised within scikit-learn 1.7.
pytestmark = pytest.mark.filterwarnings("ignore:scipy.optimize:DeprecationWarning")
NAMES = np.array(["setosa", "versicolor", "virginica"])


class Halved(TransformerMixin, BaseEstimator):
    """A step of a user's own."""

    def fit(self, x, y=None):
        return self

    def transform(self, x):
        return x / 2


def saved(path, estimator):
    io.dump(estimator, path)
    return path


@pytest.fixture(autouse=True)
def own_threads():
    """Restore the threads of this process, which a model sets as it loads."""
    with threadpool_limits(1):
        yield


@pytest.fixture(scope="module")
def iris():
    return load_iris(return_X_y=True)


def test_a_classifier_answers_with_its_label_and_the_probability_of_each_class(
    tmp_path, iris, caplog
):
    data, labels = iris
    pipeline = make_pipeline(StandardScaler(), LogisticRegression()).fit(data, NAMES[labels])
    path = saved(tmp_path / "iris.skops", pipeline)
    with caplog.at_level(logging.INFO):
        model = loaded(build(str(path), None, {}))
    rows = data[::30]
    items = [json_item(row.tolist()) for row in rows[:-1]]
    items.append(tensor_item({"x": torch.from_numpy(rows[-1].copy())}))
    found = answers(model, items)
    assert [each["label"] for each in found] == pipeline.predict(rows).tolist()
    wanted = pipeline.predict_proba(rows)
    assert np.allclose([[*each["probabilities"].values()] for each in found], wanted)
    assert [*found[0]["probabilities"]] == model.labels == NAMES.tolist()
    for said in ("StandardScaler > LogisticRegression", "classes setosa, ", "rows of 4 numbers"):
        assert said in caplog.text
    assert answers(model, [json_item(model.example)])


def test_other_methods_are_options_and_the_known_ones_are_named(tmp_path, iris):
    data, labels = iris
    path = saved(tmp_path / "svc.skops", SVC(decision_function_shape="ovo").fit(data, labels))
    item = json_item(data[80].tolist())
    estimator = io.load(path, trusted=[])
    (found,) = answers(loaded(TableModel(path)), [item])
    assert found["label"] == 1
    assert np.allclose(found["scores"], estimator.decision_function(data[80:81])[0])  # of pairs
    path = saved(tmp_path / "one_over_rest.skops", SVC().fit(data, labels))
    (found,) = answers(loaded(TableModel(path)), [item])
    assert [*found["scores"]] == ["0", "1", "2"]
    assert answers(loaded(TableModel(path, method="predict")), [item]) == [1]
    with pytest.raises(SourceError, match="without predict_proba: it has decision_function, pre"):
        loaded(TableModel(path, method="predict_proba"))


def test_a_regressor_answers_with_numbers(tmp_path, iris):
    data, _ = iris
    estimator = Ridge().fit(data[:, :3], data[:, 3])
    model = loaded(TableModel(saved(tmp_path / "ridge.skops", estimator)))
    wanted = estimator.predict(data[:2, :3])
    items = [json_item(row.tolist()) for row in data[:2, :3]]
    assert answers(model, items) == pytest.approx(wanted.tolist())
    assert [spec.shape for spec in model.outputs] == [(-1,)]


def test_columns_are_given_by_name(tmp_path):
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(
        {"age": [20, 30, 40, 50.0], "city": ["Bonn", "Kiel", "Bonn", "Ulm"], "old": [1, 0, 1, 0]}
    )
    steps = [("c", OneHotEncoder(), ["city"]), ("n", StandardScaler(), ["age", "old"])]
    pipeline = make_pipeline(ColumnTransformer(steps), LogisticRegression()).fit(
        table, [0, 1, 1, 0]
    )
    model = loaded(TableModel(saved(tmp_path / "people.skops", pipeline)))
    rows = [{"old": 1, "age": 33, "city": "Kiel"}, {"age": 50.5, "city": "Ulm", "old": False}]
    items = [json_item(rows[0]), json_item([50.5, "Ulm", False])]
    found = answers(model, items)
    wanted = pipeline.predict_proba(pandas.DataFrame(rows, columns=list(table)))
    assert np.allclose([[*each["probabilities"].values()] for each in found], wanted)
    assert model.example == {"age": 0.0, "city": "Bonn", "old": 0.0}
    for bad, said in (
        ({"age": 3}, "no value for city, old"),
        ({**rows[0], "sex": 1}, "no column sex"),
        ([1, 2], "expected 3 values, found 2"),
        ({**rows[0], "city": []}, r"\['city'\]: expected a number, a text"),
        ("Kiel", "an object with a value for each column, or a list of 3 values"),
    ):
        with pytest.raises(InputError, match=said):
            model.preprocess(json_item(bad))


def test_values_of_other_types_than_the_estimator_knows_are_refused(tmp_path):
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"age": [20, 30.0], "city": ["Bonn", "Kiel"]})
    steps = [("c", OneHotEncoder(), ["city"]), ("n", StandardScaler(), ["age"])]
    pipeline = make_pipeline(ColumnTransformer(steps), LogisticRegression()).fit(table, [0, 1])
    model = loaded(TableModel(saved(tmp_path / "people.skops", pipeline)))
    too_large = b'[%b, "Bonn"]' % (b"9" * 400)
    for row in ([1, 5], [1, None], ["old", "Bonn"], [1, "Ulm"], too_large):
        with pytest.raises(InputError, match="the estimator refuses the instance"):
            answers(model, [json_item(row)])


def test_a_missing_value_is_null(tmp_path, iris):
    data, labels = iris
    pipeline = make_pipeline(SimpleImputer(), LogisticRegression(max_iter=500)).fit(data, labels)
    model = loaded(TableModel(saved(tmp_path / "gaps.skops", pipeline)))
    wanted = pipeline.predict_proba([[5.0, np.nan, 1.5, 0.2]])[0]
    (found,) = answers(model, [json_item([5, None, 1.5, 0.2])])
    assert np.allclose([*found["probabilities"].values()], wanted)


def test_a_pipeline_that_reads_texts_gets_texts(tmp_path):
    texts = ["good fine", "bad awful", "fine", "awful"]
    pipeline = make_pipeline(TfidfVectorizer(), LogisticRegression())
    pipeline.fit(texts, ["yes", "no", "yes", "no"])
    model = loaded(TableModel(saved(tmp_path / "texts.skops", pipeline)))
    items = [json_item("good"), json_item({"text": "awful, awful bad"}), bytes_item(b"fine")]
    assert [each["label"] for each in answers(model, items)] == ["yes", "no", "yes"]
    with pytest.raises(InputError, match="expected a text"):
        model.preprocess(json_item(3))


def test_types_that_are_not_trusted_are_named_until_they_are_listed(tmp_path, iris):
    data, labels = iris
    pipeline = make_pipeline(Halved(), LogisticRegression(max_iter=500)).fit(data, labels)
    path = saved(tmp_path / "halved.skops", pipeline)
    name = f"{__name__}.Halved"
    with pytest.raises(SourceError, match=rf'halved\.skops has types .*trusted = \["{name}"\]'):
        loaded(TableModel(path))
    model = loaded(TableModel(path, trusted=[name]))
    (found,) = answers(model, [json_item(data[0].tolist())])
    assert found["label"] == 0


def test_a_bad_file_is_named(tmp_path, iris):
    whole = saved(tmp_path / "whole.skops", Ridge().fit(*iris)).read_bytes()
    for content, said in (
        (whole[:200], "is not a file of skops, .*or is cut short"),
        (b"", "is an empty file"),
        (whole.replace(b"Ridge", b"Rigid"), "cannot be read by skops|does not trust: .*Rigid"),
    ):
        (tmp_path / "bad.skops").write_bytes(content)
        with pytest.raises(SourceError, match=rf"bad\.skops {said}"):
            loaded(TableModel(tmp_path / "bad.skops"))


def test_without_skops_the_extra_is_named(tmp_path, iris, monkeypatch):
    path = saved(tmp_path / "ridge.skops", Ridge().fit(*iris))
    monkeypatch.setitem(__import__("sys").modules, "skops", None)
    with pytest.raises(ModelError, match=r"pip install 'inferpool\[sklearn\]'"):
        loaded(TableModel(path))
