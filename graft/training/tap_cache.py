"""Taps of the training texts, kept after their first visit.

On a CPU reading a text with the target costs as much as training on it, and every later visit would
read the same again. The file is unlinked as soon as it is open: it goes with the process, and a
resumed run fills a new one. Its room is claimed at once: a disk that fills up later would kill the
process without a word.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from graft.core.errors import InputError


class TapCache:
    """bf16 taps [L_i, width] by text number, in one memory-mapped file on disk."""

    def __init__(self, folder: Path, lengths: Sequence[int], width: int) -> None:
        self._ends = np.cumsum([0, *lengths])
        self._known = np.zeros(len(lengths), bool)
        size = int(self._ends[-1]) * width * 2
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                os.posix_fallocate(file.fileno(), 0, size)
                self._rows = np.memmap(file, np.int16, "r+", shape=(int(self._ends[-1]), width))
        except OSError as error:
            raise InputError(
                f"model.tap_cache={folder} has no room for {size / 1e9:.1f} GB of taps "
                f"({error.strerror}); choose another folder, or null to read every text anew"
            ) from error

    def get(self, index: int) -> torch.Tensor | None:
        """The taps of a text, None before they were put."""
        if not self._known[index]:
            return None
        rows = self._rows[self._ends[index] : self._ends[index + 1]]
        return torch.from_numpy(np.array(rows)).view(torch.bfloat16)

    def put(self, index: int, taps: torch.Tensor) -> None:
        """Keep taps [L, width]."""
        rows = taps.to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy()
        self._rows[self._ends[index] : self._ends[index + 1]] = rows
        self._known[index] = True
