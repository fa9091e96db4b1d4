"""Slots at the gateway, and what a drain does to those inside."""

from __future__ import annotations

import asyncio

import pytest

from libs.errors import Draining, Overloaded
from services.gateway.admission import Admission, draining_error


async def test_more_than_the_bound_is_refused_with_a_time_to_come_back() -> None:
    admission = Admission(max_requests=1)

    with admission.admit(), pytest.raises(Overloaded) as caught, admission.admit():
        pass
    with admission.admit():
        pass

    assert caught.value.retry_after_seconds is not None


async def test_every_prompt_of_a_request_takes_a_place() -> None:
    admission = Admission(max_requests=3)

    with admission.admit() as slot:
        slot.grow(1)
        with admission.admit() as other:
            with pytest.raises(Overloaded):
                other.grow(1)
            with pytest.raises(Overloaded), admission.admit():
                pass
    with admission.admit() as slot:
        slot.grow(2)

    assert await admission.wait_empty(0.0)


async def test_a_drain_refuses_new_requests_and_waits_for_those_inside() -> None:
    admission = Admission(max_requests=2)
    leave = asyncio.Event()

    async def serve() -> None:
        with admission.admit():
            await leave.wait()

    inside = asyncio.create_task(serve())
    await asyncio.sleep(0)
    admission.start_draining()

    with pytest.raises(Draining), admission.admit():
        pass
    assert not await admission.wait_empty(0.01)
    leave.set()
    assert await admission.wait_empty(5.0)
    await inside


async def test_an_interruption_becomes_its_error_and_the_task_goes_on() -> None:
    admission = Admission(max_requests=1)

    async def serve() -> str:
        with admission.admit() as slot:
            try:
                with slot.interruptible():
                    await asyncio.Event().wait()
            except Draining:
                await asyncio.sleep(0)
                return "told the client"
        return "not interrupted"

    inside = asyncio.create_task(serve())
    await asyncio.sleep(0)

    assert admission.interrupt_all(draining_error()) == 1
    assert await inside == "told the client"


async def test_a_client_that_leaves_is_no_interruption() -> None:
    admission = Admission(max_requests=1)

    async def serve() -> None:
        with admission.admit() as slot, slot.interruptible():
            await asyncio.Event().wait()

    inside = asyncio.create_task(serve())
    await asyncio.sleep(0)
    inside.cancel()

    with pytest.raises(asyncio.CancelledError):
        await inside


async def test_a_client_that_leaves_while_being_interrupted_has_left() -> None:
    admission = Admission(max_requests=1)

    async def serve() -> None:
        with admission.admit() as slot, slot.interruptible():
            await asyncio.Event().wait()

    inside = asyncio.create_task(serve())
    await asyncio.sleep(0)
    admission.interrupt_all(draining_error())
    inside.cancel()

    with pytest.raises(asyncio.CancelledError):
        await inside
