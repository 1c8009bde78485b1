"""Propose D positions in one pass: `dflash` (with its network and its checkpoint format), `noisy`
for tests.
"""
