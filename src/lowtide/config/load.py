"""Read a Policy from a file, whichever form it has."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from pathlib import Path as FilePath
from typing import Any

from lowtide.errors import ConfigError, PolicyError
from lowtide.policy import Policy

__all__ = ["load_policy"]

_GZIP = b"\x1f\x8b"
_YAML_POLICY = re.compile(rb"^lowtide_policy *:", re.MULTILINE)


def load_policy(file: str | FilePath) -> Policy:
    """Read the Policy in ``file``.

    The file's content decides what it is, not its name:

    - a Policy as JSON or YAML, as :meth:`Policy.save` or ``lowtide plan -o`` wrote it;
    - a whole plan, as ``lowtide plan --save`` or ``--json`` wrote it: its Policy;
    - a training file: the Policy that its recompute and swap settings ask for, such as ``lowtide plan --yaml`` writes.

    Raises ConfigError with all problems of a training file, and PolicyError where a Policy or a plan is damaged.

    ``policy = load_policy("pretrain_llama.yaml")``
    """
    path = FilePath(file)
    data = path.read_bytes() if path.is_file() else b""
    if data.startswith(_GZIP):
        try:
            data = gzip.decompress(data)
        except (EOFError, OSError, zlib.error) as error:
            raise PolicyError(f"{file} is not a plan: {error}") from None
    if data.lstrip().startswith(b"{"):
        policy = _from_json(file, data)
        if policy is not None:
            return policy
    elif _YAML_POLICY.search(data):
        return _from_yaml(path)
    return _from_training_file(file)


def _from_json(file: str | FilePath, data: bytes) -> Policy | None:
    """The Policy of a Policy file or a plan; None where it is neither, such as a training file in YAML's flow style."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        if re.match(rb'\s*{\s*"lowtide_(policy|plan)"', data):
            raise PolicyError(f"{file}: not a Policy: {error}") from None
        return None
    if not isinstance(value, dict):
        return None
    policy = value.get("policy") if "lowtide_plan" in value else value
    return _policy(file, policy) if "lowtide_plan" in value or "lowtide_policy" in value else None


def _from_yaml(path: FilePath) -> Policy:
    from lowtide.config.parse import load_document
    from lowtide.config.problem import Problems

    problems = Problems()
    document = load_document(path, problems)
    problems.raise_errors()
    return _policy(path, document.value)


def _policy(file: str | FilePath, value: Any) -> Policy:
    try:
        return Policy.from_json(value)
    except PolicyError as error:
        raise PolicyError(f"{file}: {error}") from None


def _from_training_file(file: str | FilePath) -> Policy:
    from lowtide.config.check import check_file

    check = check_file(file)
    check.raise_errors()
    if check.policy is None:
        raise ConfigError(f"{file}: there are no recompute or swap settings in it")
    return check.policy
