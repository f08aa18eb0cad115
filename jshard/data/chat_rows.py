"""Rows of files that hold conversations, as lists of messages with the roles and keys that chat templates read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jshard._types import Json
from jshard.data.chat_template import ChatTemplate, TemplateError, has_marks
from jshard.data.documents import TableRow, has_rows, is_dataset, rows_of
from jshard.data.loader import DataError
from jshard.errors import FourPartError

_KEYS = ("messages", "conversations")
"""The keys under which rows have conversations, by default."""

# ShareGPT's names of roles.
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}
_KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool")


def chat_key(path: Path, key: str | None = None) -> str | None:
    """Returns the key under which the rows of a file have conversations; None if its first row has none.

    Args:
        path: a file, or a dataset.
        key: the requested one. Without it, a row with a text is a document, whatever else it has.
    """
    if path.is_dir() and not is_dataset(path):
        path = next(iter(_files_with_rows(path)), path)
    try:
        first = next(rows_of(path) or iter(()), None)
    # Whoever reads the texts of the file says what is wrong with it.
    except (FourPartError, ValueError, OSError):
        return None
    return None if first is None else chat_key_of(first, key)


def chat_key_of(row: TableRow, key: str | None = None) -> str | None:
    """Returns the key under which a row has a conversation; None if it has none."""
    keys = _KEYS if key is None else (key,)
    if key is None and isinstance(row.values.get("text"), str):
        return None
    for name in keys:
        if isinstance(row.values.get(name), list):
            return name
    return None


def read_rows(path: Path) -> Iterator[TableRow]:
    """Yields the rows of a file, a dataset, or all such files of a folder."""
    paths = [path]
    if path.is_dir() and not is_dataset(path):
        paths = _files_with_rows(path)
    for file in paths:
        rows = rows_of(file)
        if rows is None or not file.exists():
            why = "no such file." if not file.exists() else "it is of no kind that has rows."
            raise _unreadable(file, why)
        try:
            yield from rows
        except OSError as error:
            raise _unreadable(file, f"{(error.strerror or repr(error)).lower()}.") from error
        except FourPartError:
            raise
        except ValueError as error:
            raise _unreadable(file, f"{error}.") from error


def _files_with_rows(folder: Path) -> list[Path]:
    """Returns the files of a folder that have rows, by their names."""
    files = []
    for file in sorted(folder.rglob("*")):
        if file.is_file() and not file.name.startswith(".") and has_rows(file):
            files.append(file)
    return files


def _unreadable(path: Path, why: str) -> DataError:
    return DataError(
        "The conversations cannot be read.",
        where=str(path),
        why=why,
        do='--data chats.jsonl  # a line is {"messages": [{"role": "user", "content": "..."}, ...]}; or .parquet',
    )


def messages_of(row: TableRow, key: str | None = None) -> list[dict[str, Any]]:
    """Returns the messages of a row, in the form that templates read."""
    keys = _KEYS if key is None else (key,)
    stored: Json = None
    for name in keys:
        if row.values.get(name) is not None:
            stored = row.values[name]
            break
    if not isinstance(stored, list) or not stored:
        looked_for = " and ".join(map(repr, keys))
        why = f"it has {_listed(row.values) or 'nothing'}; a list of messages is looked for under {looked_for}."
        raise _no_conversation(row, why)
    return [_message(row, number, message) for number, message in enumerate(stored, 1)]


def _message(row: TableRow, number: int, stored: Json) -> dict[str, Any]:
    """Returns a message, with OpenAI's keys and roles."""
    if not isinstance(stored, Mapping):
        raise _no_conversation(row, f"message {number} is a {type(stored).__name__}, not an object with keys.")
    message = _with_openai_keys(stored)
    role = message.get("role")
    if role not in _KNOWN_ROLES:
        known = ", ".join((*_KNOWN_ROLES, *_ROLES))
        raise _no_conversation(row, f"the role of message {number} is {role!r}; known are {known}.")
    content = message.get("content")
    if content is None and message.get("tool_calls") and "content" not in message:
        content = ""
    if not isinstance(content, str | list):
        why = f"message {number} of the role {role} has no content; it has {_listed(message)}."
        raise _no_conversation(row, why)
    if has_marks(json.dumps(content, ensure_ascii=False)):
        raise _no_conversation(row, f"message {number} has U+FDD0 or U+FDD1, which are no characters of a text.")
    return {**message, "content": content}


def _with_openai_keys(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message with OpenAI's keys, in place of ShareGPT's, and OpenAI's name of the role."""
    # A table has a null for each key that other messages have.
    message = {key: value for key, value in stored.items() if value is not None}
    if "role" not in message and "from" in message:
        role = message.pop("from")
        content = message.pop("value", None)
        message = {"role": role, "content": content, **message}
    if "role" in message:
        role = message["role"]
        message["role"] = _ROLES.get(str(role), role)
    return message


def _listed(keys: Iterable[str]) -> str:
    return ", ".join(map(repr, keys))


def _no_conversation(row: TableRow, why: str) -> DataError:
    return DataError(
        "A row is not a conversation.",
        where=row.where,
        why=why,
        do='{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}',
    )


def not_rendered(row: TableRow, template: ChatTemplate, error: TemplateError) -> DataError:
    """Returns the error for a conversation that the template refuses."""
    return DataError(
        "The chat template cannot render a conversation.",
        where=[row.where, str(template.path)],
        why=f"{error}.",
        do="correct the conversation, or remove it. A template may also mark what the assistant writes:\n"
        "{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}",
    )
