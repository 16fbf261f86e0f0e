"""The sections of a training file, typed: what each key means, and what lowtide does with it.

>>> from lowtide.config.problem import Problems
>>> read_sections({"parallel_config": {"pipeline_stage": 4}}, Problems()).parallel_config.pipeline_stage
4
"""

from typing import Any

from lowtide.config.schema.sections import read_sections
from lowtide.config.schema.settings import Settings

__all__ = ["Settings", "json_schema", "read_sections"]


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a training file, both layouts, for editors and other checkers."""
    from lowtide.config.schema.document_schema import document_schema

    return document_schema()
