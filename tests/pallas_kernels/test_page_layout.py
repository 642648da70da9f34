"""Layout of pages: the bits of what they hold, and pages that keep K alone."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.pallas_kernels.errors import KernelError
from jaxserve.pallas_kernels.paged_attention import reference
from jaxserve.pallas_kernels.paged_attention.api import Layout, Pages


@pytest.mark.parametrize(
    ("dtype", "value_dim", "bits", "token"),
    [
        (jnp.float32, None, 32, 2 * 3 * 10 * 4),
        (jnp.bfloat16, None, 16, 2 * 3 * 10 * 2),
        (jnp.int8, None, 8, 2 * 3 * (10 + 4)),
        (jnp.int4, None, 4, 2 * 3 * 5),
        (jnp.bfloat16, 0, 16, 3 * 10 * 2),
        (jnp.float8_e4m3fn, 0, 8, 3 * (10 + 4)),
    ],
)
def test_bytes_of_a_token(dtype: type, value_dim: int | None, bits: int, token: int) -> None:
    layout = Layout(3, 10, 16, jnp.dtype(dtype), value_dim)
    assert (layout.bits, layout.token_bytes) == (bits, token)


def test_pages_of_k_alone_are_written_and_read() -> None:
    layout = Layout(2, 8, 4, jnp.dtype(jnp.float32), value_dim=0)
    pages = reference.allocate(3, layout)
    assert pages.v is None and not layout.keeps_values
    keys = jnp.arange(2 * 4 * 2 * 8, dtype=jnp.float32).reshape(2, 4, 2, 8)
    written = reference.write_back(pages, jnp.array([2, 0]), Pages(keys), layout)
    read = reference.read(written, jnp.array([0, 2]), layout)
    assert read.v is None
    np.testing.assert_array_equal(read.k, keys[::-1])


@pytest.mark.parametrize(("kv_heads", "value_dim"), [(2, 4), (1, 9), (1, -1)])
def test_a_value_that_is_no_part_of_one_key_is_refused(kv_heads: int, value_dim: int) -> None:
    with pytest.raises(KernelError, match="latent pages have one head"):
        Layout(kv_heads, 8, 4, jnp.dtype(jnp.float32), value_dim)
