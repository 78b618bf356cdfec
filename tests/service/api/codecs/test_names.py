import pytest

from inferpool.service.api.codecs.names import FileKind, is_label, kind_by_name


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.jpg", "image"),
        ("x/A.JPEG", "image"),
        ("x.y/a.tiff", "image"),
        ("a.json", "json"),
        ("a.txt", "text"),
        ("a.npy", "npy"),
        ("a.jpg.bin", "bytes"),
        ("jpg", "bytes"),
        (".jpg", "bytes"),
        ("", "bytes"),
    ],
)
def test_the_end_of_a_name_tells_what_a_file_holds(name: str, kind: FileKind) -> None:
    assert kind_by_name(name) == kind


def test_labels_are_those_of_webdataset() -> None:
    assert all(map(is_label, ("a.cls", "x.y/a.CLS", "a.label", ".cls")))
    assert not any(map(is_label, ("cls", "a.b.cls", "a.cls/b", "a.cls.jpg", "")))
