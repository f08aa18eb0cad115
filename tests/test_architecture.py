"""The shape of the library: arrows between rooms point down, no file circles, a small public face, words."""

import ast
import doctest
import inspect
import pathlib
import re
from collections import Counter, defaultdict
from functools import cache

import jshard as js
from jshard import engine

PACKAGE = pathlib.Path(js.__file__).parent

# From top to bottom: a room imports those below it, and itself. What stands outside of a room is on the ground.
CORE = ("api", "linen", "engine", "plans")
ROOMS = (
    *("cli", "train", "launch", "occupancy", "cluster", "recipes", "data", "in_memory", "checkpoint", "inspect"),
    *("parallel", "kernels", *CORE, "facts", "ground"),
)
MOST_PARAMETERS = 9
SMALL = 80  # lines: what is shorter and has one importer belongs to it

# Exceptions that are there today.
FRAGMENTS: set[str] = set()


@cache
def sources() -> dict[str, str]:
    """The text of every module, by its dotted name."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(("jshard", *path.relative_to(PACKAGE).with_suffix("").parts))
        found[name.removesuffix(".__init__")] = path.read_text()
    return found


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(sources()[module])


def room(module: str) -> str:
    name = module.split(".")[1] if "." in module else "ground"
    return name if name in ROOMS else "cli" if name == "__main__" else "ground"


@cache
def imports(module: str, *, at_run_time: bool = False) -> frozenset[str]:
    """The modules of the library that one imports; with `at_run_time` those that it cannot be imported without."""
    nodes = tree(module).body if at_run_time else ast.walk(tree(module))
    found = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jshard"):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in sources() else node.module for name in names}
    return frozenset(found - {module, "jshard"})


def test_arrows_point_down():
    up = [
        f"{module} -> {other}"
        for module in sources()
        for other in imports(module)
        if ROOMS.index(room(module)) > ROOMS.index(room(other))
    ]
    assert not up, up


def test_no_file_imports_itself_through_others():
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join((*above[above.index(module) :], module))
        if module not in done:
            for other in imports(module, at_run_time=True):
                visit(other, (*above, module))
            done.add(module)

    for module in sources():
        visit(module, ())


def test_a_class_has_a_name_of_its_own():
    homes = defaultdict(list)
    for module in sources():
        for node in tree(module).body:
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(module)
    shared = {name: found for name, found in homes.items() if len(found) > 1}
    assert not shared


def test_a_fragment_belongs_to_its_importer():
    importers = Counter(other for module in sources() for other in imports(module))
    small = {
        module: text.count("\n")
        for module, text in sources().items()
        if text.count("\n") < SMALL and importers[module] == 1 and not module.startswith("jshard.cli")
    }
    assert small.keys() == FRAGMENTS, small


def test_engine_and_plans_import_no_linen():
    linen = [
        module
        for module in sources()
        if room(module) in ("engine", "plans")
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Import | ast.ImportFrom) and "linen" in ast.unparse(node)
    ]
    assert not linen


def test_the_idea_of_the_engine_runs():
    """The example in its package docstring, on eight devices."""
    result = doctest.testmod(engine)
    assert result.attempted > 10 and not result.failed


def test_the_public_face_is_small():
    functions = {name: getattr(js, name) for name in dir(js) if inspect.isfunction(getattr(js, name))}
    counted = {
        name: len([p for p in inspect.signature(f).parameters.values() if p.kind != p.VAR_KEYWORD])
        for name, f in functions.items()
    }
    assert not {name: n for name, n in counted.items() if n > MOST_PARAMETERS}


def test_no_frame_of_a_caller_is_read():
    assert {module for module, text in sources().items() if "sys._getframe" in text} == set()


WORDS = re.compile(
    r"\b(lies?|lied|told|(?<!def )(?<!\.)tells?|likewise|be it|There is no such|born sharded|reckons?"
    r"|leave (one|\w+ \w+) away|that there (is|are) not|without a word|goes on|went on|held against|of one's own"
    r"|as it comes|nobody|whoever|anew|in vain|lets? (it|them) go|speaks|is none of)\b"
)


def test_the_words_are_those_of_the_field():
    root = PACKAGE.parent
    names = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md")
    pages = [*map(root.joinpath, names), *root.glob("docs/*.md"), *root.glob("models/*.py")]
    pages += [*root.glob("tests/**/*.py"), *root.glob("benchmarks/**/*.py")]
    pages.remove(pathlib.Path(__file__))  # it has the words
    texts = {**sources(), **{str(path.relative_to(root)): path.read_text() for path in pages}}
    found = [
        f"{name}:{number}: {line.strip()}"
        for name, text in texts.items()
        for number, line in enumerate(text.splitlines(), 1)
        if WORDS.search(line)
    ]
    assert not found
