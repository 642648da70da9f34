"""Errors about the value of a flag, all of one form; no jax."""

from jaxserve.errors import ConfigError


def flag_text(flag: str, value: object, problem: str) -> str:
    """Return one clause about the value of a flag: `--max-batch is 0; it must be at least 1`.

    All texts of errors about a flag's value are made here. The value of a switch is "given".

    Args:
        flag: Name of the flag, such as `--max-batch`.
        value: What was asked for.
        problem: Clause that says what is wrong, with the limit or the knob.
    """
    shown = f"{value:g}" if isinstance(value, float) else str(value)
    if shown.split() != [shown]:  # nothing, or spaces, could not be seen without quotes
        shown = repr(shown)
    return f"{flag} is {shown}; {problem}"


def flag_error(flag: str, value: object, problem: str) -> ConfigError:
    """Return the error of a flag's value. Arguments are as in `flag_text`."""
    return ConfigError(flag_text(flag, value, problem))
