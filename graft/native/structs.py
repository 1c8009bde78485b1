"""The structs of kernels.cpp, field by field in its order; what each holds is said there."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_double, c_int64, c_void_p
from typing import ClassVar


class Linear(Structure):
    _fields_: ClassVar = [
        *(("weight", c_void_p), ("bias", c_void_p)),
        *(("outputs", c_int64), ("inputs", c_int64)),
    ]


class Layer(Structure):
    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("attention_norm", "q_norm", "k_norm", "feed_forward_norm")),
        *((name, Linear) for name in ("qkv", "output", "gate_up", "down")),
    ]


SIZES = ("is_bf16", "layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate")


class Model(Structure):
    _fields_: ClassVar = [
        *((name, c_int64) for name in SIZES),
        ("eps", c_double),
        ("layer", POINTER(Layer)),
        *(("embedding", c_void_p), ("final_norm", c_void_p)),
        ("head", Linear),
        *(("cos", c_void_p), ("sin", c_void_p)),
    ]


class Slot(Structure):
    _fields_: ClassVar = [
        ("cache", c_void_p),
        *((name, c_int64) for name in ("capacity", "length", "rows")),
        ("visible", c_void_p),
    ]


class Rows(Structure):
    _fields_: ClassVar = [
        *(("count", c_int64), ("num_slots", c_int64)),
        *(("tokens", c_void_p), ("positions", c_void_p)),
        ("slots", POINTER(Slot)),
    ]


class Wanted(Structure):
    _fields_: ClassVar = [
        *(("first_row", c_int64), ("num_taps", c_int64)),
        *((name, c_void_p) for name in ("tapped", "logits", "taps", "best")),
    ]


class Drafting(Structure):
    _fields_: ClassVar = [
        ("fc", Linear),
        *(("hidden_norm", c_void_p), ("taps", c_void_p)),
        *(("new_taps", c_int64), ("candidates", c_int64)),
        *((name, c_void_p) for name in ("hidden", "tokens", "log_probs", "cosines")),
    ]


class Scorer(Structure):
    _fields_: ClassVar = [
        ("gate_state", Linear),
        *((name, c_void_p) for name in ("depth", "none", "temperature", "rest", "offset")),
        *((name, c_void_p) for name in ("parent", "child", "grandparent")),
        *((name, c_int64) for name in ("D", "K", "width", "hidden")),
        ("shrink", c_double),
    ]


class Scored(Structure):
    _fields_: ClassVar = [
        *((name, c_int64) for name in ("root", "hidden_is_bf16", "stride")),
        *((name, c_void_p) for name in ("tokens", "log_probs", "hidden", "rows")),
    ]
