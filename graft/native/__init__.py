"""Passes in C++ for a CPU: `kernels.cpp` is the passes, `build` compiles it once a machine, `calls`
hands it tensors. Where there is no compiler, or no place to keep what it makes, torch runs the same
passes, slower.
"""
