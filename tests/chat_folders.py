"""Folders with a tokenizer of bytes and marks of turns, and chat templates as models have them."""

import json
from pathlib import Path
from typing import Any

from jshard.data.tokenizer import transformers_files

MARKS = ("<|im_start|>", "<|im_end|>")
TURN = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CHATML = "{% for m in messages %}" + TURN + "{% endfor %}" + PROMPT
EACH = "{% if m.role == 'assistant' %}REPLY{% else %}" + TURN + "{% endif %}"
LOOP = "{% for m in messages %}" + EACH + "{% endfor %}" + PROMPT
# The assistant's turn is marked as Transformers has it.
MARKED = LOOP.replace(
    "REPLY",
    "{{ '<|im_start|>assistant\n' }}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}",
)
# As in Qwen 3, only the last reply shows where its thoughts were.
THINKING = LOOP.replace(
    "REPLY",
    "{{ '<|im_start|>assistant\n' }}{% if loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}",
)


def write_tokenizer(folder: Path, template: str | None = CHATML, marks: tuple[str, ...] = MARKS, **config: Any) -> Path:
    """Writes a tokenizer.json and its tokenizer_config.json into a folder, and returns the former."""
    tokenizer = json.loads(transformers_files(None)["tokenizer.json"])
    for number, mark in enumerate(marks, 256):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        tokenizer["added_tokens"].append({"id": number, "content": mark, **flags, "special": True})
        tokenizer["model"]["vocab"][mark] = number
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": marks[-1], **config}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return file


def conversation(*contents: str) -> dict[str, Any]:
    """A row: the turns of a user and an assistant, one after the other."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": content} for n, content in enumerate(contents)]}


def write_rows(path: Path, *rows: Any) -> Path:
    """Writes rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
