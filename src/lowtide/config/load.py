"""Read a Policy from a file, whichever form it has."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from pathlib import Path as FilePath

from lowtide.errors import ConfigError, PolicyError
from lowtide.policy import Policy

__all__ = ["load_policy"]

_GZIP = b"\x1f\x8b"
_POLICY = re.compile(rb'\s*{[^{}\[\]]*"lowtide_policy"')
_PLAN = re.compile(rb'\s*{[^{}\[\]]*"lowtide_plan"')
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
    if _POLICY.match(data) or _YAML_POLICY.search(data):
        return Policy.load(path)
    if data.startswith(_GZIP) or _PLAN.match(data):
        return _from_plan(file, data)
    return _from_training_file(file)


def _from_plan(file: str | FilePath, data: bytes) -> Policy:
    try:
        return Policy.from_json(json.loads(gzip.decompress(data) if data.startswith(_GZIP) else data)["policy"])
    except (EOFError, OSError, zlib.error, ValueError, RecursionError, KeyError, TypeError, PolicyError) as error:
        raise PolicyError(f"{file} is not a plan: {type(error).__name__}: {error}") from None


def _from_training_file(file: str | FilePath) -> Policy:
    from lowtide.config.check import check_file

    check = check_file(file)
    check.raise_errors()
    if check.policy is None:
        raise ConfigError(f"{file}: there are no recompute or swap settings in it")
    return check.policy
