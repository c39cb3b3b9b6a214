"""A checkpoint that answers chats with known texts: text, tool calls and reasoning.

A variable of its template names the answer. Tokens are cut at random places (tests/tiny.py). Its
drafter is the same model, so calls begin and end inside accepted windows.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.cluster.system import Checkpoints
from tests.tiny import make_scripted_checkpoint

TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}
{{- 'Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}{{ '@' ~ script | default('text') ~ '@' }}
{%- if open_think %}{{ '<think>\\n' }}{% endif %}
{%- endif %}"""
# It shows </think>, as templates do that leave the reasoning of earlier answers out.
TEMPLATE += "{% set without = messages[-1].content.split('</think>')[-1] %}"

CALL = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm", "days": [1, 2]}}\n</tool_call>'
)
SECOND = '<tool_call>\n{"name": "add", "arguments": {"x": "}\\n</tool_call>"}}\n</tool_call>'
SCRIPTS = {
    "@text@": "The sky is blue.",
    "@call@": CALL,
    "@two@": f"I will look.\n{CALL}\n{SECOND}",
    "@think@": f"<think>\nIs it sunny?\n</think>\n\nIt is.\n{CALL}",
    "@llama@": '{"name": "weather", "parameters": {"city": "Bonn"}}',
    "<think>\n": "So the prompt thinks.\n</think>\n\nDone.",
}
ARGUMENTS = '{"city": "Ulm", "days": [1, 2]}'
SECOND_ARGUMENTS = '{"x": "}\\n</tool_call>"}'
CHAT: Any = [{"role": "user", "content": "How is the weather?"}]


def scripted_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """The checkpoint, as target and as drafter."""
    folder = tmp_path_factory.mktemp("scripted") / "target"
    make_scripted_checkpoint(folder, SCRIPTS, chat_template=TEMPLATE)
    return Checkpoints(folder, folder)
