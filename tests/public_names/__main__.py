"""Prints the listing, for tests/golden/public_names.json."""

import jax

from tests.public_names import public_names, written

jax.config.update("jax_platforms", "cpu")
print(written(public_names()), end="")
