"""What an answer must look like, as a grammar: JSON schemas, regular expressions, choices, grammars, structural tags.

Knows: the fields response_format and structured_outputs, which keywords of JSON Schema are enforced, limits on sizes.
Does not know: tokens, what a grammar costs (runtime/grammar.py), requests, the model's formats of tool calls.

A schema is enforced or refused, by the path and the keyword: nothing of it is ignored but annotations and keywords that
JSON Schema does not know. Some valid documents are never written: see docs/serving.md.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from runtime.frontend.validation import RequestError
from runtime.grammar import GrammarError, library

MOST_TEXT: Final = 1 << 16  # characters of a schema, regular expression or grammar, or of all choices
MOST_DEPTH: Final = 32
MOST_PROPERTIES: Final = 1000
MOST_OPTIONAL: Final = 400  # properties of one object that are not required: any of them may be next
MOST_REPEATS: Final = 1 << 14  # characters, items or properties that a schema counts
FORMATS: Final = {
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
}  # fmt: skip
REFUSED_KEYWORDS: Final = {
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames",
    "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems", "unevaluatedProperties",
    "additionalItems", "$anchor", "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor", "x-guidance",
}  # fmt: skip
_OF_SCHEMAS: Final = ("properties", "patternProperties", "$defs", "definitions")
_LISTS: Final = ("anyOf", "allOf", "oneOf", "prefixItems")
_COUNTS: Final = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
# Between tokens of JSON a model may write a blank, or a line break and its indentation, not blanks for ever. Escapes of
# code points would count as six characters of a text each, or be halves of a surrogate pair.
_JSON: Final = {"x-guidance": {"whitespace_pattern": r"\x20|\n[\x20\t]{0,40}", "json_allowed_escapes": 'nrbtf\\"'}}
TEXT: Final = r"/(.|\n)*/"  # of Lark: any text
NONE_ADDED: Final[Mapping[str, int]] = {}


def structured(
    *,
    json: object = None,
    regex: str | None = None,
    choice: Sequence[str] | None = None,
    grammar: str | None = None,
    json_object: bool | None = None,
    structural_tag: object = None,
) -> str:
    """SamplingParams.grammar of one of these; vLLM's structured_outputs has them under the same names.

    ``json``: a JSON schema, as an object or its text. ``choice``: one of these texts. ``grammar``: Lark, or EBNF as in
    llama.cpp. ``json_object``: any JSON object. ``structural_tag``: free text; where a trigger is written, one of the
    tags that begin with it follows. Raises RequestError for anything else, and where llguidance is not installed.
    """
    given = {
        "json": json, "regex": regex, "choice": choice, "grammar": grammar, "json_object": json_object or None,
        "structural_tag": structural_tag,
    }  # fmt: skip
    return of_structured_outputs({name: value for name, value in given.items() if value is not None})


def of_structured_outputs(
    given: object, where: str = "structured_outputs", added: Mapping[str, int] = NONE_ADDED
) -> str:
    """The grammar; "" for None and for no constraint. ``added``: ids of the tokenizer's added tokens: tags are those
    tokens where they spell them. Raises RequestError, with ``where`` as its field."""
    if given is None or given == {}:
        return ""
    try:
        if not isinstance(given, Mapping):
            raise _refused(where, f"is {_shown(given)}, but must be an object")
        off = (None, False) if "json_object" in given else (None,)
        kinds = {name: value for name, value in given.items() if not any(value is one for one in off)}
        if len(kinds) != 1:
            raise _refused(
                where, f"has {', '.join(sorted(map(str, kinds))) or 'nothing'}, but must have one constraint"
            )
        name, value = next(iter(kinds.items()))
        if name not in (*_KINDS, "structural_tag"):
            raise _refused(f"{where}.{name}", f"is not supported; there are {', '.join(_KINDS)}, structural_tag")
        if name == "structural_tag":
            return _tags(value, f"{where}.{name}", added)
        return _KINDS[name](value, f"{where}.{name}")
    except RequestError as error:
        error.field = where
        raise


def of_response_format(given: object, added: Mapping[str, int] = NONE_ADDED) -> str:
    """The same of OpenAI's response_format."""
    try:
        if given is None or given == {"type": "text"}:
            return ""
        kind = given.get("type") if isinstance(given, Mapping) else None
        if kind == "json_object":
            return _object(True, "response_format")
        if kind == "json_schema" and isinstance(given, Mapping):
            described = given.get("json_schema")
            if not isinstance(described, Mapping) or "schema" not in described:
                raise _refused("response_format.json_schema", 'has no schema: send {"name": ..., "schema": {...}}')
            return of_schema(described["schema"], "response_format.json_schema.schema")
        if kind == "structural_tag":
            return _tags(given, "response_format", added)
        raise _refused(
            "response_format.type", f"is {_shown(kind)}, but must be text, json_object, json_schema or structural_tag"
        )
    except RequestError as error:
        error.field = "response_format"
        raise


def of_schema(schema: object, where: str) -> str:
    """JSON that ``schema`` allows."""
    return f"start: {json_rule(schema, where)}\n"


def json_rule(schema: object, where: str) -> str:
    """What a rule of Lark says for JSON that ``schema`` allows."""
    if isinstance(schema, str):
        try:
            schema = json.loads(_bounded(schema, where))
        except (ValueError, RecursionError) as error:
            raise _refused(where, f"is no JSON: {error}") from None
    checked = _Schema().checked(schema, where, 1)
    if checked is False:
        raise _refused(where, "is false: no document is allowed")
    written = json.dumps(_JSON | ({} if checked is True else checked))
    return f"%json {_bounded(written, where)}"


def after_reasoning(grammar: str, marks: tuple[str, str], prompt: str, added: Mapping[str, int]) -> str:
    """``grammar`` for what follows the reasoning, which stands between the two ``marks``. It is over if the rendered
    ``prompt`` ends with the last, and has begun if that ends with the first; otherwise there may be none."""
    prompt, (first, last) = prompt.rstrip(), marks
    if prompt.endswith(last):
        return grammar
    begun = prompt.endswith(first)
    start = "thoughts BLANKS? @answer" if begun else f"({written(first, added)} thoughts BLANKS?)? @answer"
    thoughts = upto("thoughts", last, added)
    outer = f"start: {start}\n{thoughts}\nTEXT: {TEXT}\nBLANKS: /[ \\n]{{1,4}}/\n"
    return json.dumps({"grammars": [{"lark_grammar": outer}, {"name": "answer", "lark_grammar": grammar}]})


def written(text: str, added: Mapping[str, int]) -> str:
    """What a rule of Lark says for ``text``, in which added tokens are those tokens: letters never spell them."""
    names = sorted((name for name in added if name and name in text), key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
    return " ".join(f"<[{added[part]}]>" if part in names else _quoted(part) for part in parts if part) or '""'


def upto(rule: str, mark: str, added: Mapping[str, int]) -> str:
    """The rule of Lark for any TEXT up to ``mark``, which belongs to it."""
    spelled = min((mark.find(name) for name in added if name and name in mark), default=len(mark))
    if spelled == len(mark):
        return f"{rule}[lazy]: TEXT {_quoted(mark)}"
    if spelled == 0:
        return f"{rule}: TEXT {written(mark, added)}"
    before, text = re.escape(mark[:spelled]).replace("/", r"\/"), f"{rule.upper()}_TEXT"
    return f"{rule}: {text} {written(mark[spelled:], added)}\n{text}: /(.|\\n)*{before}/"


# ---- one kind each: its value, and its name in errors ----


def _object(value: object, where: str) -> str:
    if value is not True:
        raise _refused(where, f"is {_shown(value)}, but must be true")
    return of_schema({"type": "object"}, where)


def _regex(value: object, where: str) -> str:
    text = _bounded(_text(value, where), where)
    return f"start: /{_library(where).regex_to_lark(text)}/\n"


def _choice(value: object, where: str) -> str:
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise _refused(where, f"is {_shown(value)}, but must be a list of texts")
    return f"start: {_bounded(' | '.join(_quoted(_text(one, where)) for one in value), where)}\n"


def _grammar(value: object, where: str) -> str:
    text = _bounded(_text(value, where), where)
    _library(where)
    try:
        return str(importlib.import_module("llguidance.gbnf_to_lark").any_to_lark(text))
    except Exception as error:
        raise _refused(where, f"is neither Lark nor EBNF: {error}") from None


def _tags(value: object, where: str, added: Mapping[str, int]) -> str:
    """{"structures": [{"begin", "schema", "end"}], "triggers": [...]}."""
    if isinstance(value, str):
        try:
            value = json.loads(_bounded(value, where))
        except (ValueError, RecursionError) as error:
            raise _refused(where, f"is no JSON: {error}") from None
    described = value if isinstance(value, Mapping) else {}
    structures, triggers = described.get("structures"), described.get("triggers")
    if not (isinstance(structures, list) and isinstance(triggers, list) and structures and triggers):
        raise _refused(where, 'must be {"type": "structural_tag", "structures": [...], "triggers": [...]}')
    tags = []
    for at, one in enumerate(structures):
        here = f"{where}.structures[{at}]"
        if not isinstance(one, Mapping):
            raise _refused(here, f"is {_shown(one)}, but must be an object")
        begin, end = (_text(one.get(name), f"{here}.{name}") for name in ("begin", "end"))
        trigger = next((t for t in triggers if isinstance(t, str) and t and begin.startswith(t)), None)
        if trigger is None:
            raise _refused(f"{here}.begin", f"is {_shown(begin)}, which begins with none of the triggers")
        rule = json_rule(one.get("schema", True), f"{here}.schema")
        tags.append((trigger, f"{written(begin[len(trigger) :], added)} {rule} {written(end, added)}"))
    return triggered(tags, added)


def triggered(tags: Sequence[tuple[str, str]], added: Mapping[str, int]) -> str:
    """Free text in which, where a trigger is written, one of the rules with it says what follows: ``tags`` has
    (trigger, what a rule of Lark says)."""
    by_trigger: dict[str, list[str]] = {}
    for trigger, rule in tags:
        by_trigger.setdefault(trigger, []).append(rule)
    names, lines = [], []
    for at, (trigger, rules) in enumerate(by_trigger.items()):
        names.append(f"tag_{at}")
        lines += [upto(f"before_{at}", trigger, added), f"tag_{at}: before_{at} ({' | '.join(rules)})"]
    return "\n".join([f"start: ({' | '.join(names)})* TEXT", f"TEXT: {TEXT}", *lines, ""])


_KINDS: Final[Mapping[str, Callable[[Any, str], str]]] = {
    "json": of_schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "json_object": _object,
}


class _Schema:
    """Checks one schema."""

    def __init__(self) -> None:
        self._properties = 0

    def checked(self, schema: object, where: str, depth: int) -> Any:
        """``schema`` without what says nothing. Raises RequestError."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise _refused(where, f"is {_shown(schema)}, but must be a schema")
        if depth > MOST_DEPTH:
            raise _refused(where, f"is nested deeper than {MOST_DEPTH} schemas")
        found: dict[str, Any] = {}
        for keyword, value in schema.items():
            here = f"{where}.{keyword}"
            if keyword == "uniqueItems" and value is False:
                continue
            if keyword in REFUSED_KEYWORDS or (keyword == "$id" and depth > 1):
                raise _refused(where, f"keyword {keyword!r} is not supported")
            if keyword in _OF_SCHEMAS:
                if not isinstance(value, Mapping):
                    raise _refused(here, f"is {_shown(value)}, but must be an object")
                self._properties += len(value)
                if self._properties > MOST_PROPERTIES:
                    raise _refused(here, f"is one property more than {MOST_PROPERTIES} of the whole schema")
                required = schema["required"] if isinstance(schema.get("required"), list) else []
                optional = value.keys() - {name for name in required if isinstance(name, str)}
                if keyword == "properties" and len(optional) > MOST_OPTIONAL:
                    raise _refused(here, f"has more than {MOST_OPTIONAL} properties that are not required")
                value = {name: self.checked(one, f"{here}.{name}", depth + 1) for name, one in value.items()}
            elif keyword in _LISTS:
                if not isinstance(value, list) or not value:
                    raise _refused(here, f"is {_shown(value)}, but must be a list of schemas")
                value = [self.checked(one, f"{here}[{at}]", depth + 1) for at, one in enumerate(value)]
            elif keyword in ("items", "additionalProperties"):
                if isinstance(value, list):
                    raise _refused(here, "is a list: send prefixItems")
                value = self.checked(value, here, depth + 1)
            else:
                self._check_value(keyword, value, schema, here)
            found[keyword] = value
        return found

    def _check_value(self, keyword: str, value: object, schema: Mapping[str, object], where: str) -> None:
        if keyword in _COUNTS and (not isinstance(value, int) or not 0 <= value <= MOST_REPEATS):
            raise _refused(where, f"is {_shown(value)}, but must be 0 to {MOST_REPEATS}")
        if keyword == "minProperties" and isinstance(value, int):
            required = schema.get("required")
            if value > 1 + (len(required) if isinstance(required, list) else 0):  # a name may be written twice
                raise _refused(where, f"is {value}, which needs more than one property that is not required")
        if keyword == "format" and value not in FORMATS:
            raise _refused(where, f"is {_shown(value)}, but of formats there are {', '.join(sorted(FORMATS))}")
        if keyword == "$ref":
            parts = value.split("/") if isinstance(value, str) else []
            if value != "#" and not (len(parts) == 3 and parts[:2] in (["#", "$defs"], ["#", "definitions"])):
                raise _refused(where, f"is {_shown(value)}, but must be # or #/$defs/NAME")


def _refused(where: str, why: str) -> RequestError:
    return RequestError(f"{where}: {why}" if why.startswith("keyword") else f"{where} {why}")


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise _refused(where, f"is {_shown(value)}, but must be a text")
    return value


def _bounded(text: str, where: str) -> str:
    if len(text) > MOST_TEXT:
        raise _refused(where, f"has {len(text)} characters, but may have {MOST_TEXT}")
    return text


def _library(where: str) -> Any:
    try:
        return library()
    except GrammarError as error:
        raise _refused(where, f"cannot be used: {error}") from None


def _quoted(text: str) -> str:
    """As a text of Lark."""
    return json.dumps(text) if text else '""'


def _shown(value: object) -> str:
    return repr(value)[:60] if isinstance(value, str | int | float | type(None)) else f"of type {type(value).__name__}"
