"""Call a server with OpenAI's client and print the results as JSON: `python openai_client.py URL`.

It runs in a separate process and needs only the package `openai`.
"""

import json
import sys

import openai

MODEL = "SmolLM2-135M-Instruct"
client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
messages = [{"role": "user", "content": "Name three colours."}]
how = {"model": MODEL, "max_tokens": 24, "temperature": 0}

whole = client.chat.completions.create(messages=messages, **how)
chunks = list(
    client.chat.completions.create(messages=messages, stream=True, stream_options={"include_usage": True}, **how)
)
drawn = [
    client.chat.completions.create(messages=messages, **{**how, "temperature": 0.8}, seed=3, n=2).choices
    for _ in range(2)
]
completion = client.completions.create(prompt="Once upon a time", stop="\n", **how)
turns = [
    client.chat.completions.create(
        messages=[{"role": "user", "content": content}], extra_body={"conversation": "talk"}, **how
    )
    for content in ("My name is Ada.", "What is my name?")
]
history = [
    {"role": "user", "content": "My name is Ada."},
    {"role": "assistant", "content": turns[0].choices[0].message.content},
    {"role": "user", "content": "What is my name?"},
]
resent = client.chat.completions.create(messages=history, **how)
refused = []
for wrong in ({"logprobs": True}, {"model": "gpt-4"}, {"temperature": 9}):
    try:
        client.chat.completions.create(messages=messages, **{**how, **wrong})
    except openai.APIStatusError as error:
        refused.append([type(error).__name__, error.status_code, error.code, error.param])

print(
    json.dumps(
        {
            "models": [model.id for model in client.models.list()],
            "whole": whole.choices[0].message.content,
            "usage": whole.usage.to_dict(),
            "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
            "streamed usage": chunks[-1].usage.to_dict(),
            "drawn": [[choice.message.content for choice in choices] for choices in drawn],
            "completion": completion.choices[0].text,
            "turns": [turn.choices[0].message.content for turn in turns],
            "resent": resent.choices[0].message.content,
            "cached": turns[1].usage.prompt_tokens_details.cached_tokens,
            "refused": refused,
        }
    )
)
