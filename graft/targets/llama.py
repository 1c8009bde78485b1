"""Llama (SmolLM2, Llama 3.x): the plain decoder."""

from graft.targets.decoder import SwiGLU
from graft.targets.family import Family

FAMILY = Family(feed_forward=SwiGLU)
