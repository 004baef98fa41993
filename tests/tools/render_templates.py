"""Renders the templates of `tests/data/prompt/templates` with Jinja2, for comparison.

Needs the PyPI package `jinja2`; run it from the repository root after changing a template or a
case in `tests/data/prompt/templates.json`:

    python tests/tools/render_templates.py

The environment is the one engines use (documented in the chat-template guide of `transformers`).
The output, `tests/data/prompt/templates.golden.json`, has one string per case; null where the
template refuses.
"""

import json
import pathlib
from datetime import datetime

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(Extension):
    """`{% generation %}` renders its body."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller):
        return caller()


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def refuse(message):
    raise TemplateError(message)


def environment():
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def render(template, values):
    try:
        return template.render(**values)
    except TemplateError:
        return None


def main():
    data = pathlib.Path("tests/data/prompt")
    cases = json.loads((data / "templates.json").read_text(encoding="utf-8"))
    golden = {}
    for name, inputs in cases.items():
        path = data / "templates" / f"{name}.jinja"
        if name == "builtin":
            path = pathlib.Path("src/prompt/builtin/chat_template.jinja")
        template = environment().from_string(path.read_text(encoding="utf-8"))
        golden[name] = [render(template, values) for values in inputs]
    text = json.dumps(golden, ensure_ascii=False, indent=1)
    (data / "templates.golden.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
