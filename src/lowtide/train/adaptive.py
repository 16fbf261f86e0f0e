"""A run that adapts itself: the adaptive session of one rank, as the runner uses it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from lowtide.adaptive.session import Adaptive
from lowtide.planner.plan import Plan
from lowtide.policy import LayerPolicy, Policy
from lowtide.report.adapt import adaptive_text
from lowtide.runtime.limits import Limits
from lowtide.train.job import Job
from lowtide.train.mesh import Meshes
from lowtide.train.pipeline import planned_pipeline
from lowtide.train.run import Run
from lowtide.train.run_directory import RunDirectory

__all__ = ["fixed_decisions", "make_adaptive"]

logger = logging.getLogger(__name__)


def make_adaptive(
    run: Run,
    job: Job,
    meshes: Meshes,
    optimizers: Sequence[torch.optim.Optimizer],
    fixed: Policy | None,
    directory: RunDirectory,
    limits: Limits | None = None,
) -> Adaptive:
    """The session that each step of this rank is run through; ``fixed`` is the Policy that the file asks for."""
    assert run.adapt is not None
    return Adaptive(
        job.models,
        optimizers,
        run.adapt,
        fixed=fixed_decisions(fixed, run.placement.num_layers),
        pipeline=planned_pipeline(run),
        stage=meshes.pipeline.get_local_rank(),
        layers=job.layers,
        directory=directory.path,
        limits=limits,
        host_is_meant=True,  # the runner has put it where the file says
        say=_say,
        report=_report,
    )


def fixed_decisions(policy: Policy | None, layers: int) -> Policy | None:
    """What of the file's Policy is a decision: None where it says nothing, and everything is the plan's.

    Multi-token-prediction layers have none in the adaptive mode: they keep their activations.
    """
    if policy is None or all(layer == LayerPolicy() for layer in policy.layers[:layers]):
        return None
    return replace(policy, layers=policy.layers[:layers])


def _say(text: str) -> None:
    logger.info("adaptive: %s", text)


def _report(plan: Plan) -> None:
    logger.info("the plan\n%s", adaptive_text(plan))  # one record, so that the table stays whole
