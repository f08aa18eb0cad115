"""What MkDocs runs on each page: it fills in the help of commands, and takes out links to what is not on the site."""

import contextlib
import io
import os
import re

from jshard.cli import main


def on_page_markdown(markdown: str, *, page, **_) -> str:
    """`::: jshard COMMAND` becomes its help; the name of a file outside docs/ appears under the pointer."""
    if page.file.src_path == "cli.md":
        markdown = re.sub(r"^::: jshard (.+)$", help_of, markdown, flags=re.MULTILINE)
    return re.sub(r"\[([^]]+)\]\(\.\./([^)]+)\)", r'<span title="\2">\1</span>', markdown)


def help_of(command: re.Match[str]) -> str:
    """The help of a command, as a block."""
    os.environ.update(COLUMNS="76", NO_COLOR="1")
    with io.StringIO() as out, contextlib.redirect_stdout(out):
        with contextlib.suppress(SystemExit):
            main([*command[1].split(), "--help"])
        return f"```text\n{out.getvalue().strip()}\n```"
