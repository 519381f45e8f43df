"""Prompts: the prompts of requests, from their messages or texts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from spaceport.runtime.text.messages import ChatPrompt
from spaceport.runtime.text.prompt import Prompt
from spaceport.runtime.tool_calls.functions import renders_tools, with_description
from spaceport.tools.serve.bodies import ChatBody
from spaceport.tools.serve.failures import Failure
from spaceport.tools.serve.service import ServedModel
from spaceport.tools.serve.tool_use import ToolUse

_MOST_PROMPTS = 64  # of one text request


async def chat_prompt(body: ChatBody, tools: ToolUse, model: ServedModel) -> Prompt:
    """The prompt of a chat request; one whose answer has to consist of calls may end with the token that opens them."""
    if not body.messages:
        raise Failure(400, "messages is empty: expected at least one message", param="messages")
    for message in body.messages:
        parts = message.get("content")
        for part in parts if isinstance(parts, list) else ():
            if not isinstance(part, dict) or part.get("type") != "text":
                raise Failure(400, "a message has a part that is not text: the models read text only", param="messages")
    messages: Sequence[Mapping[str, Any]] = body.messages
    if tools.tools and not renders_tools(model.chat_template):
        messages = with_description(messages, tools.tools, tools.tool_format)
    prompt = ChatPrompt(
        messages,
        tools=list(tools.tools),
        template_kwargs=body.chat_template_kwargs or {},
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
    )
    if not tools.enforced or tools.opening is None:
        return prompt
    return [*await asyncio.to_thread(model.runtime.tokens_of, prompt), tools.opening]


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
