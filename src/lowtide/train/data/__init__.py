"""Training data: sources of samples by number, and the batches of each step.

>>> from lowtide.train.data import Batches, Synthetic
>>> source = Synthetic(samples=64, seq_length=8, vocab_size=32)
>>> batches = Batches(source, batch_size=2, data_rank=0, data_ranks=1, seed=0, samples_per_step=4)
>>> [batch.tokens.shape for batch in batches.for_step(0)]
[torch.Size([2, 8]), torch.Size([2, 8])]
"""

from lowtide.train.data.batches import Batch, Batches, batches_of
from lowtide.train.data.sample import LEFT_OUT, Sample, Source
from lowtide.train.data.source import source_of
from lowtide.train.data.synthetic import Synthetic

__all__ = ["LEFT_OUT", "Batch", "Batches", "Sample", "Source", "Synthetic", "batches_of", "source_of"]
