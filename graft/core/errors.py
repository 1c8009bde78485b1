"""Bad input, and running out of memory.

`InputError` means "the input is wrong, and here is what to do about it": scripts turn it into one
line on stderr and exit code 2. Anything else that escapes is a bug of ours and keeps its traceback.
"""

import torch


class InputError(ValueError):
    """Bad input (a config value, a file, a checkpoint); the message says which and what to do."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host had no memory left; torch's CPU allocator just says so."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
