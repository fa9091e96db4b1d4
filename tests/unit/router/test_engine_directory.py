"""The directory: snapshots in parts, gaps, fencing, leases and what was placed where."""

from __future__ import annotations

import dataclasses

import pytest

from libs.errors import EngineLost
from services.router.engine_directory import EngineDirectory
from services.router.engine_events import SnapshotPart, WatchEvent, WatchTarget
from services.router.placed_load import PlacementKey
from services.router.policy.facts import EngineFacts, EngineId, EngineState
from services.router.prefix_index import BlockChanges, ResyncNeeded
from tests.unit.router.builders import chain, identity, load, snapshot, target

ENGINE = identity()
ENGINE_ID = ENGINE.engine_id
KEY = PlacementKey((1, "a"))


@pytest.fixture
def directory() -> EngineDirectory:
    return EngineDirectory(
        report_lag_seconds=0.02, load_stale_seconds=10.0, max_hashes_per_engine=1000, max_hashes=10_000
    )


def facts_of(directory: EngineDirectory, now: float = 0.0) -> EngineFacts:
    (facts,) = directory.facts(now)
    return facts


def stored(sequence_number: int, num_blocks: int = 4, incarnation: int = 1) -> WatchEvent:
    return WatchEvent(incarnation, sequence_number, BlockChanges((), chain(num_blocks), is_cleared=False))


def test_a_snapshot_in_parts_counts_when_the_last_part_has_come(directory: EngineDirectory) -> None:
    prompt = chain(4)

    directory.apply(target(), snapshot(ENGINE, sequence_number=7, hashes=prompt[:2], is_last=False), 0.0)
    assert not directory.is_watching(target())
    directory.apply(target(), WatchEvent(1, 7, SnapshotPart(None, prompt[2:], is_last=True)), 0.0)

    assert directory.is_watching(target())
    assert directory.index.num_matching_blocks(ENGINE_ID, prompt) == 4
    directory.apply(target(), stored(8), 0.0)


def test_changes_between_the_parts_of_a_snapshot_ask_for_a_new_one(directory: EngineDirectory) -> None:
    directory.apply(target(), snapshot(ENGINE, is_last=False), 0.0)

    with pytest.raises(ResyncNeeded):
        directory.apply(target(), stored(1), 0.0)


@pytest.mark.parametrize("sequence_number", [3, 4, 6])
def test_a_gap_or_a_duplicate_asks_for_a_new_snapshot(directory: EngineDirectory, sequence_number: int) -> None:
    """RTR-06."""
    directory.apply(target(), snapshot(ENGINE, sequence_number=4), 0.0)

    with pytest.raises(ResyncNeeded):
        directory.apply(target(), stored(sequence_number), 0.0)


def test_after_a_gap_the_cache_is_void_and_the_placed_still_count(directory: EngineDirectory) -> None:
    directory.apply(target(), snapshot(ENGINE, hashes=chain(4), engine_load=load(num_pending=5)), 0.0)
    directory.count_placed(ENGINE_ID, KEY, 100, 0.0)

    directory.suspend(target())

    facts = facts_of(directory)
    assert not facts.is_watched
    assert facts.load is None
    assert facts.num_placed_requests == 1
    assert directory.index.num_hashes == 0
    directory.apply(target(), snapshot(ENGINE, sequence_number=9), 0.0)
    assert facts_of(directory).num_placed_requests == 1


def test_after_a_break_the_placed_are_gone_too(directory: EngineDirectory) -> None:
    directory.apply(target(), snapshot(ENGINE, hashes=chain(4)), 0.0)
    directory.count_placed(ENGINE_ID, KEY, 100, 0.0)

    directory.lose(target())

    facts = facts_of(directory)
    assert (facts.is_watched, facts.num_placed_requests, facts.num_unseen_tokens) == (False, 0, 0)
    assert directory.index.num_hashes == 0
    # The gateway's word about the old placement comes late and changes nothing.
    directory.count_started(ENGINE_ID, KEY)
    directory.count_finished(ENGINE_ID, KEY)
    assert facts_of(directory).num_placed_requests == 0


def test_a_new_incarnation_on_the_same_watch_voids_cache_and_placed(directory: EngineDirectory) -> None:
    directory.apply(target(), snapshot(ENGINE, sequence_number=50, hashes=chain(4)), 0.0)
    directory.count_placed(ENGINE_ID, KEY, 100, 0.0)

    directory.apply(target(), snapshot(identity(incarnation=2)), 0.0)

    facts = facts_of(directory)
    assert facts.is_watched
    assert facts.identity.incarnation == 2
    assert facts.num_placed_requests == 0
    assert directory.index.num_hashes == 0
    directory.apply(target(), stored(1, incarnation=2), 0.0)


def test_a_change_of_another_incarnation_is_fenced(directory: EngineDirectory) -> None:
    directory.apply(target(), snapshot(identity(incarnation=2)), 0.0)

    with pytest.raises(ResyncNeeded):
        directory.apply(target(), stored(1, incarnation=1), 0.0)


def test_a_lease_of_a_later_incarnation_fences_the_watched_one(directory: EngineDirectory) -> None:
    directory.apply(target(), snapshot(ENGINE), 0.0)

    directory.set_lease(identity(incarnation=2, is_loaded=False))
    assert not facts_of(directory).is_current

    directory.apply(target(), snapshot(identity(incarnation=2)), 0.0)
    assert facts_of(directory).is_current


def test_two_addresses_cannot_both_be_one_engine(directory: EngineDirectory) -> None:
    first, second = WatchTarget("a:1", None), WatchTarget("b:1", None)
    directory.apply(first, snapshot(identity(incarnation=5)), 0.0)

    with pytest.raises(EngineLost):
        directory.apply(second, snapshot(identity(incarnation=5)), 0.0)
    directory.apply(second, snapshot(identity(incarnation=6)), 0.0)

    assert facts_of(directory).identity.address == "b:1"
    with pytest.raises(ResyncNeeded):
        directory.apply(first, stored(1, incarnation=5), 0.0)


def test_another_engine_at_a_leased_address_is_refused(directory: EngineDirectory) -> None:
    with pytest.raises(EngineLost):
        directory.apply(target("engine-0"), snapshot(identity("engine-1")), 0.0)


def test_another_engine_at_a_configured_address_replaces_the_first(directory: EngineDirectory) -> None:
    configured = WatchTarget("a:1", None)
    directory.expect(configured)
    directory.apply(configured, snapshot(identity("engine-0"), hashes=chain(4)), 0.0)
    directory.lose(configured)

    directory.apply(configured, snapshot(identity("engine-1")), 0.0)

    assert [status.identity.engine_id for status in directory.statuses()] == ["engine-1"]


def test_a_configured_address_may_serve_any_model_until_it_says_which(directory: EngineDirectory) -> None:
    configured = WatchTarget("a:1", None)
    directory.expect(configured)
    assert directory.may_serve("any")

    directory.apply(configured, snapshot(ENGINE), 0.0)

    assert not directory.may_serve("any")
    assert directory.may_serve(ENGINE.model_name)


def test_a_model_is_remembered_when_its_last_engine_is_forgotten_but_not_without_end(
    directory: EngineDirectory,
) -> None:
    directory.set_lease(ENGINE)
    directory.end_lease(ENGINE_ID)
    assert directory.may_serve(ENGINE.model_name)

    for number in range(1_024):
        directory.set_lease(dataclasses.replace(ENGINE, model_name=f"model-{number}"))

    assert not directory.may_serve(ENGINE.model_name)
    assert directory.may_serve("model-0")


def test_the_end_of_a_lease_frees_all_that_was_kept(directory: EngineDirectory) -> None:
    """RTR-06."""
    directory.set_lease(identity(is_loaded=False))
    directory.apply(target(), snapshot(ENGINE, hashes=chain(4)), 0.0)

    directory.end_lease(ENGINE_ID)

    assert directory.facts(0.0) == []
    assert directory.index.num_hashes == 0


def test_a_configured_engine_outlives_its_lease(directory: EngineDirectory) -> None:
    directory.set_lease(identity(incarnation=9, is_loaded=False))
    directory.apply(WatchTarget("engine-0:1", None), snapshot(identity(incarnation=9)), 0.0)

    directory.end_lease(ENGINE_ID)

    assert facts_of(directory).is_watched


def test_an_engine_that_becomes_ready_is_asked_who_it_is_now(directory: EngineDirectory) -> None:
    starting = load(state=EngineState.STARTING)
    directory.apply(target(), snapshot(identity(is_loaded=False), engine_load=starting), 0.0)

    with pytest.raises(ResyncNeeded):
        directory.apply(target(), WatchEvent(1, 1, load(state=EngineState.READY)), 0.0)


def test_an_old_load_report_is_unknown(directory: EngineDirectory) -> None:
    directory.apply(target(), snapshot(ENGINE, engine_load=load(num_pending=5)), 100.0)

    assert facts_of(directory, 109.0).load is not None
    assert facts_of(directory, 111.0).load is None


def test_expected_cached_tokens_leave_one_to_compute(directory: EngineDirectory) -> None:
    directory.apply(target(), snapshot(ENGINE, hashes=chain(4)), 0.0)
    facts = facts_of(directory)

    assert directory.num_cached_tokens(facts, chain(4), 64) == 63
    assert directory.num_cached_tokens(facts, chain(4), 70) == 64
    assert directory.num_cached_tokens(facts, chain(4, "other"), 70) == 0


def test_hashes_over_the_bound_are_counted_as_left_out() -> None:
    directory = EngineDirectory(
        report_lag_seconds=0.02, load_stale_seconds=10.0, max_hashes_per_engine=3, max_hashes=10_000
    )

    directory.apply(target(), snapshot(ENGINE, hashes=chain(5)), 0.0)

    assert directory.index.num_hashes == 3
    assert directory.index.num_left_out == 2


def test_the_address_is_where_the_watch_reached_the_engine(directory: EngineDirectory) -> None:
    told = dataclasses.replace(ENGINE, address="0.0.0.0:9")

    directory.apply(WatchTarget("host:9", None), snapshot(told), 0.0)

    assert facts_of(directory).identity.address == "host:9"
    assert facts_of(directory).engine_id == EngineId("engine-0")
