"""Responses: OpenAI's Responses API, without stored conversations: each request is answered as a chat request."""
