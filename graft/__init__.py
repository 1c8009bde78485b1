"""GRAFT: draft trees for speculative decoding with diffusion-LM drafters.

    from graft import load
    for piece in load("smollm2").stream("Why is the sky blue?"):
        print(piece, end="", flush=True)

Folders are seams: `targets`, `drafters`, `trees` and `budgets` are the four parts that
`decode/loop.py` joins; `core/` holds the vocabulary they share, and `engine.py` is the front door.
Imports run downwards only (see `[tool.importlinter]` in pyproject.toml).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["Engine", "__version__", "load"]

if TYPE_CHECKING:
    from graft.engine import Engine, load
else:

    def __getattr__(name: str) -> object:
        """The engine on demand: it imports transformers, which takes seconds."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from graft import engine

        return getattr(engine, name)
