"""Chat past the model's context: a text longer than its trained positions is read first, and the chat goes on.

python examples/chat.py            # SmolLM2-135M-Instruct, a few questions
python examples/chat.py --ask      # your own questions; an empty line ends it

The policy `streaming` numbers the cached tokens anew, so that positions never leave the trained range, and pins keep
the system prompt.
"""

import argparse

import torch

import kvpass
from kvpass.apps import checkpoint, corpus

BUDGET, CHUNK = 512, 256
QUESTIONS = ("Hello! What can you do for me?", "Name three colours.", "Which of them is the colour of the sky?")

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--ask", action="store_true", help="read questions from the terminal")
parser.add_argument("--tokens", type=int, default=9000, help="of the text that is read first")
given = parser.parse_args()

model, tokenizer = checkpoint.load(torch.bfloat16)
end = tokenizer.eos_token_id
loop = kvpass.DecodeLoop(model, policy="streaming", budget=BUDGET, prefill_chunk=CHUNK, stop=[end])


def ids_of(text):
    return tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids


system = ids_of("<|im_start|>system\nYou are a friendly assistant.<|im_end|>\n")
text = ids_of(" ".join(corpus.prose().values()))[:, : given.tokens]
loop.prompt(torch.cat([system, text, ids_of("<|im_end|>\n")], 1), pin=[(0, system.shape[1])])
print(f"read {text.shape[1]} tokens; the model was trained on {model.config.max_position_embeddings} positions")

for question in iter(lambda: input("> "), "") if given.ask else QUESTIONS:
    loop.prompt(ids_of(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"))
    answer = loop.generate(60)[0]
    print(f"\n{question}\n  {tokenizer.decode(answer, skip_special_tokens=True).strip()}")
report = kvpass.inspect(loop)
print(f"\n{report.seen} tokens seen, {report.layers[0].positions.shape[-1]} held in each layer and head")
