"""The narrow waist: a Policy says, for every layer and operator, keep, recompute or swap.

Plain data; imports nothing of lowtide but errors and units, and nothing of torch.
"""

from lowtide.policy.decision import Decision, Keep, Recompute, Swap
from lowtide.policy.pattern import Match, NameTree, Pattern
from lowtide.policy.policy import (
    CollectiveRule,
    Communication,
    LayerPolicy,
    Policy,
    Rule,
    format_layers,
    parse_layers,
)
from lowtide.policy.resolution import Catalogue, Operator, Resolution, ResolvedLayer, Setting, Unused
from lowtide.policy.resolve import resolve

__all__ = [
    "Catalogue",
    "CollectiveRule",
    "Communication",
    "Decision",
    "Keep",
    "LayerPolicy",
    "Match",
    "NameTree",
    "Operator",
    "Pattern",
    "Policy",
    "Recompute",
    "Resolution",
    "ResolvedLayer",
    "Rule",
    "Setting",
    "Swap",
    "Unused",
    "format_layers",
    "parse_layers",
    "resolve",
]
