"""Reads tables of images: CSV files with the names of columns in the first line. No torch."""

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

from inferpool.models.errors import DataError

COLUMNS = ("path", "label")
"""Columns of a table of labelled images."""
IMAGE_SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"))
"""Ends of the names of images in folders that are labels."""


def rows_of(table: Path, columns: Sequence[str] = COLUMNS) -> Iterator[tuple[int, Sequence[str]]]:
    """Yield the line of each row, and its values in these columns.

    Raises:
        DataError: The table cannot be read, or lacks a column.
    """
    try:
        # Paths need not be UTF-8.
        with table.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            reader = csv.reader(file, strict=True)
            header = [each.strip() for each in next(reader, [])]
            if missing := [each for each in columns if each not in header]:
                raise DataError(
                    f"{table}: its first line must name the columns {' and '.join(columns)}; it "
                    f"lacks {' and '.join(missing)}"
                )
            places = [header.index(each) for each in columns]
            for row in reader:
                if not row:
                    continue
                if len(row) <= max(places):
                    raise DataError(f"{table}, line {reader.line_num}: it lacks a column")
                yield reader.line_num, [row[place] for place in places]
    except csv.Error as error:
        raise DataError(f"{table}, line {reader.line_num}: {error}") from error
    except OSError as error:
        raise DataError(f"{table} cannot be read: {error.strerror or error}") from error
