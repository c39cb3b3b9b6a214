"""Pure arithmetic that decides which candidates are accepted. Logits in, a Verdict out.

Nothing here keeps state, reads a clock or draws a random number: the noise is a function of the
request's seed and of the position. Shapes in names: T rows of a step, V vocabulary, N some of the
vocabulary's tokens, P tokens of a prefix.
"""
