"""Serve a model over HTTP, with the endpoints of OpenAI's API, on one `DecodeLoop` with rows."""
