"""Plan files: JSON that people read, edit and compare, and that nothing but data can come from.

A plan file may come from a stranger: it is at most 4 MB and 50,000 values, plain JSON with finite numbers and
no key twice, and every field is checked. That bounds the time to refuse one to about a second.
"""

import json
from math import isinf
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from partitioner.cluster import problems
from partitioner.errors import PlanError
from partitioner.files import read_text, write_text
from partitioner.garbage import no_collection
from partitioner.plan import PLAN_VERSION, Plan

MAX_FILE_BYTES = 4 * 1024 * 1024
MAX_VALUES = 50_000
_MAX_COMMAS = 3 * MAX_VALUES  # between values; names may hold some too
_LINE = 140


def save(plan: Plan, path: Path) -> None:
    """Write the plan, whole or not at all."""
    write_text(path, dumps(plan))


def load(path: Path) -> Plan:
    """The plan in a file. Raises PlanError, naming the field, where there is none."""
    return _checked(read_text(path, MAX_FILE_BYTES, PlanError, "plan file"), str(path))


def dumps(plan: Plan) -> str:
    return _written(plan.model_dump(mode="json", by_alias=True)) + "\n"


def loads(text: str) -> Plan:
    """Inverse of `dumps`."""
    if len(text) > MAX_FILE_BYTES:
        raise PlanError(f"a plan of {len(text):,} characters: plans have at most {MAX_FILE_BYTES:,}")
    return _checked(text, "this text")


@no_collection()
def _checked(text: str, where: str) -> Plan:
    if text.count(",") > _MAX_COMMAS:  # before it is parsed: a million of empty lists take memory too
        raise PlanError(f"{where} holds more than {MAX_VALUES:,} values; no plan is that long")
    try:
        data = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_distinct)
    except RecursionError:
        raise PlanError(f"{where} is nested too deeply to be a plan; write it with plan.save(…)") from None
    except ValueError as error:
        raise PlanError(f"{where} is no JSON that a plan may have: {str(error)[:200]}; write it with plan.save(…)") from None
    if not isinstance(data, dict):
        raise PlanError(f"{where} holds a {type(data).__name__}, not the fields of a plan; write it with plan.save(…)")
    version = data.get("version")
    if isinstance(version, bool) or version != PLAN_VERSION:
        shown = f"version {str(version)[:20]}" if isinstance(version, int | float | str) else "no version"
        raise PlanError(f"{where} has {shown}; this release reads plans of version {PLAN_VERSION}: make the plan again with make_plan(…)")
    if _size(data) > MAX_VALUES:
        raise PlanError(f"{where} holds more than {MAX_VALUES:,} values; no plan is that long")
    if missing := [name for name, field in Plan.model_fields.items() if field.is_required() and name not in data]:
        raise PlanError(f"{where} is no plan: it has no {', '.join(missing)}; write it with plan.save(…)")
    try:
        return Plan.model_validate_json(json.dumps(data, allow_nan=False))
    except ValidationError as error:
        raise PlanError(f"{where} is no plan: {problems(error, data)}") from None
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{where} is no plan: {str(error)[:200]}") from None


def _size(data: Any) -> int:
    """How many values a tree holds, counted no further than the limit."""
    count, left = 0, [data]
    while left and count <= MAX_VALUES:
        item = left.pop()
        count += 1
        if isinstance(item, dict | list):
            left.extend(item.values() if isinstance(item, dict) else item)
    return count


def _finite(text: str) -> float:
    number = float(text)
    if isinf(number):
        raise ValueError(f"{text[:40]} is more than a number can be")
    return number


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no finite number")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:80]!r} stands twice in one object")
    return fields


def _written(value: Any, indent: int = 0) -> str:
    """JSON with every object and list that fits on a line on one line, so that a plan is about as long as its decisions."""
    flat = json.dumps(value, ensure_ascii=False)
    if len(flat) + indent <= _LINE or not isinstance(value, dict | list) or not value:
        return flat
    pad = " " * (indent + 1)
    if isinstance(value, dict):
        lines = [f"{pad}{json.dumps(key, ensure_ascii=False)}: {_written(item, indent + 1)}" for key, item in value.items()]
        return "{\n" + ",\n".join(lines) + "\n" + " " * indent + "}"
    return "[\n" + ",\n".join(pad + _written(item, indent + 1) for item in value) + "\n" + " " * indent + "]"
