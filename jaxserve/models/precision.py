"""Names of precisions and products, as --dtype, --weights and --product take them; no jax."""

from typing import Final

from jaxserve.errors import ModelError
from jaxserve.flag_errors import flag_error, flag_text

AS_STORED: Final = "auto"
DTYPE_NAMES: Final = ("float32", "bfloat16")
# The keys of jaxserve.models.quant.SCHEMES, which needs jax.
FORMS: Final = (
    *("int8", "fp8", "int4", "int4-g32", "int4-g64", "int4-g128"),
    *("w8a8-int8", "w8a8-fp8"),
)
HEAD: Final = "+head"
AUTO: Final = "auto"  # the product that is fastest here
XLA: Final = "xla"  # the product of weights that lie as they are declared
# The last are the instructions that the kernel of jaxserve.cpu_kernels is compiled for.
PRODUCTS: Final = (AUTO, XLA, "avx512", "avx2")


def check_dtype(asked: str) -> None:
    """Raise ModelError unless --dtype takes this name."""
    if asked not in (AS_STORED, *DTYPE_NAMES):
        choices = f"choose {AS_STORED}, {' or '.join(DTYPE_NAMES)}"
        raise ModelError(flag_text("--dtype", asked, choices))


def check_form(asked: str) -> None:
    """Raise ModelError unless --weights takes this name."""
    if asked != AS_STORED and asked.removesuffix(HEAD) not in FORMS:
        choices = f"choose {AS_STORED}, {', '.join(FORMS)} ({HEAD} behind it: the head as well)"
        raise ModelError(flag_text("--weights", asked, choices))


def check_product(asked: str) -> None:
    """Raise ConfigError unless --product takes this name."""
    if asked not in PRODUCTS:
        choices = f"choose {', '.join(PRODUCTS[:-1])} or {PRODUCTS[-1]}"
        raise flag_error("--product", asked, choices)
