"""Chat templates by name, for models whose file has none: `--chat-template NAME`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_CHATML = """\
{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{%- endif %}
"""

_GEMMA = """\
{{ bos_token }}
{%- set ns = namespace(system='') %}
{% for message in messages %}
{% if message['role'] == 'system' %}
{% set ns.system = message['content'] | trim + '\\n\\n' %}
{% else %}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '\\n' + (ns.system if role == 'user' else '') }}
{%- if role == 'user' %}{% set ns.system = '' %}{% endif %}
{{ message['content'] | trim + '<end_of_turn>\\n' }}
{%- endif %}
{% endfor %}
{% if add_generation_prompt %}
{{ '<start_of_turn>model\\n' }}
{%- endif %}
"""

_LLAMA3 = """\
{{ bos_token }}
{%- for message in messages %}
{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
{{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

_MISTRAL = """\
{{ bos_token }}
{%- set ns = namespace(system='') %}
{% for message in messages %}
{% if message['role'] == 'system' %}
{% set ns.system = message['content'] + '\\n\\n' %}
{% elif message['role'] == 'assistant' %}
{{ ' ' + message['content'] | trim + eos_token }}
{%- else %}
{{ '[INST] ' + ns.system + message['content'] + ' [/INST]' }}
{%- set ns.system = '' %}
{% endif %}
{% endfor %}
"""

_PLAIN = """\
{% for message in messages %}
{{ message['role'] | capitalize + ': ' + message['content'] | trim + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ 'Assistant:' }}
{%- endif %}
"""

#: name -> jinja source
BUILTIN_TEMPLATES: Mapping[str, str] = MappingProxyType(
    {"chatml": _CHATML, "gemma": _GEMMA, "llama3": _LLAMA3, "mistral": _MISTRAL, "plain": _PLAIN}
)
