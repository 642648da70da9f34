"""LanePlan: the order of a step's chunks."""

from jaxserve.engine.plan import LanePlan


def test_single_tokens_come_first_and_take_their_columns_along() -> None:
    plan = LanePlan(
        sequences=[7, 8, 9, 10],
        rows=[3, 0, 2, 1],
        starts=[0, 5, 10, 20],
        sizes=[3, 1, 2, 1],
        samples=[0, 1, 1, 1],
        tokens=[11, 12, 13, -1, 14, 15, -1],
        targets=[12, 13, 99, 0, 15, 0, 0],
        fresh=[(0, 3, 0, 5)],
    )
    plan.put_single_tokens_first()
    assert plan == LanePlan(
        sequences=[8, 10, 7, 9],
        rows=[0, 1, 3, 2],
        starts=[5, 20, 0, 10],
        sizes=[1, 1, 3, 2],
        samples=[1, 1, 0, 1],
        tokens=[-1, -1, 11, 12, 13, 14, 15],
        targets=[0, 0, 12, 13, 99, 15, 0],
        fresh=[(0, 3, 0, 5)],
    )


def test_what_is_in_order_stays() -> None:
    plan = LanePlan(
        sequences=[1, 2],
        rows=[0, 1],
        starts=[4, 0],
        sizes=[1, 2],
        samples=[1, 1],
        tokens=[-1, 5, 6],
    )
    rows = plan.rows
    plan.put_single_tokens_first()
    assert plan.rows is rows and plan.tokens == [-1, 5, 6]
