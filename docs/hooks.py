"""What MkDocs runs: in cli.md `::: jshard COMMAND` becomes what `jshard COMMAND --help` prints."""

import contextlib
import io
import os
import re

from jshard.cli import main


def on_page_markdown(markdown: str, *, page, **_) -> str:
    """The text of a page, before it is Markdown's."""
    return re.sub(r"^::: jshard (.+)$", help_of, markdown, flags=re.M) if page.file.src_path == "cli.md" else markdown


def help_of(command: re.Match[str]) -> str:
    """The help of a command, as a block."""
    os.environ.update(COLUMNS="100", NO_COLOR="1")
    with io.StringIO() as out, contextlib.redirect_stdout(out):
        with contextlib.suppress(SystemExit):
            main([*command[1].split(), "--help"])
        return f"```text\n{out.getvalue().strip()}\n```"
