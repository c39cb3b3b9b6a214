"""The kinds of drafters: a small model, n-grams of the text, recycled tokens of the target."""
