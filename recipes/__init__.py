"""Demo recipe: corpus, training and evaluation of the demo model; not part of the wheel."""
