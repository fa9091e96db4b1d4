"""Calls to workers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from grpc_health.v1 import health_pb2, health_pb2_grpc

from libs.errors import WorkerLost
from libs.protogen.worker.v1 import worker_pb2, worker_pb2_grpc
from libs.rpc import RpcStream, make_channel, open_stream, unary
from services.engine import wire
from services.engine.config import EngineConfig
from services.engine.core.scheduler_output import SchedulerOutput, StepResult
from services.engine.identity import LoadedModel

# A worker answers within milliseconds; one that is stopped, or has lost its machine, does not.
_CHECK_SECONDS = 3.0


class StepStream:
    """An open stream of steps to one worker."""

    def __init__(self, stream: RpcStream[worker_pb2.ExecuteStepsRequest, worker_pb2.ExecuteStepsResponse]) -> None:
        self._stream = stream

    async def send(self, output: SchedulerOutput) -> None:
        """Send a step; raises WorkerLost."""
        await self._stream.send(wire.step_message(output))

    async def send_empty(self) -> None:
        """Send a step that computes nothing; raises WorkerLost."""
        await self._stream.send(wire.empty_step_message())

    async def __aiter__(self) -> AsyncIterator[StepResult]:
        async for message in self._stream:
            yield wire.step_result_of(message)


class WorkerClient:
    """One worker."""

    def __init__(self, config: EngineConfig, rank: int) -> None:
        self._config = config
        self._rank = rank
        self._channel = make_channel(config.worker_addresses[rank])
        self._stub = worker_pb2_grpc.WorkerServiceStub(self._channel)

    async def check(self) -> None:
        """Return when the worker answers; raises WorkerLost when it does not within some seconds."""
        await unary(
            health_pb2_grpc.HealthStub(self._channel).Check,
            health_pb2.HealthCheckRequest(),
            timeout_seconds=_CHECK_SECONDS,
            on_lost=WorkerLost,
        )

    async def load_model(self, group_id: str) -> LoadedModel:
        """Load the model, as one of a group, and return what it is; raises WorkerLost or ModelLoadFailed."""
        request = wire.load_request(self._config, self._rank, group_id)
        async with open_stream(self._stub.LoadModel, request, on_lost=WorkerLost) as stream:
            async for report in stream:
                if report.WhichOneof("report") == "model":
                    return wire.loaded_model_of(report.model)
        raise WorkerLost(f"The worker of rank {self._rank} ended its loading without a model.")

    @asynccontextmanager
    async def open_steps(self) -> AsyncIterator[StepStream]:
        """Open the stream of steps."""
        async with open_stream(self._stub.ExecuteSteps, on_lost=WorkerLost) as stream:
            yield StepStream(stream)

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()
