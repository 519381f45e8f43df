"""Service: completions over HTTP, streamed as server-sent events."""

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from spaceport import AsyncStream, Decoding, QueueFull, Runtime


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    with Runtime.open(os.environ["BUNDLE"], max_requests=8, queue_limit=32) as app.state.runtime:
        yield


async def write(request: Request) -> Response:
    try:
        body = await request.json()
        prompt = body["prompt"]
        decoding = Decoding(max_tokens=body.get("max_tokens"), stop=body.get("stop", ()), timeout=60)
        stream = request.app.state.runtime.astream(prompt, decoding)
        await stream.submitted()  # or raises its error
    except QueueFull as error:
        return JSONResponse({"error": str(error)}, 503, {"Retry-After": "1"})
    except (KeyError, TypeError, ValueError) as error:  # an OptionFault is a ValueError
        return JSONResponse({"error": str(error)}, 400)
    return StreamingResponse(events(stream), media_type="text/event-stream")


async def events(stream: AsyncStream) -> AsyncIterator[str]:
    async with stream:  # a client that disconnects cancels its request
        async for piece in stream:
            if piece.reading:
                yield f"data: {json.dumps({'text': piece.reading})}\n\n"
        found = await stream.completion()
        yield f"event: end\ndata: {json.dumps({'ending': found.ending, 'tokens': len(found.tokens)})}\n\n"


app = Starlette(routes=[Route("/write", write, methods=["POST"])], lifespan=lifespan)
