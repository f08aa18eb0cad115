"""The chat template of a tokenizer: conversations as text, and which part of it the assistant writes.

A template is a program in Jinja, which comes with the weights. It runs as Transformers runs it, in a sandbox.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jshard._files import read_bytes, read_json
from jshard._types import Json
from jshard.data.loader import DataError
from jshard.errors import MissingExtraError

if TYPE_CHECKING:
    import jinja2

CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"

Message = Mapping[str, Any]
"""A turn of a conversation: its role, its content, and what else the template reads."""

# Transformers' tag around what the assistant writes.
_GENERATION = re.compile(r"\{%[-+]?\s*generation\b")
# Unicode has these for the inside of programs: no text has them.
_BEGIN, _END = "\ufdd0", "\ufdd1"
# A template may ask for the date of today; with it, a resumed run would see other tokens than before. This is the one
# that Llama 3's templates have for a caller without a date.
_TODAY = datetime.datetime(2024, 7, 26)
_MOST_BYTES = 16 << 20  # of a template or a config


class TemplateError(Exception):
    """A template that refuses a conversation, or fails."""


@dataclasses.dataclass(frozen=True)
class TextSpan:
    """A range of characters in a text, from `start` up to `stop`."""

    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class Rendered:
    """A conversation as text.

    Attributes:
        text: all of it, with the marks of its turns.
        replies: what the assistant writes in it.
    """

    text: str
    replies: tuple[TextSpan, ...]


class ChatTemplate:
    """The chat template of a tokenizer.

    Args:
        source: the program.
        special_tokens: the tokens that it may name, such as `bos_token`.
        path: where it is from, for errors.

    Raises:
        DataError: it is not valid Jinja.
        MissingExtraError: the package `jinja2` is not installed.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], path: Path) -> None:
        self.path = path
        self.special_tokens = dict(special_tokens)
        self._template = _compiled(source, path)
        self._marks_replies = _GENERATION.search(source) is not None

    def text(self, messages: Sequence[Message], *, tools: Json = None, add_generation_prompt: bool = False) -> str:
        """Returns messages as text.

        Args:
            messages: the conversation.
            tools: descriptions of the functions that the assistant may call.
            add_generation_prompt: whether the text ends with what comes before a reply.

        Raises:
            TemplateError: the template refuses them, or fails.
        """
        marked = self._marked_text(messages, tools, add_generation_prompt)
        return marked.replace(_BEGIN, "").replace(_END, "")

    def samples(self, messages: Sequence[Message], *, tools: Json = None) -> list[Rendered]:
        """Returns a conversation as texts to train on, with what the assistant writes in each.

        It is one text if the template shows the earlier turns of a conversation always in the same way. Some do not:
        Qwen 3's leaves out the thoughts of earlier turns. A reply is then a text of its own, after the turns before it
        as the model sees them when it writes that reply.

        Raises:
            TemplateError: the template refuses the messages, fails, or does not say where a reply begins.
        """
        if self._marks_replies:
            return [_unmarked(self._marked_text(messages, tools, False))]
        samples = []
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                samples.append(self._reply(messages[: number + 1], tools))
        if not samples:
            return [Rendered(self.text(messages, tools=tools), ())]
        last = samples[-1]
        if all(last.text.startswith(sample.text) for sample in samples):
            replies = [span for sample in samples for span in sample.replies]
            return [Rendered(last.text, tuple(replies))]
        return samples

    def last_reply(self, messages: Sequence[Message], *, tools: Json = None) -> Rendered:
        """Returns a conversation that ends in a reply, and that reply alone.

        Raises:
            TemplateError: see `samples`; or the last message is not the assistant's.
        """
        if messages[-1]["role"] != "assistant":
            raise TemplateError(f"the last message is of the role {messages[-1]['role']}, not the assistant's")
        (*_, last) = self.samples(messages, tools=tools)
        return Rendered(last.text, last.replies[-1:])

    def _reply(self, messages: Sequence[Message], tools: Json) -> Rendered:
        """Returns a conversation up to a reply, which is what the last message adds to the prompt before it."""
        prompt = self.text(messages[:-1], tools=tools, add_generation_prompt=True)
        whole = self.text(messages, tools=tools)
        if not whole.startswith(prompt):
            raise TemplateError(
                f"message {len(messages)} does not continue the prompt before it, which ends in {prompt[-40:]!r}"
            )
        return Rendered(whole, (TextSpan(len(prompt), len(whole)),))

    def _marked_text(self, messages: Sequence[Message], tools: Json, add_generation_prompt: bool) -> str:
        """Returns the text, with marks around what the template says that the assistant writes."""
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
            )
        except TemplateError:
            raise
        # Whatever a program may raise: it is data of the user's, and the error names the conversation.
        except Exception as error:
            raise TemplateError(f"{type(error).__name__}: {error}") from error


def template_beside(tokenizer: Path) -> ChatTemplate:
    """Returns the chat template in the folder of a tokenizer.json.

    Raises:
        DataError: there is none, or it cannot be read.
    """
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    config = _config(folder / CONFIG)
    tokens = _special_tokens(config)
    file = folder / TEMPLATE
    if file.is_file():
        return ChatTemplate(read_bytes(file, _MOST_BYTES).decode(errors="replace"), tokens, file)
    source = _default_template(config.get("chat_template"))
    if source is None:
        raise DataError(
            "The tokenizer has no chat template.",
            where=str(folder),
            why=f"it has no {TEMPLATE}, and {CONFIG} has no chat_template; a base model often has none.",
            do=f"cp CHAT_MODEL/{TEMPLATE} {folder}/  # of the same tokenizer; or write one",
        )
    return ChatTemplate(source, tokens, folder / CONFIG)


def companion_files(tokenizer: Path) -> dict[str, str]:
    """Returns the texts of the files beside a tokenizer.json that Transformers reads with it, by name."""
    texts = {}
    for name in (CONFIG, TEMPLATE, "special_tokens_map.json"):
        file = tokenizer.parent / name
        if file.is_file():
            texts[name] = read_bytes(file, _MOST_BYTES).decode(errors="replace")
    return texts


def _config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        config = read_json(file)
    except (OSError, ValueError) as error:
        raise _unreadable(file, f"{type(error).__name__}: {error}.") from error
    if not isinstance(config, dict):
        raise _unreadable(file, f"it is a {type(config).__name__}, not an object with keys.")
    return config


def _unreadable(file: Path, why: str) -> DataError:
    do = f"copy the file of the model again: {file}"
    return DataError("The settings of the tokenizer cannot be read.", where=str(file), why=why, do=do)


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the special tokens that a template may name, from a tokenizer_config.json."""
    tokens = {}
    for name, value in config.items():
        if isinstance(value, dict):  # an AddedToken: its text, and how it is matched
            value = value.get("content")
        if name.endswith("_token") and isinstance(value, str):
            tokens[name] = value
    return tokens


def _default_template(stored: Json) -> str | None:
    """Returns the template for conversations; some files have several, as a list of names and texts."""
    if isinstance(stored, str):
        return stored
    for entry in stored if isinstance(stored, list) else []:
        if isinstance(entry, dict) and entry.get("name") == "default":
            template = entry.get("template")
            return template if isinstance(template, str) else None
    return None


# ---- Jinja, with what Transformers adds to it.


def _compiled(source: str, path: Path) -> jinja2.Template:
    try:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise MissingExtraError(
            "Chat templates need a package that is not installed.",
            where=str(path),
            why=f"{error}.",
            do="pip install 'jshard[hf]'",
        ) from error
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation_tag(), "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _as_json
    functions: dict[str, Callable[..., Any]] = {"raise_exception": _refuse, "strftime_now": _TODAY.strftime}
    environment.globals.update(functions)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise DataError(
            "The chat template is not valid.",
            where=str(path),
            why=f"{error}.",
            do="copy the template of the model again, or correct it.",
        ) from error


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _as_json(
    value: Json,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes characters of HTML, which are no part of the texts that a model has seen.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _generation_tag() -> Any:
    """Returns the extension for `{% generation %} ... {% endgeneration %}`, which marks what is in it."""
    # A function, as jinja2 is optional.
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 - as Jinja reads it

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Callable[[], str]) -> str:
            return f"{_BEGIN}{caller()}{_END}"

    return Generation


def _unmarked(marked: str) -> Rendered:
    """Returns a text without its marks, and what was between them."""
    parts = []
    replies = []
    length = 0
    for number, piece in enumerate(marked.replace(_END, _BEGIN).split(_BEGIN)):
        # Marks come in pairs, so every second piece is between two of them.
        if number % 2:
            replies.append(TextSpan(length, length + len(piece)))
        parts.append(piece)
        length += len(piece)
    return Rendered("".join(parts), tuple(replies))


def has_marks(text: str) -> bool:
    """Returns whether a text has the characters that are used as marks here."""
    return _BEGIN in text or _END in text
