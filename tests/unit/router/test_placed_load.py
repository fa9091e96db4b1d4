"""What was placed counts until a load report can contain it."""

from __future__ import annotations

from services.router.placed_load import PlacedLoad, PlacementKey

A, B = PlacementKey((1, "a")), PlacementKey((1, "b"))


def test_counts_from_the_pick_until_the_first_report_after_the_lag() -> None:
    placed = PlacedLoad(report_lag_seconds=0.02)
    placed.place(A, 100, now=10.0)
    placed.place(B, 50, now=10.015)

    # This report may have been made before the requests came to the engine.
    placed.on_report(10.01, num_requests=9)
    assert placed.num_unseen_tokens == 150

    placed.on_report(10.03, num_requests=9)
    assert (placed.num_unseen_tokens, placed.num_unseen, placed.num_placed) == (50, 1, 2)


def test_start_takes_the_tokens_off_and_finish_the_request() -> None:
    placed = PlacedLoad(report_lag_seconds=0.02)
    placed.place(A, 100, now=10.0)

    placed.start(A)
    assert (placed.num_unseen_tokens, placed.num_placed) == (0, 1)

    placed.finish(A)
    assert (placed.num_unseen_tokens, placed.num_placed) == (0, 0)


def test_finish_without_start_takes_both_off() -> None:
    placed = PlacedLoad(report_lag_seconds=0.02)
    placed.place(A, 100, now=10.0)
    placed.place(B, 50, now=10.0)

    placed.finish(A)
    placed.finish(A)

    assert (placed.num_unseen_tokens, placed.num_unseen, placed.num_placed) == (50, 1, 1)


def test_a_report_that_tells_of_fewer_requests_than_were_placed_lacks_the_latest() -> None:
    placed = PlacedLoad(report_lag_seconds=0.02)
    for number in range(4):
        placed.place(PlacementKey((1, str(number))), 100, now=10.0)
    placed.start(PlacementKey((1, "0")))

    placed.on_report(20.0, num_requests=0)
    assert placed.num_unseen == 3
    placed.on_report(20.0, num_requests=2)
    assert (placed.num_unseen, placed.num_unseen_tokens) == (2, 200)
    # The same two again.
    placed.on_report(20.0, num_requests=2)
    assert placed.num_unseen == 2
    placed.finish(PlacementKey((1, "1")))
    placed.on_report(20.0, num_requests=3)
    assert (placed.num_unseen, placed.num_unseen_tokens) == (0, 0)
