import io
import stat
import struct
import tarfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferpool.models.errors import SourceError
from inferpool.models.torchserve import members, unpacking
from inferpool.models.torchserve.archive import is_archive, read_config, read_facts
from inferpool.models.torchserve.unpacking import unpack
from tests.models.torchserve.archives import HANDLER, files_of, make_folder, make_mar, make_tar

CONFIG = "minWorkers: 2\nmaxBatchDelay: 50 # ms\nbatchSize: 4\nhandler:\n  batchSize: 9\n"
CONFIGURED = {"configFile": "model-config.yaml"}


@pytest.mark.parametrize("kind", ["mar", "tar", "folder"])
def test_facts_are_read_without_unpacking_and_unpacking_writes_the_files(
    tmp_path: Path, kind: str
) -> None:
    if kind == "folder":
        path = make_folder(tmp_path / "toy")
    else:
        make = make_mar if kind == "mar" else make_tar
        path = make(tmp_path / f"toy.{'mar' if kind == 'mar' else 'tar.gz'}", {"a/b.txt": b"12"})
    facts = read_facts(path)
    assert is_archive(path)
    assert (facts.model.model_name, facts.model.version) == ("toy", "1.0")
    assert facts.model.handler_file == "handler.py"
    assert facts.files["handler.py"] == len(HANDLER)
    assert facts.code == ["handler.py"]
    assert facts.manifest["archiverVersion"] == "0.12.0"
    if kind == "folder":
        return
    unpack(path, tmp_path / "out")
    found = {str(each.relative_to(tmp_path / "out")) for each in (tmp_path / "out").rglob("*.*")}
    assert found == {"handler.py", "a/b.txt", "MAR-INF/MANIFEST.json"}
    assert (tmp_path / "out/a/b.txt").read_bytes() == b"12"
    ours = tmp_path / "ours"
    ours.mkdir()
    assert (tmp_path / "out").stat().st_mode == ours.stat().st_mode
    assert read_facts(tmp_path / "out").files == facts.files
    assert not list(tmp_path.glob(".*"))


def test_numbers_of_the_config_are_read_and_others_are_left_to_handlers(tmp_path: Path) -> None:
    path = make_mar(tmp_path / "toy.mar", {"model-config.yaml": CONFIG}, **CONFIGURED)
    facts = read_facts(path)
    assert facts.numbers == {"minWorkers": 2, "maxBatchDelay": 50, "batchSize": 4}
    assert facts.unread == ()
    assert facts.config()["handler"] == {"batchSize": 9}
    for text, numbers, unread in (
        ("{a: 1, batchSize: 4}", {}, ("batchSize",)),
        ("batchSize: '4'\ndeviceIds: [0]", {}, ("batchSize", "deviceIds")),
        ("\ufeffbatchSize: 4\r\nmaxBatchDelay: 5\r\n", {"batchSize": 4, "maxBatchDelay": 5}, ()),
        ("# batchSize: 4\nhandler:\n  batchSize: 4\nmybatchSize: 4", {}, ()),
    ):
        path = make_mar(tmp_path / "x.mar", {"model-config.yaml": text}, **CONFIGURED)
        facts = read_facts(path)
        assert (facts.numbers, facts.unread) == (numbers, unread)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[1]", "must be a mapping"),
        ("a: [", "is not YAML"),
        ("!!python/object:os.x {}", "not YAML"),
    ],
)
def test_a_config_that_is_no_mapping_is_refused(text: str, why: str) -> None:
    with pytest.raises(SourceError, match=why):
        read_config(text, "model-config.yaml")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"handler": ""}, "names no handler"),
        ({"serializedFile": "lost.pt"}, "no such file is in it"),
        ({"modelFile": "../x.py"}, "modelFile '../x.py' .* does not name a place below"),
        ({"modelName": None}, "is not a manifest"),
    ],
)
def test_a_manifest_that_does_not_fit_the_archive_is_refused(
    tmp_path: Path, fields: dict[str, object], why: str
) -> None:
    with pytest.raises(SourceError, match=why):
        read_facts(make_mar(tmp_path / "toy.mar", **fields))


def test_a_file_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.mar"
    with pytest.raises(SourceError, match="there is no file"):
        read_facts(path)
    for content, why in ((b"hello", "neither a zip"), (b"", "neither"), (b"PK\3\4", "damaged")):
        path.write_bytes(content)
        with pytest.raises(SourceError, match=why):
            read_facts(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "")
    with pytest.raises(SourceError, match="no archive of TorchServe"):
        read_facts(path)


def zip_of(path: Path, *extra: tuple[zipfile.ZipInfo, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for info, content in extra:
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, content)
        for member, content in files_of().items():
            archive.writestr(member, content)
    return path


def named(name: str, content: bytes = b"x", mode: int = 0) -> tuple[zipfile.ZipInfo, bytes]:
    info = zipfile.ZipInfo("x")
    info.filename = info.orig_filename = name
    info.external_attr = mode << 16
    return info, content


def check_refused(path: Path, why: str, tmp_path: Path) -> None:
    """Check that nothing of an archive is written anywhere."""
    place = tmp_path / "place"
    place.mkdir(exist_ok=True)
    for use in (read_facts, lambda each: unpack(each, place / "out")):
        with pytest.raises(SourceError, match=why):
            use(path)
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("/etc/passwd", "absolute"),
        ("/", "is empty"),
        ("../x", "below the archive's folder"),
        ("a/../../x", "below the archive's folder"),
        ("./x", "below the archive's folder"),
        ("a//x", "below the archive's folder"),
        ("a\\x", "backslash"),
        ("C:/x", "absolute"),
        ("c:x", "absolute"),
        ("a\nb", "control character"),
        ("a\0b", "control character"),
        ("a\u202eb", "control character"),
        ("x" * 300, "too long"),
        ("x/" * 40 + "x", "more than 32 parts"),
        ("HANDLER.py", "another member has this name"),
        ("handler.py", "another member has this name"),
        ("handler.py/x", "a file and a folder at once|below a file"),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_name_that_is_no_plain_path_is_refused(tmp_path: Path, name: str, why: str) -> None:
    check_refused(zip_of(tmp_path / "x.mar", named(name)), why, tmp_path)


@pytest.mark.parametrize(
    ("mode", "why"),
    [
        (stat.S_IFLNK | 0o777, "a link"),
        (stat.S_IFBLK | 0o666, "a device"),
        (stat.S_IFIFO | 0o666, "a device"),
        (stat.S_IFDIR | 0o777, "a folder by its mode"),
    ],
)
def test_links_and_devices_are_refused(tmp_path: Path, mode: int, why: str) -> None:
    check_refused(zip_of(tmp_path / "x.mar", named("link", b"/etc", mode)), why, tmp_path)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda info: setattr(info, "type", tarfile.SYMTYPE), "a link"),
        (lambda info: setattr(info, "type", tarfile.LNKTYPE), "a link"),
        (lambda info: setattr(info, "type", tarfile.CHRTYPE), "no plain file"),
        (lambda info: setattr(info, "type", tarfile.FIFOTYPE), "no plain file"),
        (lambda info: setattr(info, "type", tarfile.GNUTYPE_SPARSE), "no plain file"),
        (lambda info: info.pax_headers.update({"GNU.sparse.major": "1"}), "no plain file"),
        (lambda info: info.pax_headers.update(path="toy/../x"), "below the archive's folder"),
        (lambda info: setattr(info, "name", "toy/../x"), "below the archive's folder"),
        (lambda info: setattr(info, "name", "../x"), "below the archive's folder"),
        (lambda info: setattr(info, "name", "/toy/x"), "absolute"),
        (lambda info: setattr(info, "name", "toy/handler.py"), "another member"),
    ],
)
def test_a_tar_is_refused_for_the_same(
    tmp_path: Path, change: Callable[[tarfile.TarInfo], None], why: str
) -> None:
    path = make_tar(tmp_path / "x.tar.gz")
    plain = tmp_path / "x.tar"
    with tarfile.open(plain, "w") as archive, tarfile.open(path) as old:
        for each in old:
            archive.addfile(each, old.extractfile(each))
        info = tarfile.TarInfo("toy/y")
        info.linkname = "/etc/passwd"
        change(info)
        archive.addfile(info)
    with plain.open("rb") as file, members.gzip.open(path, "wb") as packed:
        packed.write(file.read())
    check_refused(path, why, tmp_path)


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    zeros = bytes(80 << 20)
    why = "unpacks to more than"
    check_refused(zip_of(tmp_path / "x.mar", named("zeros", zeros)), why, tmp_path)
    check_refused(make_tar(tmp_path / "x.tar.gz", {"zeros": zeros}), why, tmp_path)
    # A header of a tar may itself be large.
    path = tmp_path / "y.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        info = tarfile.TarInfo("toy/x")
        info.type = tarfile.GNUTYPE_LONGNAME
        info.size = len(zeros)
        archive.addfile(info, io.BytesIO(zeros))
    check_refused(path, "too large|more than", tmp_path)


@pytest.mark.parametrize(
    ("kind", "header"),
    [
        (tarfile.XHDTYPE, b"1" * 300_000),  # quadratic for `tarfile`
        (tarfile.XGLTYPE, b"11 a=12345\n" * 300_000),
        (tarfile.XHDTYPE, b"999 path=x\n"),
        (tarfile.XHDTYPE, b"-9 path=x\n"),
        (tarfile.XHDTYPE, b"path=x\n"),
    ],
)
def test_a_header_of_a_tar_that_is_made_to_cost_time_is_refused(
    tmp_path: Path, kind: bytes, header: bytes
) -> None:
    info = tarfile.TarInfo("toy/x")
    info.type = kind
    info.size = len(header)
    path = tmp_path / "x.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.addfile(info, io.BytesIO(header))
    before = time.process_time()
    check_refused(path, "a header in it is too large|damaged", tmp_path)
    assert time.process_time() - before < 5


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_a_tar_may_have_long_names_and_its_end_may_be_missing(tmp_path: Path, format: int) -> None:
    name = "é" * 120
    path = tmp_path / "x.tar.gz"
    with tarfile.open(path, "w:gz", format=format) as archive:
        for member, content in {**files_of(), name: b"12" * 700}.items():
            info = tarfile.TarInfo(f"./toy/{member}")
            info.mtime = 1.5
            data = content.encode() if isinstance(content, str) else content
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    with members.gzip.open(path) as file:
        plain = file.read()
    path.write_bytes(
        members.gzip.compress(plain.rstrip(b"\0") + bytes(-len(plain.rstrip(b"\0")) % 512))
    )
    assert read_facts(path).files[name] == 1400
    unpack(path, tmp_path / "out")
    assert (tmp_path / "out" / name).read_bytes() == b"12" * 700
    path.write_bytes(members.gzip.compress(plain.rstrip(b"\0")[:-600]))
    with pytest.raises(SourceError, match="cut short"):
        read_facts(path)


def test_too_many_members_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "MAX_FILES", 5)
    for extra in ([named(f"f{n}") for n in range(5)], [named("a/b/c/d/e/f")]):
        path = zip_of(tmp_path / "x.mar", *extra)
        check_refused(path, "more than 5 files and folders", tmp_path)


def test_encrypted_overlapping_and_lying_members_are_refused(tmp_path: Path) -> None:
    path = zip_of(tmp_path / "x.mar", named("a", b"a" * 500), named("b", b"b" * 500))
    whole = path.read_bytes()
    first = whole.index(b"PK\1\2")
    second = whole.index(b"PK\1\2", first + 4)
    encrypted = bytearray(whole)
    struct.pack_into("<H", encrypted, first + 8, 1)
    overlapping = bytearray(whole)
    struct.pack_into("<I", overlapping, second + 42, 0)
    nameless = whole[: first + 28] + bytes(2) + whole[first + 30 : first + 46] + whole[first + 47 :]
    larger = bytearray(whole)
    struct.pack_into("<I", larger, first + 24, 501)
    for content, why in (
        (encrypted, "encrypted"),
        (overlapping, "bytes are those of another"),
        (nameless, "empty|damaged"),
    ):
        path.write_bytes(content)
        check_refused(path, why, tmp_path)
    path.write_bytes(larger)
    with pytest.raises(SourceError, match=r"another size|damaged"):
        unpack(path, tmp_path / "out")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["place", "x.mar"]


def test_a_full_disk_and_a_folder_in_use_are_errors_that_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_mar(tmp_path / "toy.mar")
    used = tmp_path / "used"
    used.mkdir()
    (used / "mine").touch()
    with pytest.raises(SourceError, match="used: Directory not empty"):
        unpack(path, used)
    monkeypatch.setattr(unpacking.shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(SourceError, match="has room for 0 MiB"):
        unpack(path, tmp_path / "out")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["toy.mar", "used"]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damaged_archives_are_refused_or_stay_in_their_folder(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    base = tmp_path_factory.mktemp("fuzz")
    make = data.draw(st.sampled_from([make_mar, make_tar]))
    content = bytearray(make(base / "x.mar", {"a/b": b"abc" * 50}).read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] = data.draw(st.integers(0, 255))
    content = (
        content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content
    )
    (base / "x.mar").write_bytes(content)
    try:
        read_facts(base / "x.mar")
        unpack(base / "x.mar", base / "out")
    except SourceError:
        assert {each.name for each in base.iterdir()} == {"x.mar"}
    else:
        assert {each.name for each in base.iterdir()} == {"x.mar", "out"}
