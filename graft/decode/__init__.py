"""Decoding over the seams: `loop` (the loop), `autoregressive` (baseline and oracle), `sampling`
(the token draw), `batched` (many answers at once), `replay` (finished answers, without the target).
"""
