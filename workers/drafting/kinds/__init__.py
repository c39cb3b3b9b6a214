"""The kinds of drafters: a model, n-grams of the text, recycled tokens of the target."""
