"""GRAFT: draft trees for speculative decoding with diffusion-LM drafters.

Folders are seams: `targets`, `drafters`, `trees` and `budgets` are the four parts that
`decode/loop.py` joins; `core/` holds the vocabulary they share. Imports run downwards only (see
`[tool.importlinter]` in pyproject.toml).
"""

__version__ = "0.1.0"
