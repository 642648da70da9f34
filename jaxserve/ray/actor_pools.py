"""Pools of Ray Data actors that work on several batches at a time."""

from ray.data import ActorPoolStrategy


def actor_pool(replicas: int, batches_in_flight: int) -> ActorPoolStrategy:
    """Return a pool of a fixed size, whose actors have as many batches in line as in work."""
    return ActorPoolStrategy(
        size=replicas,
        max_concurrent_calls_per_actor=batches_in_flight,
        max_tasks_in_flight_per_actor=2 * batches_in_flight,
    )
