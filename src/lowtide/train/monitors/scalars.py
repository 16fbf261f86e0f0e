"""A step as named numbers, for services that draw curves."""

from __future__ import annotations

from lowtide.train.record import StepRecord

__all__ = ["scalars"]


def scalars(record: StepRecord) -> dict[str, float]:
    """The numbers of a step worth a curve, by the name of the curve."""
    values = {
        "loss": record.loss,
        "learning_rate": record.learning_rate,
        "loss_scale": record.loss_scale,
        "seconds": record.seconds,
        "tokens_per_second": record.tokens_per_second,
        "samples": float(record.samples),
        "skipped": float(record.skipped),
    }
    if record.global_norm is not None:
        values["global_norm"] = record.global_norm
    if record.evaluation_loss is not None:
        values["evaluation_loss"] = record.evaluation_loss
    if record.mfu is not None:
        values["mfu"] = record.mfu
    if record.peak_bytes is not None:
        values["peak_bytes"] = float(record.peak_bytes)
    values |= {f"loss/{name}": value for name, value in record.losses.items()}
    values |= {f"drop_rate/{layer}": rate for layer, rate in record.drop_rates.items()}
    return values
