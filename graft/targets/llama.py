"""Llama (SmolLM2, Llama 3.x): the plain decoder."""

from graft.targets.decoder import Family, swiglu

FAMILY = Family(feed_forward=swiglu)
