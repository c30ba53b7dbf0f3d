"""The pages of docs/reference/, made from docstrings: `python tests/reference_page.py docs/reference`."""

import ast
import dataclasses
import enum
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import get_args

from pydantic import BaseModel

# One page for each public namespace, with its title.
PAGES = {
    "stretto": "stretto",
    "stretto.parallel": "Regions",
    "stretto.nn": "Blocks and losses",
    "stretto.data": "Data",
    "stretto.plan": "Plans and profiles",
    "stretto.train": "Training",
    "stretto.checkpoint": "Checkpoints",
    "stretto.serve": "Using a trained model",
    "stretto.exchange": "Import and export",
    "stretto.report": "Reports",
    "stretto.launch": "Machines and clusters",
    "stretto.testing": "Checks for your own tests",
}


def reference_pages() -> dict[str, str]:
    """Return the pages by file name; errors have a page of their own."""
    return {f"{module.removeprefix('stretto.')}.md": _page(module, title) for module, title in PAGES.items()}


def _page(module: str, title: str) -> str:
    namespace = import_module(module)
    lines = [f"# {title}", "", f"`{module}`: {_text(namespace)}", ""]
    for name in namespace.__all__:
        value = getattr(namespace, name)
        if not inspect.ismodule(value):
            lines += _entry(name, value)
    return "\n".join(lines).rstrip() + "\n"


def _entry(name: str, value: object) -> Iterator[str]:
    yield f"## {name}"
    yield ""
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        yield from _alias(name, value)
    elif inspect.isclass(value) and issubclass(value, Exception):
        bases = ", ".join(f"`{base.__name__}`" for base in value.__bases__)
        yield f"Subclass of {bases}; exit code {getattr(value, 'exit_code', 1)}. {_text(value)}"
        yield ""
    else:
        if not _is_plain(value):
            yield from _fenced(name, _arguments(value), _returned(value))
        yield _text(value)
        yield ""
        if inspect.isclass(value):
            yield from _members(value)


def _alias(name: str, value: object) -> Iterator[str]:
    """A name for a type, with the string below it."""
    sources = (inspect.getsource(module) for key, module in [*sys.modules.items()] if key.startswith("stretto."))
    pattern = re.compile(rf"^{name}\b[^=\n]*=", re.MULTILINE)
    body = ast.parse(next(source for source in sources if pattern.search(source))).body
    yield f"`{name} = {re.sub(r'[a-z_.]+[.](?=[A-Z])', '', str(value))}`"
    yield ""
    for node, after in pairwise(body):
        is_alias = ast.unparse(node).startswith(f"{name} =")
        if is_alias and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            yield from (inspect.cleandoc(str(after.value.value)), "")


def _is_plain(value: object) -> bool:
    """Is this a class that nobody makes one of by hand?"""
    if not inspect.isclass(value):
        return False
    return issubclass(value, enum.Enum | BaseModel) or bool(getattr(value, "_is_protocol", False))


def _fenced(name: str, arguments: list[str], returned: str) -> Iterator[str]:
    whole = f"{name}({', '.join(arguments)}){returned}"
    if len(whole) > 78:
        whole = f"{name}(\n    " + ",\n    ".join(arguments) + f",\n){returned}"
    # Not a snippet that runs.
    yield from ("```py", whole, "```", "")


def _arguments(value: object) -> list[str]:
    """What a function, or a class that is called, takes, as its source has it."""
    if inspect.isclass(value):
        if dataclasses.is_dataclass(value):
            return [f"{name}: {kind}{default}" for name, kind, default in _given(value)]
        makers = [kind for kind in value.__mro__ if "__init__" in vars(kind) and kind.__module__.startswith("stretto")]
        if not makers:
            return []
        value = vars(makers[0])["__init__"]
    node = _node(value).args
    if node.args and node.args[0].arg in ("self", "cls"):
        del node.args[0]
    return _split_arguments(node)


def _split_arguments(node: ast.arguments) -> list[str]:
    missing: list[ast.expr | None] = [None] * (len(node.args) - len(node.defaults))
    parts = [_argument(*pair) for pair in zip(node.args, [*missing, *node.defaults], strict=True)]
    if node.vararg is not None:
        parts.append(f"*{ast.unparse(node.vararg)}")
    elif node.kwonlyargs:
        parts.append("*")
    return parts + [_argument(*pair) for pair in zip(node.kwonlyargs, node.kw_defaults, strict=True)]


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    what = "" if default is None else f" = {ast.unparse(default)}"
    return f"{ast.unparse(argument)}{what}".replace("'", '"')


def _given(kind: type) -> Iterator[tuple[str, str, str]]:
    """The fields that a dataclass is made from, as its source, and that of the classes it extends, has them."""
    written: dict[str, ast.AnnAssign] = {}
    for base in reversed(kind.__mro__):
        if dataclasses.is_dataclass(base):
            body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
            assert isinstance(body, ast.ClassDef)
            written |= {
                node.target.id: node
                for node in body.body
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
            }
    for item in dataclasses.fields(kind):
        if item.init and not item.name.startswith("_"):
            node = written[item.name]
            is_made = item.default_factory is not dataclasses.MISSING
            default = " = ..." if is_made else "" if node.value is None else f" = {ast.unparse(node.value)}"
            if "help" in item.metadata:
                default = f" = {item.default!r}"
            yield item.name, ast.unparse(node.annotation).replace("'", '"'), default.replace("'", '"')


def _returned(value: object) -> str:
    if not inspect.isfunction(value):
        return ""
    node = _node(value)
    text = "None" if node.returns is None else ast.unparse(node.returns).strip("'")
    if any(ast.unparse(decorator) == "contextmanager" for decorator in node.decorator_list):
        # The function itself is a generator; what a caller gets is for `with`.
        text = text.replace("Iterator", "AbstractContextManager")
    return "" if text == "None" else f" -> {text}".replace("'", '"')


def _node(function: object) -> ast.FunctionDef:
    assert callable(function)
    node = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body[0]
    assert isinstance(node, ast.FunctionDef)
    return node


def _text(value: object) -> str:
    # A generated docstring of a dataclass is its signature, which says nothing more.
    own = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    # Markdown takes indented lines right below a line of text for more text.
    return inspect.cleandoc(own or "").replace("Example:\n    ", "Example:\n\n    ")


def _members(kind: type) -> Iterator[str]:
    if issubclass(kind, enum.Enum):
        yield from ("| member | value |", "|---|---|", *(f"| `{item.name}` | `{item.value!r}` |" for item in kind), "")
        return
    fields = list(_fields(kind))
    if fields:
        yield from ("| field | default | meaning |", "|---|---|---|")
        for name, default, meaning in fields:
            yield f"| `{name}` | {default} | {meaning} |"
        yield ""
    methods = list(_methods(kind))
    yield from methods
    if methods:
        yield ""


def _fields(kind: type) -> Iterator[tuple[str, str, str]]:
    if issubclass(kind, BaseModel):
        for name, field in kind.model_fields.items():
            default = "*required*" if field.is_required() else f"`{field.get_default(call_default_factory=True)!r}`"
            meaning = field.description or ""
            for model in (field.annotation, *get_args(field.annotation)):
                if inspect.isclass(model) and issubclass(model, BaseModel):
                    meaning = meaning or _text(model)
                    is_made = model is field.annotation and not field.is_required()
                    default = f"`{model.__name__}()`" if is_made else default
            yield name, default.replace("|", "\\|"), " ".join(meaning.split())
    elif dataclasses.is_dataclass(kind):
        helps = {item.name: item.metadata["help"] for item in dataclasses.fields(kind) if "help" in item.metadata}
        said = _comments(kind) | helps
        for name, _, default in _given(kind):
            if said.get(name):
                yield name, f"`{default.removeprefix(' = ')}`" if default else "", said[name]


def _comments(kind: type) -> dict[str, str]:
    """The comment that stands behind a field, or the string below it."""
    source = textwrap.dedent(inspect.getsource(kind))
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    lines, found = source.splitlines(), {}
    for number, node in enumerate(body.body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            _, _, comment = lines[(node.end_lineno or 1) - 1].partition("  # ")
            after = body.body[number + 1] if number + 1 < len(body.body) else None
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                comment = str(after.value.value)
            found[node.target.id] = " ".join(comment.split())
    return found


def _methods(kind: type) -> Iterator[str]:
    for name, member in vars(kind).items():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if name.startswith("_") or not inspect.isfunction(function):
            continue
        paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
        said = " ".join(" ".join(text for text in paragraphs if not text.startswith(" ")).split())  # without diagrams
        if not said and any(name in vars(base) for base in kind.__mro__[1:]):
            # As the class says that it extends.
            continue
        call = "" if isinstance(member, property) else f"({', '.join(_arguments(function))})"
        yield f"- `{name}{call}{_returned(function)}`{': ' * bool(said)}{said}"


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    for name, content in reference_pages().items():
        (folder / name).write_text(content)
