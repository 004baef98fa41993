"""Renders the chat templates of real models with transformers, the reference.

golden_templates.py OUT NAME=TOKENIZER_FOLDER …: runs in the environment that run.py installs. Templates belong to
their vendors; what this writes stays in the cache.
"""

import itertools
import json
import sys
from pathlib import Path

from transformers.utils.chat_template_utils import render_jinja_template

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "it's <b>bold</b> & naïve",
            "parameters": {
                "type": "object",
                "properties": {"zeta": {"type": "string"}, "alpha": {"type": "integer", "default": 1e-7}},
                "required": ["zeta"],
            },
        },
    }
]
CONVERSATIONS = [
    [{"role": "user", "content": "Hello,\n  wörld! 日本語 <|im_end|>"}],
    [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "<think>\nso\n</think>\n\nTwo."},
        {"role": "user", "content": "  Three?  "},
    ],
    [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "look_up", "arguments": {"zeta": "Zürich", "alpha": 1.0, "n": [1, None, True]}},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": '{"temp": 20}'},
        {"role": "user", "content": "Thanks"},
    ],
]
SETTINGS = [
    {"add_generation_prompt": True},
    {"add_generation_prompt": False},
    {"add_generation_prompt": True, "enable_thinking": False},
]


def main(out, *models):
    renders = []
    for name, folder in (model.split("=", 1) for model in models):
        config = json.loads((Path(folder) / "tokenizer_config.json").read_text())
        special = {}
        for key in ("bos_token", "eos_token", "pad_token"):
            value = config.get(key)
            special[key] = value["content"] if isinstance(value, dict) else value
        special = {key: value for key, value in special.items() if value is not None}
        for messages, tools, setting in itertools.product(CONVERSATIONS, (None, TOOLS), SETTINGS):
            variables = {**setting, **special}
            rendered, _ = render_jinja_template(
                conversations=[messages], tools=tools, chat_template=config["chat_template"], **variables
            )
            renders.append(
                {
                    "model": name,
                    "template": config["chat_template"],
                    "vars": {"messages": messages, "tools": tools, **variables},
                    "expected": rendered[0],
                }
            )
    Path(out).write_text(json.dumps(renders))
    print(len(renders), "renders")


if __name__ == "__main__":
    main(*sys.argv[1:])
