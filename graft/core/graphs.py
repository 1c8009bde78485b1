"""Static-shape programs, captured as CUDA graphs on a GPU: a pass is then one launch instead of
hundreds.

A program reads tensors that stay where they are, its `Inputs` among them, and returns tensors. All
that changes from pass to pass must come through those: what else it looks at is what it was at
capture. Without CUDA the same program runs as it is, so that tests compare it on a CPU.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Hashable
from contextlib import contextmanager
from typing import Any

import torch

log = logging.getLogger(__name__)

Program = Callable[[], tuple[torch.Tensor, ...]]  # run twice, it must give the same twice
SMALLEST = 512  # cache rows; masked ones cost little beside the weights, and every size a capture


def context_bucket(rows: int) -> int:
    """The cache rows that a program for `rows` of them attends over: a power of two."""
    return max(SMALLEST, 1 << (rows - 1).bit_length())


class Inputs:
    """What changes from pass to pass, as int32 words: written on the host, one copy to the device.

    The next pass may write `words` once something of this pass has come back to the host.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.words = self._host.numpy()  # [size]
        self.tensor = torch.zeros(size, dtype=torch.int32, device=device)  # what programs read

    def send(self) -> None:
        """Bring `words` to the device."""
        self.tensor.copy_(self._host, non_blocking=True)


class Graphs:
    """Programs by key, each captured when it first runs and replayed from then on.

    They share one pool of memory, so outputs hold until the next program runs: clone what must
    last. With `compile` the inductor makes fewer and larger kernels of a program before.
    """

    def __init__(self, device: torch.device, *, compile: bool = False) -> None:
        self._device, self._compile = device, compile
        self._ready: dict[Hashable, Program] = {}
        self._buffer: torch.Tensor | None = None
        self._pool: Any = None
        self.refused = False  # something cannot be captured: programs run as they are

    def over(self, buffer: torch.Tensor) -> None:
        """Forget the programs that knew another buffer: a graph reads and writes addresses."""
        if buffer is not self._buffer:
            self._ready.clear()
            self._pool = None  # one that no graph uses any more is gone
            self._buffer = buffer

    def run(self, key: Hashable, program: Program) -> tuple[torch.Tensor, ...]:
        """The program's outputs; `program` is looked at if nothing has run under `key` yet."""
        if key not in self._ready:
            self._ready[key] = self._prepare(program)
        return self._ready[key]()

    def _prepare(self, program: Program) -> Program:
        if self._compile:
            # one code object, a compilation a shape: beyond the limit it would run uncompiled
            torch._dynamo.config.recompile_limit = 256
            program = torch.compile(program, dynamic=False)
        if self._device.type != "cuda" or self.refused:
            return program
        try:
            # The outer stream comes back too where a capture fails, which leaves its own set.
            with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.current_stream()):
                return self._capture(program)
        except RuntimeError as error:  # torch's, CUDA's, and out of memory
            reason = str(error).strip().splitlines()[0]
            log.warning("passes are not captured as CUDA graphs, which is slower: %s", reason)
            self.refused = True
            self._ready.clear()
            return program

    def _capture(self, program: Program) -> Program:
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            program()  # allocates workspaces, picks and compiles kernels
            with _refusing_to_wait():
                program()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # What other threads ask of CUDA meanwhile is no reason to fail.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = program()
        self._pool = graph.pool()

        def replay() -> tuple[torch.Tensor, ...]:
            graph.replay()
            return outputs

        return replay


@contextmanager
def _refusing_to_wait():
    """Raise where the host waits for the device: before a capture, which that would break."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it calls itself a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
