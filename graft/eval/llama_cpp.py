"""llama.cpp on the very same weights, by the prebuilt wheel `xllamacpp` (extra `race`): what a user
of a laptop has.

Its server runs in this process and gets the prompt as tokens. The times are its own: `predicted_ms`
runs from the first token, which the prompt's pass gives, to the last, as our decoding time does.
Weights in another precision than the file's are written once, beside it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from graft.core.errors import InputError
from graft.core.types import Generation, Request
from graft.decode.response import check_fits
from graft.targets import smollm2
from graft.targets.hf import HFTarget

WRITTEN = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # what GGUF calls them


def generate(
    request: Request,
    *,
    target: HFTarget,
    gguf: str,
    precision: str,
    context: int = 4096,
    lookup: Mapping[str, Any] | None = None,
    on_tokens: Callable[[list[int]], None] | None = None,
) -> Generation:
    """Decode one response at T = 0. `precision` is bfloat16, float16, float32 or the file's own.

    `lookup` drafts from where the last tokens stood before: {type: ngram_simple, size_n: 12, ...},
    as llama.cpp has it. It tells totals only, which are spread evenly over the rounds. Raises
    InputError without the wheel, for a damaged file, and where the request does not fit.
    """
    if request.temperature > 0:
        raise InputError("llama.cpp is raced at temperature=0 only")
    check_fits(request, target)
    if (needed := len(request.prompt) + request.max_new_tokens) > context:
        raise InputError(f"{needed} tokens are more than the context={context} of llama.cpp here")
    file = weights(Path(gguf), precision)
    server = _server(file, json.dumps(dict(lookup or {})), context, torch.get_num_threads())
    asked = {
        "prompt": list(request.prompt),
        "max_tokens": request.max_new_tokens,
        "temperature": 0,
        "cache_prompt": False,
        "ignore_eos": not request.stop_tokens,
        "return_tokens": True,
        "verbose": True,  # else it gives text alone
    }
    done = server.handle_completions(asked)["__verbose"]
    tokens, times = done["tokens"], done["timings"]
    if times["prompt_n"] != len(request.prompt):
        raise InputError(
            f"{file.name} reads the prompt as {times['prompt_n']} tokens: another GGUF"
        )
    if on_tokens is not None:
        on_tokens(tokens)
    decoded, accepted = len(tokens) - 1, times.get("draft_n_accepted", 0)
    rounds = decoded - accepted
    return Generation(
        tokens=tokens,
        stopped=tokens[-1] in request.stop_tokens,
        committed=_evenly(decoded, rounds),
        nodes=_evenly(times.get("draft_n", 0), rounds),
        seconds={"prefill": times["prompt_ms"] / 1e3, "verify": times["predicted_ms"] / 1e3},
    )


def versions() -> dict[str, str]:
    """Of the wheel, whose last number is llama.cpp's build, and what it was built for."""
    wheel = _wheel()
    words = wheel.get_system_info().replace(" = 1", "").replace("|", " ").split()
    built = " ".join([wheel.BUILD_INFO["compiler"], *words[words.index(":") + 1 :]])
    number = version("xllamacpp")
    return {"xllamacpp": number, "llama.cpp": f"b{number.rpartition('.')[2]}, {built}"}


def weights(gguf: Path, precision: str) -> Path:
    """The file in a precision, written on first use. Raises InputError.

    The default target's own file is fetched where it is missing.
    """
    if not gguf.exists():
        if gguf.name != smollm2.GGUF:
            raise InputError(f"{gguf} does not exist; give the target's GGUF: methods.<name>.gguf=")
        downloads = gguf.with_suffix(".download")
        downloads.mkdir(parents=True, exist_ok=True)
        smollm2.gguf_file(downloads).replace(gguf)
        shutil.rmtree(downloads)
    own = gguf.stem.rpartition(".")[2]
    if precision not in WRITTEN:
        if precision != own:
            raise InputError(f"precision must be {', '.join(WRITTEN)} or {own}, not {precision}")
        return gguf
    written = gguf.with_name(f"{gguf.name.removesuffix('.gguf')}.as-{WRITTEN[precision]}.gguf")
    if not written.exists():
        partial = written.with_suffix(".partial")
        rewrite(gguf, partial, WRITTEN[precision])
        partial.replace(written)
    return written


def rewrite(source: Path, out: Path, kind: str) -> None:
    """Dequantise all matrices of a GGUF and write them as F32, F16 or BF16; vectors stay F32."""
    import gguf

    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(out, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        array = field.types[0] == gguf.GGUFValueType.ARRAY
        value = field.contents()
        if name == "general.file_type":
            value = gguf.LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"].value
        writer.add_key_value(
            name, value, field.types[0], sub_type=field.types[-1] if array else None
        )
    for tensor in reader.tensors:
        plain = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        plain = plain.reshape([int(n) for n in reversed(tensor.shape)])
        as_kind = gguf.GGMLQuantizationType[kind if plain.ndim > 1 else "F32"]
        writer.add_tensor(tensor.name, gguf.quants.quantize(plain, as_kind), raw_dtype=as_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@cache
def _server(file: Path, lookup: str, context: int, threads: int) -> Any:
    wheel, settings = _wheel(), json.loads(lookup)
    params = wheel.CommonParams()
    params.model.path = str(file)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.n_ctx, params.n_parallel = context, 1
    params.cache_prompt, params.cache_ram_mib = False, 0
    params.load_mode = (
        wheel.llama_load_mode.LLAMA_LOAD_MODE_NONE
    )  # read whole, so nothing is paged in
    params.verbosity = -1
    if settings:
        _draft_with(settings, params.speculative, wheel.common_speculative_type)
    try:
        return wheel.Server(params)
    except RuntimeError as error:
        raise InputError(f"llama.cpp cannot load {file}: {error}") from error


def _draft_with(settings: dict[str, Any], speculative: Any, types: Any) -> None:
    try:
        kind = settings.pop("type")
        speculative.types = [getattr(types, f"COMMON_SPECULATIVE_TYPE_{kind.upper()}")]
        for key, value in settings.items():
            setattr(getattr(speculative, kind), key, value)
    except (KeyError, AttributeError, TypeError) as error:
        raise InputError(f"llama.cpp knows no such lookup: {error}") from error


def _wheel() -> Any:
    try:
        import xllamacpp
    except ImportError as error:
        raise InputError("the race needs llama.cpp: pip install '.[race]'") from error
    return xllamacpp


def _evenly(total: int, parts: int) -> list[int]:
    """[3, 3, 2] for 8 in 3."""
    return [(total * (i + 1)) // parts - (total * i) // parts for i in range(parts)]
