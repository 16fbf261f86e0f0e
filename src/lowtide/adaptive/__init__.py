"""Profile, plan and switch while training, and survive out of memory. :func:`lowtide.adapt` is its one call."""
