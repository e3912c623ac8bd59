"""The router: OpenAI's API in front, prefill and decode engines behind."""
