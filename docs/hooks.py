"""What MkDocs runs on each page, so that the site needs nothing beside it.

- The help of commands is filled in.
- Files of the repository that a page links to, such as tests, reports and job files, become pages under `files/`.
- Notebooks become pages.
- Figures are put into the page, where they take its colours.
- Types of other libraries in the reference link to the documentation of those.
"""

import contextlib
import html
import io
import json
import os
import posixpath
import re
from collections.abc import Callable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexer import Lexer
from pygments.lexers import BashLexer, TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound

from jshard.cli import main

ROOT = Path(__file__).resolve().parents[1]

# A link without a scheme; images begin with the same.
_LINK = re.compile(r"\]\(([^()\s:#]+)(#[^()\s]*)?\)")
# Brackets in code are no links.
_CODE = re.compile(r"(^```.*?^```|`[^`\n]*`)", re.MULTILINE | re.DOTALL)
# Alone in its line: a drawing is a block.
_FIGURE = re.compile(r"^!\[([^]]+)\]\((figures/[\w-]+\.svg)\)$", re.MULTILINE)
# The copy button then leaves the prompt out.
_CONSOLE = re.compile(r"^```\n(?=\$ )", re.MULTILINE)
# Ticks of docs/support.md link to these.
_DEFINITION = re.compile(r"^(?:async )?(?:def|class) (\w+)")

# In the search they would hide the pages that explain.
_NOT_SEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"

_ALSO = ("CHANGELOG.md",)  # in the menu, and no page links to it

# The names that annotations of public functions have, by the pages that document them.
_PYTHON = "https://docs.python.org/3/library"
_JAX = "https://docs.jax.dev/en/latest"
_FLAX = "https://flax.readthedocs.io/en/latest/api_reference"
_OPTAX = "https://optax.readthedocs.io/en/latest/api"
_NUMPY = "https://numpy.org/doc/stable/reference"
_OTHER_LIBRARIES = {
    "jax.Array": f"{_JAX}/_autosummary/jax.Array.html",
    "jax.ShapeDtypeStruct": f"{_JAX}/_autosummary/jax.ShapeDtypeStruct.html",
    "jax.sharding.Mesh": f"{_JAX}/jax.sharding.html",
    "jax.sharding.AbstractMesh": f"{_JAX}/jax.sharding.html",
    "jax.stages.Lowered": f"{_JAX}/jax.stages.html",
    "jax.stages.Compiled": f"{_JAX}/jax.stages.html",
    "jax.typing.ArrayLike": f"{_JAX}/jax.typing.html",
    "jax.typing.DTypeLike": f"{_JAX}/jax.typing.html",
    "flax.linen.Module": f"{_FLAX}/flax.linen/module.html",
    "flax.nnx.Module": f"{_FLAX}/flax.nnx/module.html",
    "flax.nnx.Optimizer": f"{_FLAX}/flax.nnx/training/optimizer.html",
    "flax.nnx.Param": f"{_FLAX}/flax.nnx/variables.html",
    "flax.nnx.Rngs": f"{_FLAX}/flax.nnx/rnglib.html",
    "flax.nnx.filterlib.Filter": f"{_FLAX}/flax.nnx/filterlib.html",
    "optax.GradientTransformation": f"{_OPTAX}/transformations.html",
    "optax.GradientTransformationExtraArgs": f"{_OPTAX}/transformations.html",
    "optax.Schedule": f"{_OPTAX}/optimizer_schedules.html",
    "numpy.ndarray": f"{_NUMPY}/generated/numpy.ndarray.html",
    "numpy.typing.DTypeLike": f"{_NUMPY}/typing.html",
    "fractions.Fraction": f"{_PYTHON}/fractions.html#fractions.Fraction",
    "os.PathLike": f"{_PYTHON}/os.html#os.PathLike",
    "pathlib.Path": f"{_PYTHON}/pathlib.html#pathlib.Path",
    "typing.Any": f"{_PYTHON}/typing.html#typing.Any",
    "typing.Literal": f"{_PYTHON}/typing.html#typing.Literal",
    "typing.Protocol": f"{_PYTHON}/typing.html#typing.Protocol",
    "typing.TextIO": f"{_PYTHON}/typing.html#typing.TextIO",
    **{
        f"collections.abc.{name}": f"{_PYTHON}/collections.abc.html#collections.abc.{name}"
        for name in ("Callable", "Collection", "Generator", "Iterable", "Iterator", "Mapping", "Sequence")
    },
}


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the notebooks as pages, then the files outside docs/ that pages link to, and those that these link to."""
    for file in list(files):
        if file.src_uri.endswith(".ipynb"):
            text = text_of_notebook(ROOT / "docs" / file.src_uri)
            files.append(File.generated(config, page_of(f"docs/{file.src_uri}"), content=text))
    waiting = list(_ALSO)
    for file in files.documentation_pages():
        waiting += files_outside(file.content_string, source_of(file.src_uri))
    added: set[str] = set()
    while waiting:
        path = waiting.pop()
        if path in added:
            continue
        added.add(path)
        files.append(file_of(path, config))
        if path.endswith(".md"):
            waiting += files_outside((ROOT / path).read_text(), path)
    return files


def file_of(path: str, config: MkDocsConfig) -> File:
    """Returns a file of the repository as one of the site: a picture as it is, anything else as a page."""
    if path.endswith(".svg"):
        return File.generated(config, page_of(path), abs_src_path=str(ROOT / path))
    return File.generated(config, page_of(path), content=text_of_file(path))


def on_nav(nav: object, *, config: MkDocsConfig, **_: object) -> None:
    """Tells the plugin of references where other libraries document their types."""
    references = config.plugins["autorefs"]
    for name, url in _OTHER_LIBRARIES.items():
        references.register_url(name, url)


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """Fills in the help of commands, and leads each link to a page of the site."""
    if page.file.src_uri == "cli.md":
        markdown = re.sub(r"^::: jshard (.+)$", help_of, markdown, flags=re.MULTILINE)
    markdown = _CONSOLE.sub("```console\n", markdown)
    markdown = _FIGURE.sub(figure_of, markdown)

    here = page.file.src_uri
    folder = posixpath.dirname(here) or "."
    source = source_of(here)

    def to_page(link: re.Match[str]) -> str:
        target = target_of(link[1], source)
        if target is None:
            return link[0]
        anchor = link[2] or ""
        relative = posixpath.relpath(page_of(target), folder)
        return f"]({relative}{anchor})"

    return outside_code(markdown, lambda text: _LINK.sub(to_page, text))


def outside_code(markdown: str, change: Callable[[str], str]) -> str:
    """Returns the text with what is not code changed."""
    pieces = _CODE.split(markdown)
    for number in range(0, len(pieces), 2):  # those between are the code
        pieces[number] = change(pieces[number])
    return "".join(pieces)


def files_outside(markdown: str, source: str) -> list[str]:
    """Returns the files outside docs/ to which a text links, by their paths in the repository."""
    targets: list[str] = []

    def collect(text: str) -> str:
        for link in _LINK.finditer(text):
            target = target_of(link[1], source)
            if target is not None and not target.startswith("docs/"):
                targets.append(target)
        return text

    outside_code(markdown, collect)
    return targets


def target_of(link: str, source: str) -> str | None:
    """Returns the path in the repository to which a file links; None: there is no such file."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    if not (ROOT / path).is_file():
        return None  # an address, a title of the same page, or a mistake that MkDocs reports
    return path


def page_of(path: str) -> str:
    """Returns the name among the site's sources of a file of the repository."""
    if path.endswith(".ipynb"):
        path = path.removesuffix(".ipynb") + ".md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.endswith((".md", ".svg")):
        return f"files/{path}"
    return f"files/{path}.md"


def source_of(page: str) -> str:
    """Returns the path in the repository from which a page was made, or one in the same folder."""
    if not page.startswith("files/"):
        return f"docs/{page}"
    path = page.removeprefix("files/")
    if (ROOT / path).is_file():
        return path  # Markdown keeps its name
    return path.removesuffix(".md")


def text_of_file(path: str) -> str:
    """Returns a page with a file: Markdown as it is, anything else as code in which tests can be linked to."""
    text = (ROOT / path).read_text()
    if path.endswith(".md"):
        return _NOT_SEARCHED + text
    lexer = lexer_of(path, text)
    # A lexer drops empty lines at the start: then the lines of the code would not be those of the file.
    lexer.stripnl = False
    block = highlight(text, lexer, HtmlFormatter(cssclass="highlight", wrapcode=True))
    opening, _, rest = block.partition("<code>")
    code, _, closing = rest.rpartition("</code>")
    of_file = text.removesuffix("\n").split("\n")
    of_block = code.removesuffix("\n").split("\n")
    # A line is a span, as the theme's style sheet expects it.
    lines = [f"<span{anchor_of(line)}>{code}\n</span>" for line, code in zip(of_file, of_block, strict=True)]
    title = posixpath.basename(path)
    shown = f"{opening}<code>{''.join(lines)}</code>{closing}"
    return f"{_NOT_SEARCHED}# {title}\n\n`{path}` of the repository:\n\n{shown}"


def lexer_of(path: str, text: str) -> Lexer:
    """Returns the lexer for a file, by its name or by its first line."""
    with contextlib.suppress(ClassNotFound):
        return get_lexer_for_filename(path)
    if text.startswith("#!"):
        return BashLexer()  # the job script of Slurm
    return TextLexer()


def anchor_of(line: str) -> str:
    """Returns what makes a line of code that defines a test or a class one that links can name."""
    definition = _DEFINITION.match(line)
    return f' id="{definition[1]}"' if definition else ""


def text_of_notebook(path: Path) -> str:
    """Returns a notebook as Markdown, its first line with a link to the file that Jupyter opens."""
    pieces: list[str] = []
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        is_code = cell["cell_type"] == "code"
        pieces.append(f"```python\n{text}\n```" if is_code else text)
    note = f'The same as a notebook to run: <a href="../{path.name}" download>{path.name}</a>.'
    title, *rest = pieces
    return "\n\n".join([title, note, *rest]) + "\n"


def figure_of(image: re.Match[str]) -> str:
    """Returns a figure as part of the page, for the page's style sheet to colour."""
    drawing = (ROOT / "docs" / image[2]).read_text().strip()
    label = html.escape(image[1])  # for readers of screens, as the picture is no longer an image
    return f'<figure class="drawing" role="img" aria-label="{label}">\n{drawing}\n</figure>'


def help_of(command: re.Match[str]) -> str:
    """Returns the help of a command, as a block."""
    os.environ.update(COLUMNS="76", NO_COLOR="1")
    with io.StringIO() as out, contextlib.redirect_stdout(out):
        with contextlib.suppress(SystemExit):
            main([*command[1].split(), "--help"])
        return f"```text\n{out.getvalue().strip()}\n```"
