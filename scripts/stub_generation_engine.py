"""An engine that costs almost nothing: each request gets tokens at a fixed pace, in one message for each step.

It speaks GenerationService and EngineService.GetEngine, so that a gateway can be measured by itself. The first
token comes with the acceptance; the others with the next steps, of which there are ``--rate`` a second. It prints
its address as a line of JSON and runs until it is killed.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import uvloop

from libs.kv import HASH_ALGORITHM
from libs.protogen.engine.v1 import engine_pb2, engine_pb2_grpc
from libs.protogen.generation.v1 import generation_pb2, generation_pb2_grpc
from libs.rpc import Registration, make_server
from libs.text import EMBEDDED_MODEL_NAME, ModelText, load_model_text, resolve_model_path

# Each word is one token and begins with its only space, so that a client can count tokens by counting spaces.
_TEXT: Final = " the quick brown fox jumps over the lazy dog and runs away from all other animals in that forest"
_MAX_SEQS: Final = 65_536


class _Running:
    """One choice: where it stands in the text, and how many tokens are left."""

    __slots__ = ("handle", "num_left", "num_sent", "request_id")

    def __init__(self, handle: int, request_id: str, num_left: int) -> None:
        self.handle, self.request_id, self.num_left, self.num_sent = handle, request_id, num_left, 0


class _Stream:
    """One gateway's stream."""

    def __init__(self, token_ids: Sequence[int], outbox: asyncio.Queue[generation_pb2.GenerateResponse]) -> None:
        self._token_ids = token_ids
        self._outbox = outbox
        self._running: dict[int, _Running] = {}
        self._next_handle = 1
        self._step_id = 0

    async def read(self, commands: AsyncIterator[generation_pb2.GenerateRequest]) -> None:
        async for command in commands:
            if command.HasField("submit"):
                self._submit(command.submit)
            else:
                self._abort(command.abort.request_id, set(command.abort.handles))

    def step(self) -> None:
        """Give every choice one token."""
        if self._running:
            self._send(self._advance(list(self._running.values())))

    def _submit(self, submit: generation_pb2.Submit) -> None:
        handles = range(self._next_handle, self._next_handle + len(submit.choices))
        self._next_handle = handles.stop
        limit = submit.sampling_params.max_output_tokens
        begun = [_Running(handle, submit.request_id, limit) for handle in handles]
        self._running.update({running.handle: running for running in begun})
        message = self._advance(begun)
        message.started.append(generation_pb2.Started(request_id=submit.request_id, handles=handles))
        self._send(message)

    def _abort(self, request_id: str, handles: set[int]) -> None:
        message = generation_pb2.GenerateResponse()
        for running in list(self._running.values()):
            if running.request_id == request_id and (not handles or running.handle in handles):
                message.finished.append(self._finished(running, generation_pb2.FINISH_REASON_ABORTED))
        self._send(message)

    def _advance(self, choices: Sequence[_Running]) -> generation_pb2.GenerateResponse:
        num_texts = len(self._token_ids)
        message = generation_pb2.GenerateResponse(
            handles=[running.handle for running in choices],
            num_tokens=[1] * len(choices),
            token_ids=[self._token_ids[(running.handle + running.num_sent) % num_texts] for running in choices],
        )
        for running in choices:
            running.num_sent += 1
            if running.num_sent >= running.num_left:
                message.finished.append(self._finished(running, generation_pb2.FINISH_REASON_LENGTH))
        return message

    def _finished(self, running: _Running, reason: Any) -> generation_pb2.Finished:
        del self._running[running.handle]
        usage = generation_pb2.Usage(num_output_tokens=running.num_sent)
        return generation_pb2.Finished(handle=running.handle, reason=reason, usage=usage)

    def _send(self, message: generation_pb2.GenerateResponse) -> None:
        self._step_id += 1
        message.step_id = self._step_id
        self._outbox.put_nowait(message)


class _Generation(generation_pb2_grpc.GenerationServiceServicer):
    def __init__(self, token_ids: Sequence[int], rate: float) -> None:
        self._token_ids = token_ids
        self._period_seconds = 1 / rate

    async def Generate(
        self, request_iterator: AsyncIterator[generation_pb2.GenerateRequest], context: Any
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        outbox: asyncio.Queue[generation_pb2.GenerateResponse] = asyncio.Queue()
        stream = _Stream(self._token_ids, outbox)
        tasks = [asyncio.create_task(stream.read(request_iterator)), asyncio.create_task(self._step(stream))]
        try:
            while True:
                yield await outbox.get()
        finally:
            for task in tasks:
                task.cancel()

    async def _step(self, stream: _Stream) -> None:
        loop = asyncio.get_running_loop()
        next_time = loop.time()
        while True:
            # Steps that are late are made up for, as long as that is not much.
            next_time = max(next_time + self._period_seconds, loop.time() - self._period_seconds)
            await asyncio.sleep(next_time - loop.time())
            stream.step()


class _Engine(engine_pb2_grpc.EngineServiceServicer):
    def __init__(self, model_text: ModelText, address: str) -> None:
        contract = engine_pb2.HashContract(
            block_size=16, algorithm=HASH_ALGORITHM, tokenizer_digest=model_text.tokenizer_digest
        )
        self.engine = engine_pb2.Engine(
            engine_id="stub-0",
            incarnation=1,
            address=address,
            model_name=EMBEDDED_MODEL_NAME,
            hash_contract=contract,
            state=engine_pb2.ENGINE_STATE_READY,
            num_blocks=1_000_000,
            max_model_len=model_text.max_model_len,
            max_num_seqs=_MAX_SEQS,
            max_num_batched_tokens=_MAX_SEQS,
        )

    async def GetEngine(self, request: engine_pb2.GetEngineRequest, context: Any) -> engine_pb2.GetEngineResponse:
        load = engine_pb2.EngineLoad(
            num_available_blocks=1_000_000, num_blocks=1_000_000, state=engine_pb2.ENGINE_STATE_READY
        )
        return engine_pb2.GetEngineResponse(engine=self.engine, load=load)

    async def DrainEngine(
        self, request: engine_pb2.DrainEngineRequest, context: Any
    ) -> engine_pb2.DrainEngineResponse:
        return engine_pb2.DrainEngineResponse()

    async def WatchEngine(
        self, request: engine_pb2.WatchEngineRequest, context: Any
    ) -> AsyncIterator[engine_pb2.WatchEngineResponse]:
        snapshot = engine_pb2.EngineSnapshot(engine=self.engine, is_first_part=True, is_last_part=True)
        yield engine_pb2.WatchEngineResponse(incarnation=1, snapshot=snapshot)
        await asyncio.Event().wait()

    async def GetPageTable(
        self, request: engine_pb2.GetPageTableRequest, context: Any
    ) -> AsyncIterator[engine_pb2.GetPageTableResponse]:
        yield engine_pb2.GetPageTableResponse()


async def _serve(rate: float) -> None:
    model_text = load_model_text(resolve_model_path(EMBEDDED_MODEL_NAME))
    token_ids = model_text.tokenizer.encode(_TEXT, allow_special=False)
    words = [model_text.tokenizer.token_bytes(token_id) for token_id in token_ids]
    assert all(word.startswith(b" ") and word.count(b" ") == 1 for word in words), words
    engine = _Engine(model_text, "")
    server = make_server(
        "127.0.0.1:0",
        [
            Registration(
                generation_pb2_grpc.add_GenerationServiceServicer_to_server,
                _Generation(token_ids, rate),
                "octavo.generation.v1.GenerationService",
            ),
            Registration(
                engine_pb2_grpc.add_EngineServiceServicer_to_server, engine, "octavo.engine.v1.EngineService"
            ),
        ],
    )
    await server.start()
    engine.engine.address = server.address
    # A round of the collector over all of a vocabulary would stop the steps for 20 ms.
    gc.collect()
    gc.freeze()
    print(json.dumps({"address": server.address}), flush=True)
    await asyncio.Event().wait()


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=30.0, help="steps a second")
    uvloop.run(_serve(parser.parse_args().rate))


if __name__ == "__main__":
    main()
