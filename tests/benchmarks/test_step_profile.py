"""How events of a profile add up to the times of a step."""

from benchmarks.step_profile import Event, Kernel, _summary


def test_overlapping_kernels_are_busy_once_and_gaps_are_not() -> None:
    events = [
        Event("gemm.1", 0, 4000),
        Event("gemm.2", 2000, 6000),  # beside the first
        Event("norm", 8000, 10_000),  # after a gap
        Event("norm_3", 8500, 9000),  # within the one before
    ]
    found = _summary(events, repeats=2)
    assert found.wall == 5.0
    assert found.busy == 4.0
    assert found.kernels == [Kernel("gemm", 1.0, 4.0), Kernel("norm", 1.0, 1.25)]
