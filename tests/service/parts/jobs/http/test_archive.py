"""Archives are read as the programs that made them would read them, or refused whole."""

import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferpool.service.errors import BadRequestError, InvalidInputError, UnsupportedTypeError
from inferpool.service.parts.jobs.http.archive import ArchiveFile, read_archive

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
LONG = "a" * 90 + "/" + "b" * 90 + ".jpg"


def archive_of(*files: tuple[str, bytes], format: int = tarfile.PAX_FORMAT) -> bytes:
    """Make an archive with Python's own writer."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=format) as archive:
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return made.getvalue()


def with_members(*members: tarfile.TarInfo) -> bytes:
    """Make an archive of members without content."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for member in members:
            archive.addfile(member)
    return made.getvalue()


def member(name: str, type: bytes, **fields: object) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type = type
    for key, value in fields.items():
        setattr(made, key, value)
    return made


def with_checksum(block: bytes) -> bytes:
    """Return a header block with the checksum that it must have."""
    return block[:148] + b"%06o\0 " % (sum(block[:148] + block[156:]) + 256) + block[156:]


def read(archive: bytes, path: Path, most_bytes: int = 1 << 20) -> list[ArchiveFile]:
    path.write_bytes(archive)
    with path.open("rb") as file:
        return list(read_archive(file, most_bytes))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "archive.tar"


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
@settings(max_examples=60)
@given(files=st.lists(st.tuples(st.text("ab./ü\u4e2d", min_size=1, max_size=300), st.binary())))
def test_files_come_out_as_python_puts_them_in(
    format: int, files: Sequence[tuple[str, bytes]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    try:
        made = archive_of(*files, format=format)
    except ValueError:  # ustar has no room for the name
        return
    found = read(made, tmp_path_factory.getbasetemp() / "archive.tar")
    with tarfile.open(fileobj=io.BytesIO(made)) as archive:
        names = [each.name for each in archive if each.isreg()]
    assert [each.name.rstrip("/") for each in found] == [each.rstrip("/") for each in names]
    assert [each.content for each in found] == [content for _, content in files]


@pytest.mark.parametrize("format", ["v7", "ustar", "gnu", "oldgnu", "posix"])
def test_archives_of_gnu_tar_are_read(format: str, path: Path) -> None:
    tar = shutil.which("tar")
    if tar is None:
        pytest.skip("tar is not installed")
    folder = path.parent / "folder"
    long = "short" if format == "v7" else "m" * 80
    (folder / long).mkdir(parents=True)
    names = ["1.jpg", f"{long}/2.txt", f"{long}/{long}"]
    for name in names:
        (folder / name).write_bytes(name.encode() * 999)
    (folder / "other").symlink_to("1.jpg")
    if format != "v7":
        os.mkfifo(folder / "pipe")
    command = [tar, "--create", f"--format={format}", "--sort=name", f"--directory={folder}", "."]
    made = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    found = {each.name.removeprefix("./"): each for each in read(made, path)}
    assert isinstance(found.pop("other").problem, InvalidInputError)
    assert {name: each.content for name, each in found.items()} == {
        name: name.encode() * 999 for name in names
    }


@pytest.mark.parametrize("format", ["gnu", "posix"])
def test_a_sparse_file_is_a_file_that_cannot_be_read(format: str, path: Path) -> None:
    tar = shutil.which("tar")
    if tar is None:
        pytest.skip("tar is not installed")
    folder = path.parent / "folder"
    folder.mkdir()
    with (folder / "1").open("wb") as file:
        for number in range(40):  # more pieces than one header has room for
            file.seek(number << 16)
            file.write(b"x" * 4096)
        file.truncate(1 << 30)
    (folder / "2").write_bytes(b"after")
    command = [tar, "--create", "--sparse", f"--format={format}", "--sort=name"]
    made = subprocess.run(
        [*command, f"--directory={folder}", "."], stdout=subprocess.PIPE, check=True
    ).stdout
    sparse, after = read(made, path)
    assert isinstance(sparse.problem, UnsupportedTypeError)
    assert sparse.problem.message == "is sparse; make the archive without --sparse"
    assert (after.name, after.content) == ("./2", b"after")


def test_links_have_problems_and_what_is_no_file_is_left_out(path: Path) -> None:
    found = read(
        with_members(
            member("folder", tarfile.DIRTYPE),
            member("hard", tarfile.LNKTYPE, linkname="x"),
            member("soft", tarfile.SYMTYPE, linkname="/etc/passwd"),
            member("pipe", tarfile.FIFOTYPE),
            member("disk", tarfile.BLKTYPE, devmajor=8),
            member("empty", tarfile.REGTYPE),
            member("vendor", b"Q"),
        ),
        path,
    )
    assert [each.name for each in found] == ["hard", "soft", "empty"]
    assert all("tar --dereference" in str(each.problem) for each in found[:2])
    assert found[2] == ("empty", b"", None)


def test_a_long_file_is_skipped_and_the_next_is_read(path: Path) -> None:
    made = archive_of(("a", b"x" * 1000), ("b", b"y" * 1001), ("c", b"z"))
    first, second, third = read(made, path, most_bytes=1000)
    assert (first.content, first.problem) == (b"x" * 1000, None)
    assert second.content == b""
    assert str(second.problem) == (
        "has 1001 bytes; the limit for an instance is 1000 (the setting max_body_bytes)"
    )
    assert third.content == b"z"


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_an_archive_that_ends_early_is_refused_wherever_it_ends(format: int, path: Path) -> None:
    files = [(LONG, b"x" * 700), ("b", b""), ("c", b"y" * 512)]
    made = archive_of(*files, format=format)
    whole = len(made.rstrip(b"\0")) + 512  # the content ends with its block
    for num_bytes in {*range(1, whole, 37), *range(512, whole, 512)}:
        with pytest.raises(BadRequestError, match=r"ends early|is no tar archive"):
            read(made[:num_bytes], path)
    assert len(read(made[:whole], path)) == 3


def test_a_damaged_header_is_no_end(path: Path) -> None:
    made = bytearray(archive_of(("a", b"x"), ("b", b"y"), ("c", b"z")))
    made[1024 + 3] ^= 1
    with pytest.raises(BadRequestError, match="is damaged; there is no header where one must be"):
        read(bytes(made), path)


def test_what_follows_the_end_is_not_left_out_in_silence(path: Path) -> None:
    made = archive_of(("a", b"x"))
    assert len(read(made + bytes(1 << 20), path)) == 1
    with pytest.raises(BadRequestError, match="something after its end; join archives with tar"):
        read(made + made, path)


@pytest.mark.parametrize(
    ("start", "error", "message"),
    [
        (b"\x1f\x8b\x08", UnsupportedTypeError, r"compressed with gzip \(gunzip\)"),
        (b"BZh9", UnsupportedTypeError, "bzip2"),
        (b"\xfd7zXZ\0", UnsupportedTypeError, "xz"),
        (b"\x28\xb5\x2f\xfd", UnsupportedTypeError, r"zstd \(unzstd\)"),
        (b"PK\x03\x04", BadRequestError, "the body is no tar archive"),
        (b"a\0", BadRequestError, "the body is no tar archive"),
    ],
)
def test_what_is_no_plain_tar_is_refused(
    start: bytes, error: type[Exception], message: str, path: Path
) -> None:
    for length in (len(start), 5000):
        with pytest.raises(error, match=message):
            read(start.ljust(length, b"x"), path)


def test_one_volume_of_several_is_refused(path: Path) -> None:
    with pytest.raises(BadRequestError, match="one of several volumes"):
        read(with_members(member("a", b"M")), path)


def test_an_extended_header_is_bounded_and_belongs_to_a_member(path: Path) -> None:
    made = archive_of(("n" * (1 << 20), b"x"), format=tarfile.GNU_FORMAT)
    with pytest.raises(BadRequestError, match="an extended header is longer than 1048576 bytes"):
        read(made, path)
    made = archive_of((LONG, b"x"), format=tarfile.GNU_FORMAT)
    with pytest.raises(BadRequestError, match="ends after an extended header"):
        read(made[:1024] + bytes(1024), path)


@pytest.mark.parametrize(
    "records",
    [
        b"x", b"5", b"0 a=b\n", b"99 path=a\n", b"9 path=aa", b"9 size=-\n",
        b"9 size=\n", b"\xb2 path=a\n", b"8 patha\n", b"1" * 5000 + b" a=b\n",
    ],
)  # fmt: skip
def test_records_that_cannot_be_read_are_refused(records: bytes, path: Path) -> None:
    head = with_checksum(
        b"p".ljust(124, b"\0") + b"%011o\0" % len(records) + bytes(20) + b"x" + bytes(355)
    )
    assert len(head) == 512
    made = head + records + bytes(-len(records) % 512) + archive_of(("a", b"x"))
    with pytest.raises(BadRequestError, match=r"is damaged; (an extended header|.* is no length)"):
        read(made, path)


@pytest.mark.parametrize("size", [b"\xff" * 12, b"\x80" + b"\xff" * 11, b"7" * 12])
def test_a_length_beyond_the_body_ends_early(size: bytes, path: Path) -> None:
    made = archive_of(("a", b"x"))
    block = with_checksum(made[:124] + size + made[136:512])
    with pytest.raises(BadRequestError, match="ends early"):
        read(block + made[512:], path)


def test_a_length_may_be_binary_and_a_checksum_of_signed_bytes(path: Path) -> None:
    made = archive_of(("\xff\xfe", b"xy"), format=tarfile.USTAR_FORMAT)
    binary = with_checksum(made[:124] + b"\x80" + bytes(10) + b"\x02" + made[136:512])
    ((_, content, _),) = read(binary + made[512:], path)
    assert content == b"xy"
    total = sum(made[:148] + made[156:512]) + 256
    signed = total - 256 * sum(byte > 127 for byte in made[:512])
    block = made[:148] + b"%06o\0 " % signed + made[156:512]
    assert block != made[:512]
    assert read(block + made[512:], path)[0].content == b"xy"
