"""TDES, the target-distilled edge scorer: a child's score depends on its parent. `edges` are what
is scored, `terms` the learned parts of a score, `net` the whole of it, `losses` what it learns
from, `checkpoint` the scorer as decoding uses it. Pure torch: no target, no data, no Hydra.
"""
