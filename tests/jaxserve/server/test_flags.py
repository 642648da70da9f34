"""Flags of the server that do not go together."""

import pytest

from jaxserve.errors import ConfigError
from jaxserve.server.core.limits import Limits
from jaxserve.server.flags import check_limits


def test_limits_that_go_together() -> None:
    check_limits(Limits(), has_http=True)
    check_limits(Limits(max_waiting_requests=5, max_http_connections=6), has_http=True)
    check_limits(Limits(max_waiting_requests=5, max_http_connections=5), has_http=False)


@pytest.mark.parametrize(
    ("limits", "error"),
    [
        (
            Limits(max_waiting_requests=5, max_http_connections=5),
            r"--max-http-connections is 5; it must be above 5 \(--max-waiting-requests\)",
        ),
        (
            Limits(max_body_bytes=2**20, max_input_bytes=2**21),
            r"--max-input-bytes is 2097152; it must be at least 16777216",
        ),
    ],
)
def test_limits_of_which_one_makes_another_useless(limits: Limits, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        check_limits(limits, has_http=True)
