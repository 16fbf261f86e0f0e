"""lowtide inside the training loops of other frameworks: one file each, and none is imported before it is used."""
