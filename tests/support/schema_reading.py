"""What the tests of the sections share: every section, and the problems of a value."""

from __future__ import annotations

from typing import Any

from lowtide.config.problem import Problem, Problems
from lowtide.config.schema import Settings, read_sections
from lowtide.config.schema.catalogue import SECTIONS, section_class
from lowtide.config.schema.field import Section

__all__ = ["ALL_SECTIONS", "errors", "only_error", "only_warning", "read"]

for name in SECTIONS:
    section_class(name)  # imports it
ALL_SECTIONS = sorted(Section.__subclasses__(), key=lambda section: section.__name__)


def read(value: Any) -> tuple[Settings, Problems]:
    problems = Problems()
    return read_sections(value, problems), problems


def errors(value: Any) -> list[Problem]:
    return read(value)[1].errors


def only_error(value: Any) -> Problem:
    found = errors(value)
    assert len(found) == 1, [problem.message for problem in found]
    return found[0]


def only_warning(value: Any) -> Problem:
    problems = read(value)[1]
    assert not problems.errors, [problem.message for problem in problems.errors]
    assert len(problems.warnings) == 1, [problem.message for problem in problems.warnings]
    return problems.warnings[0]
