"""The LLM that must be reproduced: `hf` loads and serves it, `decoder` is its forward pass, one
file per family.

A family file is named after the `model_type` of the checkpoints it covers and holds one `FAMILY`;
that name is how `hf.load` finds it.
"""
