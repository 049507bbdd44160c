"""Every regular expression that stands in the product takes time that grows with its text, not with its square: one
long line of a host, a log or a file would stop a reader for minutes otherwise."""

from __future__ import annotations

import ast
import importlib
import re
import signal
from collections.abc import Iterable, Iterator
from itertools import product

from tests.test_house import modules

LENGTH = 30_000  # a quadratic one takes a second, a linear one a few milliseconds
CPU_S = 0.3
METHODS = ("match", "search", "fullmatch", "sub", "subn", "findall", "finditer", "split")
# where what is searched is cut to so many characters first, or cannot be longer
SHORT = {
    r"(.+?)-(.+?)(?:-py\d.*)?\.(?:dist-info|egg-info)$": 255,  # a file's name
    r"Kernel Module[^\n]*?\s(\d{1,4}\.\d{1,4}(?:\.\d{1,4})?)\s": 1000,
    r"\[(.*/.*)\]": 200,
}
CLASSES = {"category_word": "a", "category_digit": "1", "category_space": " "}
CLASSES |= {"category_not_word": "-", "category_not_digit": "x", "category_not_space": "x"}


def calls_of(tree: ast.AST) -> Iterator[tuple[str, str, ast.Call]]:
    """Calls of methods by what they are called on, as far as that is a name."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
        ):
            yield node.func.value.id, node.func.attr, node


def expressions() -> Iterator[tuple[str, str, str | bytes, int, str]]:
    """Each one's module, line or name, text, flags, and the method that it is used by."""
    used: dict[str, set[str]] = {}
    trees = {name: ast.parse(path.read_text()) for name, path in modules().items()}
    for tree in trees.values():
        for of, method, _ in calls_of(tree):
            used.setdefault(of, set()).add(method)
    for name, tree in trees.items():
        for of, method, call in calls_of(tree):
            if of == "re" and method in METHODS and isinstance(call.args[0], ast.Constant):
                flags = sum(
                    getattr(re, n.attr) for n in ast.walk(call) if isinstance(n, ast.Attribute) and n.attr.isupper()
                )
                yield name, f"line {call.lineno}", call.args[0].value, flags, method
        if not any((of, method) == ("re", "compile") for of, method, _ in calls_of(tree)):
            continue
        made = [
            target.id for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign) for target in names(node)
        ]
        for own in made:
            for number, found in enumerate(patterns(getattr(importlib.import_module(f"hetctl.{name}"), own, None))):
                methods = used.get(own, set()) & set(METHODS) or {"search"}
                yield from ((name, f"{own} {number}", found.pattern, found.flags, method) for method in sorted(methods))


def names(node: ast.Assign | ast.AnnAssign) -> Iterator[ast.Name]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return (n for target in targets for n in ast.walk(target) if isinstance(n, ast.Name))


def patterns(value: object) -> Iterator[re.Pattern[str] | re.Pattern[bytes]]:
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, list | tuple | set | frozenset):
        for one in value:
            yield from patterns(one)
    elif isinstance(value, dict):
        yield from patterns(tuple(value.values()))


def characters(parsed: Iterable[object]) -> Iterator[str]:
    """One for each set and each literal that an expression tells apart."""
    for item in parsed:
        op, value = item if isinstance(item, tuple) and len(item) == 2 else (None, item)
        word = str(op).lower()
        if word in ("literal", "not_literal"):
            yield chr(value) if word == "literal" else ("x" if value != ord("x") else "y")
        elif word == "range":
            yield chr(value[0])
        elif word == "category":
            yield CLASSES[str(value).lower()]
        elif word == "any":
            yield "x"
        elif isinstance(value, list | tuple) or hasattr(value, "data"):
            yield from characters([value] if isinstance(value, tuple) and len(value) == 2 else value)
        elif hasattr(item, "data"):
            yield from characters(item)


def words(parsed: Iterable[object]) -> Iterator[str]:
    """What an expression begins with, and its longest beginnings: text that makes it go on until something lacks."""
    text = ""
    for item in parsed:
        first = next(characters([item]), "")
        text += first
        yield text


def attacks(pattern: str | bytes, flags: int, length: int) -> Iterator[str]:
    parsed = re._parser.parse(pattern, flags & ~re.UNICODE if isinstance(pattern, bytes) else flags)  # type: ignore[attr-defined]
    known = list(dict.fromkeys(characters(parsed)))[:12]
    units = [*known, *("".join(pair) for pair in product(known[:6], repeat=2) if pair[0] != pair[1]), *words(parsed)]
    starts = ["", *list(words(parsed))[:4]]
    for unit in filter(None, dict.fromkeys(units)):
        for start in starts:
            yield start + unit * (length // len(unit)) + "\0"


class Slow(BaseException):
    """More CPU time than any text of this length may cost."""


def stop(*_: object) -> None:
    raise Slow


def takes_long(method: str, pattern: str | bytes, flags: int, text: str) -> bool:
    made = re.compile(pattern, flags)
    subject: str | bytes = text.encode("utf-8", "replace") if isinstance(pattern, bytes) else text
    call = getattr(made, method)
    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    try:
        if method in ("sub", "subn"):
            call(subject[:0], subject)
        else:
            found = call(subject)
            if method == "finditer":
                list(found)
    except Slow:
        return True
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    return False


def test_no_expression_takes_quadratic_time() -> None:
    slow = set()
    for module, where, pattern, flags, method in expressions():
        if not set("*+,") & set(pattern if isinstance(pattern, str) else pattern.decode("latin-1")):
            continue  # nothing in it is repeated without end
        length = SHORT.get(pattern, LENGTH)
        texts = attacks(pattern, flags, length)
        if bad := next((t for t in texts if all(takes_long(method, pattern, flags, t) for _ in range(2))), None):
            slow.add(f"{module} {where}: {pattern!r}.{method} of {bad[:12]!r}..")
    assert not slow, "\n".join(sorted(slow))
