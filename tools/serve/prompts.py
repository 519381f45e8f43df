"""Prompts: the prompts of requests, from their messages or texts."""

from __future__ import annotations

import asyncio
from typing import Any

from spaceport.runtime.session import Runtime
from spaceport.runtime.text.chat_prompt import ChatPrompt
from spaceport.runtime.text.prompt import Prompt
from spaceport.tools.serve.bodies import ChatBody
from spaceport.tools.serve.failures import Failure
from spaceport.tools.serve.tool_use import ToolUse

_MOST_PROMPTS = 64  # of one text request


async def chat_prompt(body: ChatBody, tools: ToolUse, runtime: Runtime) -> Prompt:
    """The prompt of a chat request; one whose answer has to consist of calls may end with the token that opens them."""
    if not body.messages:
        raise Failure(400, "messages is empty: expected at least one message", param="messages")
    for message in body.messages:
        parts = message.get("content")
        for part in parts if isinstance(parts, list) else ():
            if not isinstance(part, dict) or part.get("type") != "text":
                raise Failure(400, "a message has a part that is not text: the models read text only", param="messages")
    prompt = ChatPrompt(
        body.messages,
        tools=list(tools.tools),
        template_kwargs=body.chat_template_kwargs or {},
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
    )
    if not tools.enforced or tools.opening is None:
        return prompt
    return [*await asyncio.to_thread(runtime.tokens_of, prompt), tools.opening]


def text_prompts(given: str | list[Any]) -> list[Prompt]:
    """The prompts of a text request: one text, one list of token ids, or several of either."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise Failure(400, "prompt is empty: expected a text or token ids", param="prompt")
    if len({type(one) for one in given}) > 1:
        raise Failure(400, "prompt mixes texts and token ids: expected one kind", param="prompt")
    if isinstance(given[0], int):
        return [given]
    if len(given) > _MOST_PROMPTS:
        raise Failure(400, f"prompt has {len(given)} prompts: expected at most {_MOST_PROMPTS}", param="prompt")
    return list(given)
