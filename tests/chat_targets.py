"""Targets for chats: folders with a tiny tokenizer, a chat template and a config; and vLLM's endpoint.

The templates are ours, each with a habit of those in the field.
"""

import asyncio
import json
import shutil
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from drafters import EMBEDDED_TARGET
from transformers import AutoTokenizer

_HEAD = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_PLAIN = """
{%- for message in messages %}
{{- '<|im_start|>' + message.role + (' ' + message.name if message.name else '') + '\n' -}}
{{- message.content + '<|im_end|>\n' -}}
{% endfor -%}
"""
_MARKED = """
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' -}}
{% if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\n' }}
{%- endfor -%}
"""
_STRIPPING = """
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' -}}
{% if message.reasoning_content and loop.index0 > ns.last -%}
{{ '<think>' + message.reasoning_content + '</think>' }}{% endif -%}
{{ message.content + '<|im_end|>\n' }}
{%- endfor -%}
"""
_INSERTING = """
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' -}}
{% if message.role == 'assistant' and (loop.last or message.reasoning_content) -%}
{{ '<think>\n' + (message.reasoning_content or '').strip('\n') -}}
{{ '\n</think>\n\n' + message.content.lstrip('\n') -}}
{% else %}{{ message.content }}{% endif %}{{ '<|im_end|>\n' }}
{%- endfor -%}
{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}
{%- elif enable_thinking %}<think>
{% endif %}{% endif %}
"""
_TOOLS = """
{%- if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' -}}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>{{ call.function | tojson }}</tool_call>{{ call.id }}
{%- for name, value in call.function.arguments | items %} {{ name }}={{ value }}{% endfor %}
{%- endfor %}{{ message.tool_call_id }}<|im_end|>
{% endfor -%}
"""
_PARTS = """
{%- macro show(role, content) %}
{%- if content is string %}{{ '(string)' + content }}
{%- else %}{% for part in content %}
{{- ('' if role == 'assistant' else '[' + part.type + ']') + part.text }}{% endfor %}{% endif %}
{%- endmacro %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + show(message.role, message.content) + '<|im_end|>\n' -}}
{% endfor -%}
"""
_STRICT = """
{%- if messages[0].role != 'user' %}{{ raise_exception('a user comes first') }}{% endif %}
""" + _PLAIN.strip("\n")
TEMPLATES = {
    "plain": _PLAIN.strip("\n") + _HEAD,
    "marked": _MARKED.strip("\n") + _HEAD,
    "stripping": _STRIPPING.strip("\n") + _HEAD,
    "inserting": _INSERTING.strip("\n"),
    "tools": _TOOLS.strip("\n") + _HEAD,
    "parts": _PARTS.strip("\n") + _HEAD,
    "strict": _STRICT.strip("\n") + _HEAD,
}
END_OF_TURN = 2
_IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "video_processor_type": "Qwen3VLVideoProcessor",
    "processor_class": "Qwen3VLProcessor",
    "size": {"longest_edge": 1_000_000, "shortest_edge": 3136},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
}
_VISION = {
    "model_type": "qwen3_5",
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 256,
}
_IMAGE_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]


def write_chat_target(folder: Path, template: str) -> Path:
    """The embedded target's tokenizer and config with another template."""
    folder.mkdir(parents=True)
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_TARGET)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    shutil.copy(EMBEDDED_TARGET / "config.json", folder)
    return folder


def write_wrapped_target(folder: Path, template: str, of_processor: str) -> Path:
    """The same within a multimodal config, whose processor has a template of its own."""
    folder.mkdir(parents=True)
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_TARGET)
    tokenizer.add_tokens(_IMAGE_TOKENS)
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    write_json(folder / "tokenizer_config.json", settings | {"chat_template": template})
    write_json(folder / "chat_template.json", {"chat_template": of_processor})
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        write_json(folder / name, _IMAGES)
    places = ("vision_start", "vision_end", "image", "video")
    ids = {f"{place}_token_id": 4096 + number for number, place in enumerate(places)}
    wrapped = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": json.loads((EMBEDDED_TARGET / "config.json").read_text()),
        "vision_config": _VISION | {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2},
    }
    write_json(folder / "config.json", wrapped | ids)
    return folder


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content))


class Endpoint:
    """What vLLM's chat endpoint gives its engine; no engine runs."""

    def __init__(self, folder: Path) -> None:
        from vllm.config import ModelConfig, VllmConfig  # noqa: PLC0415 - once the environment is right
        from vllm.renderers import renderer_from_config  # noqa: PLC0415
        from vllm.renderers.online_renderer import OnlineRenderer  # noqa: PLC0415

        config = ModelConfig(model=str(folder), dtype="bfloat16")
        renderer = renderer_from_config(VllmConfig(model_config=config))
        self._renderer = OnlineRenderer(
            config, renderer, request_logger=None, chat_template=None, chat_template_content_format="auto"
        )

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = (), thinking: str = "template"
    ) -> list[int]:
        """thinking: as the recipe says it.  What the endpoint refuses raises vLLM's error."""
        from vllm.entrypoints.openai.chat_completion.protocol import (  # noqa: PLC0415
            ChatCompletionRequest,
        )

        fields: dict[str, Any] = {"tools": list(tools), "tool_choice": "none"} if tools else {}
        if thinking != "template":
            fields["chat_template_kwargs"] = {"enable_thinking": thinking == "on"}
        request = ChatCompletionRequest(messages=deepcopy(list(messages)), **deepcopy(fields))
        _, (prompt,) = asyncio.run(self._renderer.render_chat(request))
        return prompt["prompt_token_ids"]
