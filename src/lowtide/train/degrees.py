"""Whether a model can be sharded as a run asks; found before anything is built."""

from __future__ import annotations

from math import gcd

from lowtide.errors import PlanError
from lowtide.models.shape import DecoderShape
from lowtide.train.run import Degrees

__all__ = ["check_degrees", "heads_to_spread"]


def check_degrees(model: str, shape: DecoderShape, degrees: Degrees, sequence: int) -> None:
    """PlanError, in the words of the command's options, if the model's heads, experts or tokens do not divide."""
    tensor, expert, data, context = degrees.tensor, degrees.expert, degrees.data, degrees.context
    heads = heads_to_spread(shape)
    if heads % tensor:
        groups = "" if shape.latent is not None else f" and {shape.num_key_value_heads} key-value heads"
        raise PlanError(
            f"--tp {tensor}: {model} has {shape.num_attention_heads} attention heads{groups}, which tensor parallel"
            f" splits evenly; possible are {_divisors(heads)}"
        )
    if heads % (tensor * context):
        raise PlanError(
            f"--cp {context}: its ranks get some of the heads each in attention; {model} has {heads // tensor} of"
            f" queries and keys on a rank; possible are {_divisors(heads // tensor)}"
        )
    if sequence % context:
        raise PlanError(f"--cp {context}: samples of {sequence} tokens (--seq) cannot be split evenly over these ranks")
    if context > 1 and (expert > 1 or degrees.replicate > 1):
        other = "--ep" if expert > 1 else "--replicate"
        raise PlanError(f"--cp {context}: the runner does not train it with {other}; leave one of them out")
    sequence //= context
    if degrees.sequence_parallel and sequence % tensor:
        raise PlanError(f"--tp {tensor}: samples of {sequence} tokens (--seq) cannot be split evenly over these ranks")
    if shape.experts is not None and shape.experts.intermediate_size % tensor:
        inner = shape.experts.intermediate_size
        raise PlanError(
            f"--tp {tensor}: experts of {model} have an inner width of {inner}, which tensor parallel splits evenly;"
            f" possible are {_divisors(gcd(heads, inner))}"
        )
    if expert == 1:
        return
    if shape.experts is None:
        raise PlanError(f"--ep {expert}: {model} is dense; leave --ep out")
    if data % expert:
        raise PlanError(
            f"--ep {expert}: experts are spread over data-parallel ranks, of which there are {data} (--dp); possible"
            f" are {_divisors(gcd(data, shape.experts.count))}"
        )
    if shape.experts.count % expert:
        raise PlanError(
            f"--ep {expert}: {model} has {shape.experts.count} experts a layer, which cannot be spread evenly; possible"
            f" are {_divisors(gcd(data, shape.experts.count))}"
        )


def heads_to_spread(shape: DecoderShape) -> int:
    """What divides both the heads of queries and those of keys: ranks get equal numbers of both."""
    heads = shape.num_attention_heads
    return heads if shape.latent is not None else gcd(heads, shape.num_key_value_heads)


def _divisors(number: int) -> str:
    return ", ".join(str(one) for one in range(1, number + 1) if number % one == 0)
