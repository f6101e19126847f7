"""Chat formats by name, for models whose file has no template or a wrong one: a name flows in, Jinja source flows out.

BOS is left to the tokenizer, which puts it first where the vocabulary wants it. Names are llama.cpp's where it has one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Turns:
    """A format in which each message stands alone: how each role is written around its content `{}`."""

    user: str
    assistant: str
    prompt: str
    """What opens the assistant's next message."""
    system: str | None = None
    """None: the format has no system role, and the template says so when asked for one."""
    prefix: str = ""
    trim: bool = False
    """Content is written without the white space around it."""

    def source(self) -> str:
        """The format as a Jinja template."""
        lines = [
            f"{{{{- {_quoted(self.prefix)} }}}}",
            "{%- for message in messages %}",
            _CONTENT + ("{%- set content = content | trim %}" if self.trim else ""),
        ]
        roles = [("system", self.system), ("user", self.user), ("assistant", self.assistant)]
        for number, (role, form) in enumerate((role, form) for role, form in roles if form is not None):
            before, after = form.split("{}")
            lines.append(f"{{%- {'elif' if number else 'if'} message.role == '{role}' %}}")
            lines.append(f"{{{{- {_quoted(before)} + content + {_quoted(after)} }}}}")
        lines += [_OTHER_ROLE, "{%- endif %}", "{%- endfor %}"]
        lines.append(f"{{%- if add_generation_prompt %}}{{{{- {_quoted(self.prompt)} }}}}{{%- endif %}}")
        return "\n".join(lines)


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n") + "'"


def _marked(
    form: str, system: str = "system", user: str = "user", assistant: str = "assistant", trim: bool = False
) -> Turns:
    """A format that writes every role alike: `form` holds `ROLE` and `{}`, and the prompt is what precedes `{}`."""
    return Turns(
        system=form.replace("ROLE", system),
        user=form.replace("ROLE", user),
        assistant=form.replace("ROLE", assistant),
        prompt=form.replace("ROLE", assistant).split("{}")[0],
        trim=trim,
    )


_CONTENT = (
    "{%- set content = message.content if message.content is string "
    "else message.content | map(attribute='text') | join %}"
)
_OTHER_ROLE = "{%- else %}{{- raise_exception('This chat format has no role ' + message.role) }}"

_LLAMA2 = f"""
{{%- set system = namespace(text='') %}}
{{%- for message in messages %}}
{_CONTENT}
{{%- if message.role == 'system' %}}
{{%- set system.text = '<<SYS>>\\n' + content + '\\n<</SYS>>\\n\\n' %}}
{{%- elif message.role == 'user' %}}
{{{{- '[INST] ' + system.text + content.strip() + ' [/INST]' }}}}
{{%- set system.text = '' %}}
{{%- elif message.role == 'assistant' %}}
{{{{- ' ' + content.strip() + ' </s>' + ('' if loop.last else bos_token) }}}}
{_OTHER_ROLE}
{{%- endif %}}
{{%- endfor %}}"""

_FORMATS: dict[str, Turns | str] = {
    "alpaca": Turns(
        system="{}\n\n",
        user="### Instruction:\n{}\n\n",
        assistant="### Response:\n{}\n\n",
        prompt="### Response:\n",
    ),
    "bailing": _marked("<role>ROLE</role>{}", "SYSTEM", "HUMAN", "ASSISTANT"),
    "chatglm3": Turns(
        prefix="[gMASK]sop",
        system="<|system|>\n {}",
        user="<|user|>\n {}",
        assistant="<|assistant|>\n {}",
        prompt="<|assistant|>",
    ),
    "chatglm4": Turns(
        prefix="[gMASK]<sop>",
        system="<|system|>\n{}",
        user="<|user|>\n{}",
        assistant="<|assistant|>\n{}",
        prompt="<|assistant|>\n",
    ),
    "chatml": _marked("<|im_start|>ROLE\n{}<|im_end|>\n"),
    "command-r": _marked(
        "<|START_OF_TURN_TOKEN|><|ROLE_TOKEN|>{}<|END_OF_TURN_TOKEN|>", "SYSTEM", "USER", "CHATBOT", trim=True
    ),
    "deepseek": Turns(
        system="{}",
        user="### Instruction:\n{}\n",
        assistant="### Response:\n{}\n<|EOT|>\n",
        prompt="### Response:\n",
    ),
    "deepseek2": Turns(
        system="{}\n\n",
        user="User: {}\n\n",
        assistant="Assistant: {}<｜end▁of▁sentence｜>",
        prompt="Assistant:",
    ),
    "deepseek3": Turns(
        system="{}",
        user="<｜User｜>{}",
        assistant="<｜Assistant｜>{}<｜end▁of▁sentence｜>",
        prompt="<｜Assistant｜>",
    ),
    "exaone3": Turns(
        system="[|system|]{}[|endofturn|]\n",
        user="[|user|]{}\n",
        assistant="[|assistant|]{}[|endofturn|]\n",
        prompt="[|assistant|]",
        trim=True,
    ),
    "falcon3": _marked("<|ROLE|>\n{}\n"),
    "gemma": Turns(
        user="<start_of_turn>user\n{}<end_of_turn>\n",
        assistant="<start_of_turn>model\n{}<end_of_turn>\n",
        prompt="<start_of_turn>model\n",
        trim=True,
    ),
    "glmedge": Turns(
        system="<|system|>\n{}",
        user="<|user|>\n{}",
        assistant="<|assistant|>\n{}",
        prompt="<|assistant|>",
    ),
    "gpt-oss": Turns(
        system="<|start|>system<|message|>{}<|end|>",
        user="<|start|>user<|message|>{}<|end|>",
        assistant="<|start|>assistant<|channel|>final<|message|>{}<|end|>",
        prompt="<|start|>assistant",
    ),
    "granite": _marked("<|start_of_role|>ROLE<|end_of_role|>{}<|end_of_text|>\n"),
    "kimi-k2": _marked("<|im_ROLE|>ROLE<|im_middle|>{}<|im_end|>"),
    "llama2": _LLAMA2,
    "llama3": _marked("<|start_header_id|>ROLE<|end_header_id|>\n\n{}<|eot_id|>", trim=True),
    "llama4": _marked("<|header_start|>ROLE<|header_end|>\n\n{}<|eot|>", trim=True),
    "megrez": _marked("<|role_start|>ROLE<|role_end|>{}<|turn_end|>"),
    "minicpm": Turns(system="{}", user="<用户>{}", assistant="<AI>{}", prompt="<AI>", trim=True),
    "mistral-v1": Turns(user=" [INST] {} [/INST]", assistant=" {}</s>", prompt=""),
    "mistral-v3": Turns(user="[INST] {}[/INST]", assistant=" {}</s>", prompt=""),
    "mistral-v3-tekken": Turns(user="[INST]{}[/INST]", assistant="{}</s>", prompt=""),
    "mistral-v7": Turns(
        system="[SYSTEM_PROMPT] {}[/SYSTEM_PROMPT]", user="[INST] {}[/INST]", assistant=" {}</s>", prompt=""
    ),
    "mistral-v7-tekken": Turns(
        system="[SYSTEM_PROMPT]{}[/SYSTEM_PROMPT]", user="[INST]{}[/INST]", assistant="{}</s>", prompt=""
    ),
    "monarch": _marked("<s>ROLE\n{}</s>\n"),
    "openchat": Turns(
        system="GPT4 Correct System: {}<|end_of_turn|>",
        user="GPT4 Correct User: {}<|end_of_turn|>",
        assistant="GPT4 Correct Assistant: {}<|end_of_turn|>",
        prompt="GPT4 Correct Assistant:",
    ),
    "orion": Turns(user="Human: {}\n\n", assistant="Assistant: </s>{}</s>", prompt="Assistant: </s>"),
    "phi3": _marked("<|ROLE|>\n{}<|end|>\n"),
    "phi4": _marked("<|im_start|>ROLE<|im_sep|>{}<|im_end|>"),
    "rwkv-world": Turns(
        system="System: {}\n\n",
        user="User: {}\n\n",
        assistant="Assistant: {}\n\n",
        prompt="Assistant:",
        trim=True,
    ),
    "seed-oss": _marked("<seed:bos>ROLE\n{}<seed:eos>"),
    "vicuna": Turns(
        system="{}\n\n",
        user="USER: {}\n",
        assistant="ASSISTANT: {}</s>\n",
        prompt="ASSISTANT:",
    ),
    "vicuna-orca": Turns(
        system="SYSTEM: {}\n",
        user="USER: {}\n",
        assistant="ASSISTANT: {}</s>\n",
        prompt="ASSISTANT:",
    ),
    "yandex": Turns(user=" Пользователь: {}\n\n", assistant=" Ассистент: {}\n\n", prompt=" Ассистент:[SEP]"),
    "zephyr": _marked("<|ROLE|>\n{}</s>\n"),
}

BUILTIN_NAMES = tuple(sorted(_FORMATS))


def builtin_source(name: str) -> str:
    """Jinja source of the format called `name`, one of `BUILTIN_NAMES`; KeyError for any other."""
    form = _FORMATS[name]
    return form if isinstance(form, str) else form.source()
