"""The one exception that means "the input is wrong, and here is what to do about it".

Scripts turn it into one line on stderr and exit code 2. Anything else that escapes is a bug of ours
and keeps its traceback.
"""


class InputError(ValueError):
    """Bad input (a config value, a file, a checkpoint); the message says which and what to do."""
