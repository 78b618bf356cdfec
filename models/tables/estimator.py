"""An estimator of scikit-learn from a file of skops. Runs in worker processes only.

skops loads no code but that of types that it knows, and of those that the user lists.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from inferpool.models.accelerator.failures import lacks_resources
from inferpool.models.errors import ModelError, SourceError
from inferpool.models.files.checkpoint import first_line
from inferpool.models.files.kinds import problem_of_file

_HARMLESS = ("numpy.dtype",)
"""Types that skops leaves to its users, and that cannot run code. Imputers have this one."""
Method = Literal["predict_proba", "decision_function", "predict", "transform"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The form of the data that an estimator was fitted on."""

    is_text: bool
    """It takes texts, and no tables."""
    names: Sequence[str]
    """Names of the columns; empty if it was fitted on numbers alone."""
    num: int | None
    """The number of columns; None if the estimator does not say it."""
    examples: Sequence[object]
    """A value for each column that the estimator knows: a category where it has such, or 0."""


def read_estimator(path: Path, trusted: Sequence[str]) -> Any:
    """Read an estimator.

    Args:
        path: The file.
        trusted: Types besides those that skops trusts, such as "my_package.steps.Ratio".

    Raises:
        SourceError: The file cannot be read, or has types that nobody trusts.
        ModelError: scikit-learn or skops is not installed.
    """
    if problem := problem_of_file(path, "skops"):
        raise SourceError(problem)
    try:
        from skops import io
    except ImportError as error:
        raise ModelError(
            f"{path} needs the packages scikit-learn and skops ({error}): "
            "pip install 'inferpool[sklearn]'"
        ) from None
    try:
        trusted = [*_HARMLESS, *trusted]
        untrusted = [each for each in io.get_untrusted_types(file=path) if each not in trusted]
        if untrusted:
            listed = ", ".join(f'"{each}"' for each in untrusted)
            raise SourceError(
                f"{path} has types that skops does not trust: {', '.join(untrusted)}. If you know "
                f"who made it, list them: options = {{ trusted = [{listed}] }}"
            )
        return io.load(path, trusted=trusted)
    except SourceError:
        raise
    except Exception as error:  # a damaged file makes it raise almost anything
        if lacks_resources(error):
            raise
        raise SourceError(
            f"{path} cannot be read by skops: {type(error).__name__}: {first_line(error)}"
        ) from error


def share_threads(estimator: Any, num_threads: int) -> None:
    """Have an estimator compute in this thread, with a share of the cores for BLAS and OpenMP."""
    from threadpoolctl import threadpool_limits

    threadpool_limits(limits=num_threads)
    if hasattr(estimator, "get_params"):
        names = [name for name in estimator.get_params() if name.rpartition("__")[2] == "n_jobs"]
        estimator.set_params(**dict.fromkeys(names))


def chosen_method(path: Path, estimator: Any, wanted: str | None) -> Method:
    """Return the method to serve: the one wanted, or the one that says most.

    Raises:
        SourceError: The estimator has not the method that is wanted, or none.
    """
    known = [name for name in get_args(Method) if hasattr(estimator, name)]
    if wanted is None and _num_targets(estimator) > 1 and "predict" in known:
        return "predict"
    for name in known:
        if wanted in (None, name):
            found: Method = name
            return found
    has = f"it has {', '.join(known)}" if known else f"it has none of {', '.join(get_args(Method))}"
    kind = type(estimator).__name__
    raise SourceError(f"{path} has a {kind}, without {wanted or 'a method to serve'}: {has}")


def classes_of(estimator: Any) -> list[object]:
    """Return the classes of a classifier with one target, as JSON values; else an empty list."""
    classes = getattr(estimator, "classes_", None)
    if classes is None or isinstance(classes, list):
        return []
    found: list[object] = classes.tolist()
    return found


def steps_of(estimator: Any) -> tuple[list[Any], Any]:
    """Return the steps that change the data, and the last one."""
    steps = [step for _, step in getattr(estimator, "steps", ())]
    if not steps:
        return [], estimator
    return [each for each in steps[:-1] if each not in (None, "passthrough")], steps[-1]


def scores_pairs(estimator: Any) -> bool:
    """Return whether the scores of a classifier are those of pairs of classes."""
    return getattr(estimator, "decision_function_shape", "") == "ovo"


def columns_of(estimator: Any) -> Columns:
    """Return what an estimator was fitted on, as far as it says."""
    first = estimator
    while getattr(first, "steps", None):
        first = first.steps[0][1]
    names = [str(each) for each in getattr(estimator, "feature_names_in_", ())]
    num = getattr(estimator, "n_features_in_", None)
    is_text = num is None and hasattr(first, "build_analyzer")
    examples: list[object] = [0.0] * (num or 0)
    for columns, encoder in _encoders(first):
        for place, categories in zip(columns, encoder.categories_, strict=False):
            index = names.index(place) if place in names else place
            if isinstance(index, int) and 0 <= index < len(examples) and len(categories):
                examples[index] = categories.tolist()[0]
    return Columns(is_text=is_text, names=names, num=num, examples=examples)


def _encoders(step: Any) -> list[tuple[Sequence[Any], Any]]:
    """Return the encoders of categories that see columns as they come, with these columns."""
    if hasattr(step, "categories_"):
        return [(range(len(step.categories_)), step)]
    found: list[tuple[Sequence[Any], Any]] = []
    for _, each, columns in getattr(step, "transformers_", ()):
        inner = [each, *(step for _, step in getattr(each, "steps", ()))]
        listed = [columns] if isinstance(columns, str | int) else list(columns)
        found += [(listed, one) for one in inner if hasattr(one, "categories_")]
    return found


def _num_targets(estimator: Any) -> int:
    classes = getattr(estimator, "classes_", None)
    return len(classes) if isinstance(classes, list) else 1
