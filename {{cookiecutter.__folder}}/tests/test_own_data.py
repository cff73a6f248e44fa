"""Own images from a messy folder, and from a CSV with several labels, through the command line to a prediction."""

import csv
import io
import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

Command = Callable[..., str]


def picture(path: Path, seed: int, mode: str = "RGB", **options) -> Path:
    """A smooth picture of 48x40 pixels, another one for each seed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    cells = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), np.uint8)
    Image.fromarray(cells).resize((48, 40), Image.Resampling.BICUBIC).convert(mode).save(path, **options)
    return path


def png_header(width: int, height: int) -> bytes:
    """The start of a PNG file, up to where its pixels would begin."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunk = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    return b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 1000) + b"IDAT"


@pytest.fixture
def messy(tmp_path: Path) -> Path:
    """80 sound pictures below train/ and val/, and thirty faults among them."""
    root = tmp_path / "photos"
    for split, count in (("train", 30), ("val", 10)):
        for name in ("cat", "dog"):
            for index in range(count):
                picture(root / split / name / f"{index:03}.png", 100 * (name == "dog") + 50 * (split == "val") + index)
    whole = picture(tmp_path / "whole.jpg", 999).read_bytes()
    for index in range(4):
        (root / "train" / "cat" / f"cut{index}.jpg").write_bytes(whole[: 400 + 100 * index])
    for index in range(3):
        (root / "train" / "dog" / f"empty{index}.png").touch()
        (root / "val" / "cat" / f"text{index}.jpg").write_text("no image")
        Image.new("RGB", (1 + index, 50)).save(root / "val" / "dog" / f"tiny{index}.png")
        picture(root / "val" / "dog" / f"again{index}.bmp", 100 + index)  # of train, in another format
    for index in range(2):
        (root / "train" / "cat" / f"link{index}.png").symlink_to(root / "gone.png")
        (root / "train" / "dog" / f"bomb{index}.png").write_bytes(png_header(12_000, 9_000 + 20_000 * index))
        Image.fromarray(np.full((20, 20), 3, np.float32)).save(root / "val" / "cat" / f"float{index}.tiff")
    (root / "train" / "dog" / "header.png").write_bytes(png_header(64, 64))
    for index in range(6):
        copy = root / "train" / "cat" / f"{index:03}.png"
        (root / "val" / ("cat" if index % 2 else "dog") / f"copy{index}.png").write_bytes(copy.read_bytes())
    (root / "val" / "fox").mkdir()
    picture(root / "val" / "fox" / "x.png", 998)
    return root


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_thirty_mixed_faults_end_in_one_report(messy: Path, command: Command) -> None:
    with pytest.raises(SystemExit) as stop:
        command("check", "--data.source", str(messy), "--data.batch_size", "8")
    report = str(stop.value)
    bad = [path for path in messy.rglob("*.*") if not path.stem.isdigit() and path.stem != "x"]
    unnamed = [path.name for path in bad if path.relative_to(messy).as_posix() not in report]
    assert (report.splitlines()[0], len(bad), unnamed) == ("error: 30 to put right before training:", 29, [])
    assert "val has the classes ['fox'], which train lacks" in report


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_clean_neighbours_of_the_faults_pass(messy: Path, command: Command) -> None:
    for path in messy.rglob("*.*"):
        if not path.stem.isdigit():
            path.unlink()
    (messy / "val" / "fox").rmdir()
    output = command("check", "--data.source", str(messy), "--data.batch_size", "8", "--data.image_size", "16")
    assert "  80 files, 80 usable" in output and "warning" not in output


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """60 pictures: some bright, some red, some both, some neither; a patient has three of them."""
    rows = ["file,bright,red,group"]
    for index in range(60):
        bright, red = index % 2, index // 2 % 2
        base = np.array([90 + 100 * bright + 50 * red, 90 + 100 * bright - 60 * red, 90 + 100 * bright - 60 * red])
        noise = np.random.default_rng(index).integers(-9, 10, (20, 20, 3))
        (tmp_path / "photos").mkdir(exist_ok=True)
        Image.fromarray((base + noise).clip(0, 255).astype(np.uint8)).save(tmp_path / "photos" / f"{index:02}.png")
        rows.append(f"photos/{index:02}.png,{bright},{red},patient {index // 3}")
    (tmp_path / "labels.csv").write_text("\n".join(rows))
    return tmp_path / "labels.csv"


def test_several_labels_go_through_to_registry_and_prediction(table: Path, project: Path, command: Command) -> None:
    before = set((project / "runs").glob("*"))
    options = ["--data.image_size", "16", "--data.batch_size", "8", "--model.width", "8", "--trainer.max_epochs", "6"]
    options += ["--trainer.log_every_n_steps", "1"]
    output = command("fit", "--data.source", str(table), *options, "--registry.model_name", "several")
    (folder,) = set((project / "runs").glob("20*")) - before
    contract = json.loads((folder / "export" / "contract.json").read_text())
    assert (contract["task"], contract["classes"], contract["output"]["activation"]) == (
        "multilabel",
        ["bright", "red"],
        "sigmoid",
    )
    assert "registered" in output and json.loads((folder / "metrics.json").read_text())["val_f1"] > 0.9
    command("predict", str(table.parent / "photos"), "--ckpt_path", str(folder / "checkpoints" / "best.ckpt"))
    rows = list(csv.reader(io.StringIO((folder / "predictions-photos.csv").read_text())))
    right = [
        row[1] == ";".join(["bright"] * (index % 2) + ["red"] * (index // 2 % 2)) for index, row in enumerate(rows[1:])
    ]
    assert (rows[0], len(rows), sum(right) >= 54) == (["file", "labels", "bright", "red"], 61, True)


def test_groups_of_a_table_stay_together(table: Path, project: Path, command: Command) -> None:
    output = command("check", "--data.source", str(table), "--data.batch_size", "8", "--data.image_size", "16")
    assert "60 files, 60 usable" in output and "put right" not in output
