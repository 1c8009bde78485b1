"""Compile kernels.cpp once for this machine and keep the library on disk.

Its name holds a digest of all it depends on (source, flags, compiler, processor), so a changed
source or another machine on the same disk makes another file, and an old one is never loaded. The
compiler is called directly: torch's extension loader would parse torch's headers for a source that
includes none (40 s instead of 5), and waits for ever on a lock that a killed build left behind.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import subprocess
import time
from pathlib import Path

from torch.utils.cpp_extension import get_cxx_compiler

SOURCE = Path(__file__).with_name("kernels.cpp")
SOURCES = sorted(path for path in SOURCE.parent.iterdir() if path.suffix in (".cpp", ".h"))
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-shared", "-fPIC")
FOLDER = Path(__file__).resolve().parents[2] / ".cache"  # or $GRAFT_CACHE
TIMEOUT = 300  # seconds

log = logging.getLogger(__name__)


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, made now if need be; None, and one line that says why, without them."""
    folder = Path(os.environ.get("GRAFT_CACHE") or FOLDER)
    try:
        return _load(folder)
    except (OSError, subprocess.SubprocessError) as error:
        log.warning(
            "passes run through torch, which is slower: the kernels cannot be compiled (%s)",
            _reason(error),
        )
        return None


def _load(folder: Path) -> ctypes.CDLL:
    compiler = get_cxx_compiler()
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, check=True, timeout=TIMEOUT
    ).stdout
    facts = [*(path.read_text() for path in SOURCES), *FLAGS, version, _processor()]
    key = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
    made = folder / f"kernels-{key}.so"
    if (library := _open(made)) is not None:
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"kernels-{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two processes one compiles; ends with its holder
        if (library := _open(made)) is None:
            _compile(compiler, made)
            library = ctypes.CDLL(str(made))
    return library


def _open(made: Path) -> ctypes.CDLL | None:
    """The library, None where there is none or a damaged one."""
    try:
        return ctypes.CDLL(str(made)) if made.exists() else None
    except OSError:
        return None


def _compile(compiler: str, made: Path) -> None:
    log.info("compiling the kernels for this machine (once)")
    start = time.perf_counter()
    partial = made.with_suffix(f".{os.getpid()}.partial")
    try:
        subprocess.run(
            [compiler, *FLAGS, str(SOURCE), "-o", str(partial)],
            capture_output=True,
            text=True,
            check=True,
            timeout=TIMEOUT,
        )
        partial.replace(made)
    finally:
        partial.unlink(missing_ok=True)
    log.info("compiled in %.0f s: %s", time.perf_counter() - start, made)


def _processor() -> str:
    """What -march=native looks at."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    told = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.split("\t")[0].strip() in told}))


def _reason(error: BaseException) -> str:
    if isinstance(error, FileNotFoundError) and error.filename:
        return f"{error.filename} is not there"
    if isinstance(error, subprocess.CalledProcessError):
        lines = [line for line in (error.stderr or "").splitlines() if "error" in line]
        return (lines or [f"the compiler exits with {error.returncode}"])[0].strip()
    return str(error)
