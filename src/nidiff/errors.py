"""The one exception nidiff raises for input it cannot use."""


class InputError(ValueError):
    """Bad input: the message is one sentence that names the argument and the remedy.

    The command line prints it without a traceback and exits with 2. Any other exception is a bug of ours.
    """


def one_of(name: str, value: object, known: object) -> str:
    """``value`` if it is one of the ``known`` names, else an `InputError` that lists them."""
    names = sorted(known)  # type: ignore[call-overload]
    if value not in names:
        raise InputError(f"{name}={value!r} is unknown: use one of {', '.join(map(repr, names))}.")
    return str(value)
