"""Own images before any is opened: which files there are, with which labels, splits and groups."""

import csv
import re
from dataclasses import dataclass, field
from pathlib import Path

from . import UserError
from .images import list_images

SPLITS = ("train", "val", "test")


@dataclass
class Listing:
    """Image files and what is said of each.

    Args:
        root: Paths below it are the files' names.
        files: The files, F of them.
        labels: The class names of each file: one, or for multi-label any number.
        splits: The split of each file; "" where that is not said.
        classes: Names of all classes of the training split, in the order of the logits.
        multilabel: Whether a file can have several labels, or none.
        groups: The group of each file, where groups must not be parted.
        ignored: Files of the folder that are no images, by their endings.
    """

    root: Path
    files: list[Path]
    labels: list[list[str]]
    splits: list[str]
    classes: list[str]
    multilabel: bool = False
    groups: list[str] | None = None
    ignored: list[Path] = field(default_factory=list)


def sub_folders(root: Path) -> list[str]:
    """Names of the sub-folders, in order."""
    return sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def list_folder(folder: Path) -> Listing:
    """One sub-folder for each class, either directly or below `train/`, `val/` and `test/`.

    Raises:
        UserError: The folder mixes the two, or one of its splits is empty.
    """
    names = [name for name in SPLITS if (folder / name).is_dir()]
    other = [name for name in sub_folders(folder) if name not in names]
    if names and (other or "train" not in names):
        raise UserError(
            f"{folder} has {names} and beside them {other}: expected one sub-folder for each class, or train/ and, if "
            "you like, val/ and test/, each with the classes inside."
        )
    listing = Listing(folder, [], [], [], sub_folders(folder / "train" if names else folder))
    for name, root in [(name, folder / name) for name in names] or [("", folder)]:
        count = len(listing.files)
        for class_name in sub_folders(root):
            found, ignored = list_images(root / class_name)
            listing.files += found
            listing.ignored += ignored
            listing.labels += [[class_name]] * len(found)
            listing.splits += [name] * len(found)
        if len(listing.files) == count:
            raise UserError(f"{root} holds no image. Add some, or remove the folder to have the split cut from train.")
    return listing


def list_csv(path: Path) -> Listing:
    """A table with a column `file`, relative to the table, and labels in one of three forms: a column `label` with one
    name; a column `labels` with names between semicolons; or a column of 0 and 1 for each label. The columns `group`
    and `split` may be there.

    Raises:
        UserError: A column is missing, or a value is not what its column holds; names the line.
    """
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        rows, columns = list(reader), list(reader.fieldnames or [])
    marks = [name for name in columns if name not in ("file", "label", "labels", "group", "split")]
    forms = [name for name in ("label", "labels") if name in columns] + ["0 and 1"] * bool(marks)
    if "file" not in columns or len(forms) != 1:
        raise UserError(
            f"{path} has the columns {columns}: expected `file` and either `label`, or `labels` (names between "
            "semicolons), or one column of 0 and 1 for each label; `group` and `split` may be added."
        )
    listing = Listing(path.parent, [], [], [], marks, forms[0] != "label", [] if "group" in columns else None)
    for line, row in enumerate(rows, start=2):
        if wrong := [name for name in marks if row[name] not in ("0", "1")]:
            raise UserError(f"{path}, line {line}: {wrong[0]} is {row[wrong[0]]!r}, expected 0 or 1.")
        split = row.get("split") or ""
        if split not in ("", *SPLITS) or not row["file"]:
            raise UserError(f"{path}, line {line}: split {split!r} of {row['file']!r}, expected one of {SPLITS}.")
        text = row.get("labels") or row.get("label") or ""
        names = text.split(";") if forms[0] == "labels" else [text] if forms[0] == "label" else []
        listing.files.append(path.parent / row["file"])
        listing.labels.append([name.strip() for name in names if name.strip()] + [m for m in marks if row[m] == "1"])
        listing.splits.append(split)
        if listing.groups is not None:
            listing.groups.append(row["group"] or row["file"])  # without a group, a sample is one of its own
    if any(listing.splits):
        listing.splits = [split or "train" for split in listing.splits]
    if not marks:
        train = zip(listing.labels, listing.splits, strict=True)
        listing.classes = sorted({name for names, split in train if split in ("", "train") for name in names})
    return listing


def find_groups(listing: Listing, pattern: str) -> list[str]:
    """The group of each file: what the pattern, or the group in it, finds in its path below the data set's folder.

    Raises:
        UserError: It is no pattern, or finds nothing in a file's path.
    """
    try:
        found = [re.search(pattern, path.relative_to(listing.root).as_posix()) for path in listing.files]
    except re.error as error:
        raise UserError(f"data.group is {pattern!r}, which is no regular expression: {error}.") from error
    if missing := [path for path, match in zip(listing.files, found, strict=True) if not match]:
        raise UserError(f"data.group {pattern!r} finds no group in {len(missing)} files, the first is {missing[0]}.")
    return [match.group(match.re.groups and 1) for match in found if match]
