"""Demo recipe: the corpus, the training and the evaluation of the demo model; not part of the wheel."""
