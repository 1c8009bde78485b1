"""Decoding over the seams: `loop` (the loop), `autoregressive` (baseline and oracle), `sampling`
(the token draw).
"""
